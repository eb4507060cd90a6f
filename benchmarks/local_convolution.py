"""One worker's convolution by each algorithm, as the layers compute it, plain XLA among them.

NPROC=1 python benchmarks/local_convolution.py [--records FILE] [words: float32, float64, rows whose title has one]

Milliseconds of one thread with NPROC=1, the least of several in turns: of forward and of the gradients of input and
weight as programs of their own. In brackets the ratio to plain; * marks what is chosen where nothing was measured.
With --records they are added to FILE, such as distdl_jax/kernels/cpu/records.json, under the processor's name.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
from distdl_jax.kernels.convolution import chosen_unseen
from distdl_jax.kernels.cpu.choice import measured_algorithms
from distdl_jax.kernels.cpu.convolution import available
from distdl_jax.kernels.cpu.timing import machine
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.problem import DIRECTIONS, Problem
from mpi4py import MPI

from harness import Table

jax.config.update("jax_enable_x64", True)

# x, output channels, kernel, padding; stride, dilation, groups where they are not 1
SHAPES: dict[str, tuple[Any, ...]] = {
    "LeNet's first": ((16, 1, 28, 28), 6, 5, 2),
    "LeNet's second": ((16, 6, 14, 14), 16, 5, 0),
    "LeNet's first, batch 256": ((256, 1, 28, 28), 6, 5, 2),
    "LeNet's second, batch 256": ((256, 6, 14, 14), 16, 5, 0),
    "2-D, 1 -> 16": ((4, 1, 256, 256), 16, 3, 1),
    "2-D, 16 -> 1": ((4, 16, 256, 256), 1, 3, 1),
    "2-D, 8": ((4, 8, 64, 64), 8, 3, 1),
    "2-D, 16": ((4, 16, 129, 256), 16, 3, 1),
    "2-D, 16, small": ((32, 16, 32, 32), 16, 3, 1),
    "2-D, 64": ((4, 64, 64, 64), 64, 3, 1),
    "2-D, 3 -> 64, small": ((32, 3, 32, 32), 64, 3, 1),
    "2-D, 3 -> 64": ((4, 3, 128, 128), 64, 3, 1),
    "2-D, stride 2": ((4, 16, 64, 64), 32, 3, 1, 2),
    "2-D, stride 2, wide": ((32, 64, 32, 32), 128, 3, 1, 2),
    "2-D, dilation 2": ((4, 16, 64, 64), 16, 3, 2, 1, 2),
    "2-D, 4 groups": ((4, 32, 64, 64), 32, 3, 1, 1, 1, 4),
    "2-D, 32 groups": ((4, 128, 28, 28), 128, 3, 1, 1, 1, 32),
    "2-D, depthwise": ((8, 64, 64, 64), 64, 3, 1, 1, 1, 64),
    "1 x 1, 64": ((8, 64, 64, 64), 64, 1, 0),
    "1 x 1, stride 2": ((4, 256, 56, 56), 512, 1, 0, 2),
    "ResNet-50's first": ((4, 3, 224, 224), 64, 7, 3, 2),
    "ResNet-50, 56": ((4, 64, 56, 56), 64, 3, 1),
    "ResNet-50, 56, to 256": ((4, 64, 56, 56), 256, 1, 0),
    "ResNet-50, 56, from 256": ((4, 256, 56, 56), 64, 1, 0),
    "ResNet-50, 28": ((4, 128, 28, 28), 128, 3, 1),
    "ResNet-50, 14": ((4, 256, 14, 14), 256, 3, 1),
    "ResNet-50, 7": ((4, 512, 7, 7), 512, 3, 1),
    "ResNet-50, 7, to 2048": ((4, 512, 7, 7), 2048, 1, 0),
    "tiny, 2 x 2 pixels": ((32, 128, 2, 2), 128, 3, 1),
    "tiny, 2 x 4 pixels": ((32, 128, 2, 4), 128, 3, 1),
    "tiny, one pixel": ((4, 512, 1, 1), 512, 3, 1),
    "tiny, 5 x 5 taps": ((8, 64, 4, 4), 64, 5, 2),
    "tiny, stride 2": ((32, 64, 4, 4), 128, 3, 1, 2),
    "tiny, 8 channels": ((32, 8, 2, 2), 8, 3, 1),
    "U-Net, 64 -> 128": ((4, 64, 64, 64), 128, 3, 1),
    "U-Net, 128 -> 64": ((4, 128, 64, 64), 64, 3, 1),
    "U-Net's last": ((4, 64, 128, 128), 2, 1, 0),
    "1-D, 1 -> 8": ((4, 1, 65536), 8, 9, 4),
    "1-D, 16": ((4, 16, 16384), 16, 5, 2),
    "3-D, 1 -> 8": ((1, 1, 48, 48, 48), 8, 3, 1),
    "3-D, 4, small": ((4, 4, 12, 12, 12), 4, 3, 1),
    "3-D, 8": ((1, 8, 48, 48, 48), 8, 3, 1),
    "3-D, 3 -> 8": ((1, 3, 48, 48, 48), 8, 3, 1),
    "3-D, 16 -> 8": ((1, 16, 48, 48, 48), 8, 3, 1),
    "3-D, 32 -> 16": ((1, 32, 24, 24, 24), 16, 3, 1),
    "3-D, 32": ((1, 32, 12, 12, 12), 32, 3, 1),
    "3-D, 8 -> 16": ((1, 8, 24, 24, 24), 16, 3, 1),
    "3-D, 16 -> 32": ((2, 16, 24, 24, 24), 32, 3, 1),
    "3-D, stride 2": ((1, 8, 48, 48, 48), 8, 3, 1, 2),
    "4-D, 1 -> 8": ((2, 1, 12, 12, 12, 12), 8, 3, 1),
    "4-D, 4": ((1, 4, 12, 12, 12, 12), 4, 3, 1),
    "4-D, 16": ((1, 16, 10, 10, 10, 10), 16, 3, 1),
    "4-D, 40": ((1, 40, 6, 6, 6, 6), 40, 3, 1),
    "4-D, stride 2": ((1, 8, 12, 12, 12, 12), 16, 3, 1, 2),
    "4-D, 1 x 1": ((1, 20, 12, 12, 12, 12), 20, 1, 0),
}


def problem_of(dtype: str, x: tuple[int, ...], c_out: int, k: int, p: int, *rest: int) -> Problem:
    """Return the convolution that a row of `SHAPES` is about."""
    (stride, dilation, groups), dims = (*rest, 1, 1, 1)[:3], len(x) - 2
    window = Placement((stride,) * dims, ((p, p),) * dims, (dilation,) * dims)
    return Problem(x, (c_out, x[1] // groups, *(k,) * dims), window, groups, dtype)


def record(problem: Problem, times: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the library's records."""
    w = problem.window
    shapes = {"dtype": problem.dtype, "x": problem.x, "weight": problem.weight, "groups": problem.groups}
    return {**shapes, "stride": w.stride, "padding": w.padding, "dilation": w.dilation, **times}


