"""How networks scale to 131,072 workers on the machines whose files are shipped, foreseen: no worker is needed.

python benchmarks/scaling.py [--out docs] [words: networks whose title has one of them]

Writes scaling.md, and a picture of each network, into a folder. Strong scaling: the tensor is the same for all numbers
of workers, and the efficiency is the time of one worker / (workers x time). Weak scaling: every worker has as much, and
the efficiency is the time of one worker / time.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import distdl_jax as dj
import jax
import matplotlib
import numpy as np
from distdl_jax import nn

matplotlib.use("Agg")  # no screen
from matplotlib import pyplot

MACHINES = ("infiniband-hdr", "perlmutter-cpu", "omni-path")
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

    def cost(self, workers: int, machine: str) -> Any:
        """Foresee a step on a machine."""
        return dj.cost(*self.place(dj.planning_world(workers), self.weak), machine=machine)


CAUSAL = """\
Attention is causal. One worker computes the scores of all pairs of tokens. In a ring, pairs of blocks that the mask
empties are left out. So several workers have less to compute than one, and the efficiency is above 100 %."""
QUADRATIC = """\
The arithmetic of attention grows with the square of the tokens. So with as many tokens a worker, each worker computes
more the more workers there are."""

UP_TO_131_072, UP_TO_32 = (1, 8, 64, 512, 4096, 32768, 131072), (1, 2, 4, 8, 16, 32)
STUDIES = (
    Study("U-Net, 512^3", partial(volume, build=unet, side=512), UP_TO_131_072[:6]),
    Study("U-Net, 2048^3", partial(volume, build=unet, side=2048), UP_TO_131_072),
    Study("U-Net, 64^3 a worker", partial(volume, build=unet, side=64), UP_TO_131_072, weak=True),
    Study("FNO, 512^3", partial(volume, build=fno, side=512), UP_TO_131_072[:4]),
    Study("FNO, 64^3 a worker", partial(volume, build=fno, side=64), UP_TO_131_072[:4], weak=True),
    Study("Transformer, 32,768 tokens", partial(transformer, tokens=32768), UP_TO_32, note=CAUSAL),
    Study("Transformer, 1,024 tokens a worker", partial(transformer, tokens=1024), UP_TO_32, weak=True, note=QUADRATIC),
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


def row(study: Study, workers: int, machine: str) -> dict[str, Any]:
    """Return what is foreseen of one number of workers."""
    start = time.perf_counter()
    cost = study.cost(workers, machine)
    assert cost.seconds is not None and cost.once is not None
    times = [layer.times for layer in cost.layers if layer.times is not None] + [cost.once]
    slowest = int(np.argmax(sum(each.computing for each in times)))
    parts = {
        "arithmetic": sum(float(each.computing[slowest]) for each in times),
        "messages": sum(float(each.transfer[slowest]) for each in times),
        "waiting": sum(float(each.waiting[slowest]) for each in times),
    }
    took = time.perf_counter() - start
    print(f"{study.title}, {workers} workers, {machine}: {cost.seconds} (foreseen in {took:.1f} s)", flush=True)
    return {"workers": workers, "seconds": cost.seconds, "parts": parts, "memory": memory_text(cost)}


def memory_text(cost: Any) -> str:
    """Return the memory of the fullest worker, where layers say what they store."""
    try:
        return f"{cost.memory.max() / 2**30:.3g} GiB"
    except dj.PlanError:
        return "not foreseen"


def efficiency(study: Study, rows: Sequence[dict[str, Any]], each: dict[str, Any]) -> float:
    """Return the efficiency of a number of workers; the first row is of one worker."""
    workers = 1 if study.weak else each["workers"]
    return float(rows[0]["seconds"][1] / (each["seconds"][1] * workers))


def picture(study: Study, found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw the efficiency on each machine."""
    figure, axis = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for (machine, rows), mark in zip(found.items(), "os^", strict=True):
        workers = [each["workers"] for each in rows]
        axis.plot(workers, [efficiency(study, rows, each) for each in rows], marker=mark, label=machine)
    axis.set(xscale="log", xlabel="workers", ylabel="efficiency", ylim=(0, 1.15), title=study.title)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, metadata={"Date": None})


def section(study: Study, found: dict[str, list[dict[str, Any]]], picture_name: str) -> str:
    """Return the text of one network: its picture, a table, and where it stops and why."""
    lines = [f"## {study.title}", "", f"![Efficiency of {study.title} on each machine]({picture_name})", ""]
    lines += ["| workers | largest memory | " + " | ".join(f"{machine}: step, efficiency" for machine in found) + " |"]
    lines += ["|---:|---:|" + "---:|" * len(found)]
    for number, each in enumerate(next(iter(found.values()))):
        cells = [
            f"{seconds_text(rows[number]['seconds'][1])}, {efficiency(study, rows, rows[number]):.0%}"
            for rows in found.values()
        ]
        lines.append(f"| {each['workers']:,} | {each['memory']} | {' | '.join(cells)} |")
    lines += ["", *([study.note, ""] if study.note else [])]
    for machine, rows in found.items():
        below = next((each for each in rows if efficiency(study, rows, each) < 0.5), None)
        last = below or rows[-1]
        shares = {name: seconds / sum(last["parts"].values()) for name, seconds in last["parts"].items()}
        of = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        ends = "falls below 50 %" if below else "is still above 50 %"
        lines.append(
            f"- {machine}: the efficiency {ends} at {last['workers']:,} workers. The slowest one's step: {of}."
        )
    return "\n".join(lines)


def seconds_text(seconds: float) -> str:
    """Return a time with a unit.

    >>> seconds_text(0.00231), seconds_text(312.0)
    ('2.31 ms', '312 s')
    """
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


HEAD = """# How networks scale

How long a training step takes on 1 to 131,072 workers, foreseen by [`dj.cost`](cost.md) from the plans of the network
and the [files of machines](machines.md). Nothing on this page was run on these machines. Many numbers of the files are
guesses, so a time may be off by half. Efficiencies are surer, since guesses about arithmetic are in both times.

A worker is one core. Each worker of the U-Net and the FNO holds a box of the tensor; the boxes are as near to cubes as
the number of workers allows. Each worker of the transformer holds tokens that follow each other. Up to 256 workers, all
workers are played with a clock each. Beyond that, workers that do the same count as one, and each movement takes as
long as its slowest worker, whose partners are taken to be on other hosts.

Strong scaling: the tensor stays the same, and efficiency is the time of one worker / (workers x time). Weak scaling:
each worker's part stays the same, and efficiency is the time of one worker / time. One worker alone has the memory and
the clock of its host for itself. So part of what is lost up to a full host is arithmetic that becomes slower, not
messages.

`python benchmarks/scaling.py` wrote this page; with other networks, or another machine file, it writes yours."""


def main() -> None:
    """Write the page and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    sections = [HEAD]
    for study in STUDIES:
        if given.words and not any(word in study.title for word in given.words):
            continue
        found = {machine: [row(study, workers, machine) for workers in study.workers] for machine in MACHINES}
        name = "scaling-" + "".join(c if c.isalnum() else "-" for c in study.title.lower()).replace("--", "-") + ".svg"
        picture(study, found, given.out / name)
        sections.append(section(study, found, name))
    (given.out / "scaling.md").write_text("\n\n".join(sections) + "\n")


if __name__ == "__main__":
    main()
