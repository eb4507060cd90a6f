"""Profiles of three networks of `examples/`, and what profiling adds to a step.

mpiexec -n 2 python benchmarks/profile.py [words: networks whose title has one of them]

A step is value, gradient and adam. Steps are timed in turns without and with the profiler; the overhead is the ratio of
the medians. Tables are printed; out/benchmarks/profile.json has all numbers.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import beside
import lenet5
import transformer
import unet3d
from training import Data, loss

from harness.steps import OPTIMISER

ROUNDS, STEPS = 5, 20
FOLDER = Path("out/benchmarks")

P_all = dj.Partition()


def networks() -> Iterator[tuple[str, Callable, Any, tuple]]:
    """Yield titles, losses of this worker's part, parameters and batches."""
    draw = np.random.default_rng(0)
    images, labels = draw.random((256, 1, 28, 28), np.float32), np.eye(10, dtype=np.float32)[np.arange(256) % 10]
    network = lenet5.lenet5(P_all)
    batch = lenet5.local_blocks(network, Data(images, labels))
    yield "LeNet-5, batch 256", partial(loss, network), network.init(jax.random.key(0)), (batch,)
    voxels, P = 48, unet3d.volume_partition(P_all, P_all.size)
    u_net = unet3d.UNet3d(P, (8, 16, 32))
    x = beside.block(draw.random((1, unet3d.SEEN, voxels, voxels, voxels), np.float32), P)

    def error(params: Any, x: jax.Array) -> jax.Array:
        return unet3d.squared_error(u_net, params, x, x[:, :1], voxels**3)

    yield f"3-D U-Net, {voxels}³", error, u_net.init(jax.random.key(0), jnp.float32), (x,)
    size = Namespace(layers=2, width=256, heads=8)
    characters = transformer.Transformer(P_all, 96, size, "ring")
    batch = characters.batch(draw.integers(0, 96, (8, 257)))
    params = characters.init(jax.random.key(0), "float32")
    yield "transformer, ring, 8 x 256 of 256", characters.part_of_loss, params, (batch,)


def step_of(value_and_grad: Callable) -> Callable:
    """Return a step with adam."""

    @dj.jit
    def step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, jax.Array]:
        value, gradient = value_and_grad(params, *batch)
        updates, state = OPTIMISER.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def seconds(step: Callable, *args: Any) -> float:
    """Return the seconds of a step without the profiler, of the slowest worker."""
    start = time.perf_counter()
    for _ in range(STEPS):
        jax.block_until_ready(step(*args))
    return max(P_all.allgather_data((time.perf_counter() - start) / STEPS))


def main() -> None:
    """Profile, print and write."""
    rows = []
    for title, part, params, batch in networks():
        if sys.argv[1:] and not any(word in title for word in sys.argv[1:]):
            continue
        step, args = step_of(dj.value_and_grad(part)), (params, OPTIMISER.init(params), *batch)
        profile = dj.profile(step, *args, steps=STEPS)
        without, within = [], []
        for _ in range(ROUNDS):
            without.append(seconds(step, *args))
            within.append(float(dj.profile(step, *args, steps=STEPS).seconds.max()))
        rows.append({"network": title, "workers": P_all.size, "without": without, "within": within})
        rows[-1]["profile"] = json.loads(profile.to_json())
        if P_all.rank == 0:
            ratio = statistics.median(within) / statistics.median(without)
            print(f"\n{title}, {P_all.size} workers\n\n{profile}\n")
            print(f"without the profiler {1e3 * statistics.median(without):.3g} ms; with it {ratio:.3f} times as long")
    if P_all.rank == 0:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"profile-{P_all.size}.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
