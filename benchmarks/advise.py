"""Steps of the network that `dj.advise` makes, beside the same network with its batch or its space split alone.

mpiexec -n 4 python benchmarks/advise.py [--machine machine.toml] [words: networks whose title has one of them]

A step is value, gradient and adam. A split that a network can't have (more workers than samples, say) is left out.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import nn
from distdl_jax.advice.graph import Graph
from distdl_jax.advice.network import Builder

from harness import Table, Way
from harness.steps import step

P_all = dj.Partition()


@dataclass(frozen=True)
class Described:
    """A network without partitions."""

    title: str
    layers: list[Any]
    x_shape: tuple[int, ...]


def block(dims: int, channels: int) -> list[Any]:
    """Return a convolution with a normalisation and a residual."""
    conv = getattr(nn, f"conv{dims}d")(out_channels=channels, kernel_size=3, padding="same")
    return [conv, nn.group_norm(num_groups=4), jax.nn.relu, nn.skip(conv, jax.nn.relu)]


NETWORKS = (
    Described("images, 64², batch 16", [*block(2, 16), nn.max_pool2d(kernel_size=2), *block(2, 32)], (16, 3, 64, 64)),
    Described("one image, 512²", [*block(2, 8), nn.max_pool2d(kernel_size=2), *block(2, 16)], (1, 3, 512, 512)),
    Described("volumes, 32³, batch 4", [*block(3, 8), nn.max_pool3d(kernel_size=2), *block(3, 16)], (4, 1, 32, 32, 32)),
    Described("wide, 64², batch 4", [*block(2, 4), nn.max_pool2d(kernel_size=8), *block(2, 256)], (4, 1, 64, 64)),
)


def pure_splits(described: Described) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the splits of one kind of dimension over all workers, by name."""
    p, dims = P_all.size, len(described.x_shape) - 2
    if described.x_shape[0] >= p:
        yield "batch", (p, 1, *(1,) * dims)
    yield "slabs", (1, 1, p, *(1,) * (dims - 1))
    side = math.isqrt(p)
    if side > 1 and side * side == p:
        yield "tiles", (1, 1, side, side, *(1,) * (dims - 2))


def way(name: str, network: nn.Sequential, spec: dj.TensorSpec) -> Way:
    """Return the network's step, of a loss that is the sum of squares."""
    params = network.init(jax.random.key(0), jnp.float32)
    x = jnp.asarray(np.random.default_rng(P_all.rank).random(spec.local_shape, np.float32))
    return step(name, dj.jit, dj.value_and_grad(lambda params, x: jnp.sum(network(params, x) ** 2)), params, x)


def main() -> None:
    """Advise, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="infiniband-hdr", help="name or path of a machine file")
    parser.add_argument("--rounds", type=int, default=9, help="of measurement, whose median counts")
    parser.add_argument("words", nargs="*", help="networks whose title has one of them; none for all")
    given = parser.parse_args()
    table = Table("advise", lasting=0.06)
    for described in NETWORKS:
        if given.words and not any(word in described.title for word in given.words):
            continue
        advice = dj.advise(described.layers, described.x_shape, workers=P_all, machine=given.machine)
        if P_all.rank == 0:
            print(described.title, advice.placement, flush=True)
        ways = [way("advised", advice.network, advice.x_spec)]
        graph = Graph(described.layers, described.x_shape, np.dtype(np.float32))
        for name, grid in pure_splits(described):
            network = Builder(graph, [grid] * len(graph.nodes), P_all).network()
            ways.append(way(name, network, dj.TensorSpec(described.x_shape, P_all.grid(grid))))
        table.row(described.title, ways, given.rounds)
    table.write()


if __name__ == "__main__":
    main()