def row(name: str, problem: Problem) -> dict[str, Any]:
    """Measure each algorithm in each direction, and print and return the milliseconds."""
    times, shown = {}, []
    for direction, unseen in zip(DIRECTIONS, chosen_unseen(problem), strict=True):
        measured = measured_algorithms(problem, direction, available(problem, direction))
        times[direction] = {one: float(f"{1e3 * measured[one].seconds:.3g}") for one in measured}
        plain = times[direction]["plain"]
        cells = (f"{ms:.3g} ({ms / plain:.2f}){'*' * (one == unseen)}" for one, ms in times[direction].items())
        shown.append(f"{direction}: {', '.join(cells)}")
    print(f"{name:<26} {problem.dtype}  " + "   ".join(shown), flush=True)
    return times


if __name__ == "__main__" and MPI.COMM_WORLD.rank == 0:  # no messages: the other workers have nothing to do
    words = sys.argv[1:]
    path = Path(words[1]) if words[:1] == ["--records"] else None
    words = words[2:] if path else words
    dtypes = [word for word in words if word.startswith("float")] or ["float32", "float64"]
    titles = [word for word in words if not word.startswith("float")]
    table, records = Table("local_convolution"), []
    for dtype in dtypes:
        for name, arguments in SHAPES.items():
            if not titles or any(title in name for title in titles):
                problem = problem_of(dtype, *arguments)
                times = row(name, problem)
                table.rows.append({"work": f"{name}, {dtype}", "milliseconds": times})
                records.append(record(problem, times))
    table.write()
    if path is not None:
        known = json.loads(path.read_text()) if path.exists() else {}
        known[machine()] = records
        rows = (f'"{name}": [\n' + ",\n".join(map(json.dumps, each)) + "\n]" for name, each in known.items())
        path.write_text("{\n" + ",\n".join(rows) + "\n}\n")
