"""How messages, bytes, arithmetic and memory of a worker grow with the number of workers: no worker is needed.

python benchmarks/scaling.py [--out docs/scaling.md] [words: networks whose title has one of them]

Writes a page with a table for each network, on up to 131,072 workers. Strong scaling: the tensor is the same for all
numbers of workers. Weak scaling: every worker has as much.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import distdl_jax as dj
import jax
from distdl_jax import nn

Shape = tuple[int, ...]


def unet(P: dj.Partition, channels: int = 8, levels: int = 4) -> nn.Sequential:
    """Return a U-Net of 41 layers in three dimensions, whose skips are sums."""

    def block(c_in: int, c_out: int) -> list[Any]:
        conv = nn.DistributedConv3d(P, in_channels=c_in, out_channels=c_out, kernel_size=3, padding=1)
        return [conv, nn.DistributedGroupNorm(P, 4, c_out), jax.nn.relu]

    def level(d: int, c_in: int) -> list[Any]:
        c = channels * 2**d
        layers = block(c_in, c) + block(c, c)
        if d + 1 < levels:
            up = nn.DistributedConvTranspose3d(P, in_channels=2 * c, out_channels=c, kernel_size=2, stride=2)
            layers.append(nn.Residual(nn.Sequential(nn.DistributedMaxPool3d(P, 2), *level(d + 1, c), up)))
        return layers + block(c, c)

    return nn.Sequential(*level(0, 1))


def fno(P: dj.Partition) -> nn.Sequential:
    """Return a Fourier neural operator in three dimensions: four blocks of 20 channels and 12 modes."""
    lift = nn.DistributedConv3d(P, in_channels=1, out_channels=20, kernel_size=1)
    blocks = [nn.DistributedFNOBlock(P, 20, 20, (12, 12, 12)) for _ in range(4)]
    return nn.Sequential(lift, *blocks, nn.DistributedConv3d(P, in_channels=20, out_channels=1, kernel_size=1))


Placed = tuple[nn.Sequential, dj.TensorSpec]
"""A network, and the spec of its input."""


def transformer(P_all: Any, weak: bool, tokens: int) -> Placed:
    """Return four blocks of a transformer, 512 wide with 8 heads, whose tokens are split over all workers."""
    p, width = P_all.size, 512
    P, rows, P_W = P_all.grid((1, p, 1)), P_all.grid((p, 1)), P_all.grid((p, 1, 1))
    layers: list[Any] = []
    for _ in range(4):
        attention = nn.DistributedMultiHeadAttention(P, width, 8, causal=True)
        up = nn.DistributedLinear(rows, rows, P_W, width, 4 * width)
        down = nn.DistributedLinear(rows, rows, P_W, 4 * width, width)
        each_token = (as_rows, up, jax.nn.gelu, down, as_sequence)
        layers.append(nn.Residual(nn.Sequential(nn.DistributedRMSNorm(P, width), attention)))
        layers.append(nn.Residual(nn.Sequential(nn.DistributedRMSNorm(P, width), *each_token)))
    return nn.Sequential(*layers), dj.TensorSpec((1, tokens * p if weak else tokens, width), P)


def as_rows(x: jax.Array) -> jax.Array:
    """Put the tokens of one sequence into rows."""
    return x.reshape(-1, x.shape[-1])


def as_sequence(x: jax.Array) -> jax.Array:
    """Put rows back into one sequence."""
    return x.reshape(1, *x.shape)


def volume(P_all: Any, weak: bool, build: Callable[[dj.Partition], nn.Sequential], side: int) -> Placed:
    """Return a network of a cube that is cut into boxes, or of one cube for each worker."""
    grid = near_cube(P_all.size)
    P = P_all.grid((1, 1, *grid))
    shape = [side * p for p in grid] if weak else [side] * 3
    return build(P), dj.TensorSpec((1, 1, *shape), P)


@dataclass(frozen=True)
class Study:
    """A network on ever more workers.

    - `place`: from all workers, and whether each has as much as one worker alone, to the network.
    - `workers`: how many; those of volumes a cube, or a cube times 2 or 4.
    - `note`: what a reader would wonder about.
    """

    title: str
    place: Callable[[Any, bool], Placed]
    workers: tuple[int, ...]
    weak: bool = False
    note: str = ""

    def cost(self, workers: int) -> Any:
        """Count a step."""
        return dj.cost(*self.place(dj.planning_world(workers), self.weak))


CAUSAL = """\
Attention is causal, and a ring skips pairs of blocks that the mask empties.
So several workers compute less than one."""

POWERS_OF_64 = (1, 64, 4096, 131072)
STUDIES = (
    Study("U-Net, 2048^3", partial(volume, build=unet, side=2048), POWERS_OF_64),
    Study("U-Net, 64^3 a worker", partial(volume, build=unet, side=64), POWERS_OF_64, weak=True),
    Study("FNO, 512^3", partial(volume, build=fno, side=512), (1, 8, 64, 512)),
    Study("Transformer, 32,768 tokens", partial(transformer, tokens=32768), (1, 2, 8, 32), note=CAUSAL),
)


def near_cube(workers: int) -> Shape:
    """Return three factors of a number that differ as little as can be.

    >>> near_cube(97336), near_cube(12)
    ((46, 46, 46), (3, 2, 2))
    """
    factors = (
        (workers // (b * c), b, c)
        for c in range(1, round(workers ** (1 / 3)) + 1)
        if workers % c == 0
        for b in range(c, math.isqrt(workers // c) + 1)
        if workers // c % b == 0
    )
    return min(factors, key=lambda each: each[0] - each[-1])


def row(study: Study, workers: int) -> str:
    """Return the numbers of the worker that has most, as a row of a table."""
    start = time.perf_counter()
    cost = study.cost(workers)
    took = time.perf_counter() - start
    print(f"{study.title}, {workers} workers: counted in {took:.1f} s", flush=True)
    try:
        memory = short(cost.memory.max() / 2**30)
    except dj.PlanError:
        memory = "not known"
    sends, nbytes, flops = cost.workers.operations.max(), cost.bytes.max() / 1e6, cost.flops.max() / 1e9
    cells = (f"{workers:,}", f"{sends:,}", short(nbytes), short(flops), memory)
    return f"| {' | '.join(cells)} |"


def short(number: float) -> str:
    """Return a number to three digits or more, without an exponent.

    >>> short(12345.6), short(0.01234)
    ('12,346', '0.0123')
    """
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def section(study: Study) -> str:
    """Return the text of one network."""
    lines = [f"## {study.title}", ""]
    lines += ["| workers | messages | MB sent | Gflop | GiB |", "|---:|---:|---:|---:|---:|"]
    lines += [row(study, workers) for workers in study.workers]
    return "\n".join([*lines, *(["", study.note] if study.note else [])])


HEAD = """# How networks scale

<!-- search: strong scaling, weak scaling, efficiency, speedup, thousands of ranks, supercomputer, exascale -->

The messages, bytes, flops and memory of a training step, of the worker with the most, counted by [`dj.cost`](cost.md)
([how sure](cost.md#how-sure-it-is)). Nothing on this page was run: there are no times.

A worker is one core with a box of a volume, nearly a cube, or with consecutive tokens. A collective counts as one
message. "A worker" in a title means weak scaling; the other tables are strong scaling.

A convolution sends the same number of messages on any number of workers, and the bytes of its halos fall with the
surface of a box. Group norms sum three numbers for each sample and group over all workers, and two for the gradient:
neither their messages nor their bytes grow with the workers. The FNO's Fourier transforms move the whole tensor.
Between them it drops the frequencies that it doesn't use, so that several workers together compute less than one.

`python benchmarks/scaling.py` wrote this page."""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/scaling.md"))
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    chosen = [each for each in STUDIES if not given.words or any(word in each.title for word in given.words)]
    given.out.write_text("\n\n".join([HEAD, *map(section, chosen)]) + "\n")


if __name__ == "__main__":
    main()
