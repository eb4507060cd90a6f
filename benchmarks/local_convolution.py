"""One worker's convolution, as the layers compute it, beside the plain `lax.conv_general_dilated`.

NPROC=1 python benchmarks/local_convolution.py [float32] [float64]

Milliseconds; the ways take turns, and each has the least of its medians. With NPROC=1 it is the time of one thread.
"forward", "dx" and "dw" (the gradients of input and weight) are programs of their own, "all" is one program with the
three.
"""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
from distdl_jax.nn.local.conv_cpu import convolution
from jax import Array, lax
from mpi4py import MPI

from harness import Table

jax.config.update("jax_enable_x64", True)

# x, output channels, kernel, padding; stride, dilation, groups where they are not 1
SHAPES: dict[str, tuple[Any, ...]] = {
    "LeNet's first": ((16, 1, 28, 28), 6, 5, 2),
    "LeNet's second": ((16, 6, 14, 14), 16, 5, 0),
    "2-D, 1 -> 16": ((4, 1, 256, 256), 16, 3, 1),
    "2-D, 16 -> 1": ((4, 16, 256, 256), 1, 3, 1),
    "2-D, 8": ((4, 8, 64, 64), 8, 3, 1),
    "2-D, 16": ((4, 16, 129, 256), 16, 3, 1),
    "2-D, 64": ((4, 64, 64, 64), 64, 3, 1),
    "2-D, stride 2": ((4, 16, 64, 64), 32, 3, 1, 2),
    "2-D, dilation 2": ((4, 16, 64, 64), 16, 3, 2, 1, 2),
    "2-D, 4 groups": ((4, 32, 64, 64), 32, 3, 1, 1, 1, 4),
    "1-D, 1 -> 8": ((4, 1, 65536), 8, 9, 4),
    "1-D, 16": ((4, 16, 16384), 16, 5, 2),
    "3-D, 1 -> 8": ((1, 1, 48, 48, 48), 8, 3, 1),
    "3-D, 4, small": ((4, 4, 12, 12, 12), 4, 3, 1),
    "3-D, 8": ((1, 8, 48, 48, 48), 8, 3, 1),
    "3-D, 16 -> 32": ((2, 16, 24, 24, 24), 32, 3, 1),
    "3-D, stride 2": ((1, 8, 48, 48, 48), 8, 3, 1, 2),
}


def duration(program: Callable[..., Any], args: tuple[Array, ...], budget: float = 0.02) -> float:
    """The median, in seconds, over as many calls as fit into `budget` seconds, 3 at least."""
    jax.block_until_ready(program(*args))
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget and len(times) < 50):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - start)
    return median(times)


def parts(f: Callable[[Array, Array], Array]) -> dict[str, Callable[..., Any]]:
    """What is timed of a convolution: functions of x, weight and the output's cotangent."""

    def everything(x: Array, w: Array, dy: Array) -> Any:
        y, pullback = jax.vjp(f, x, w)
        return y, pullback(dy)

    return {
        "forward": lambda x, w, dy: f(x, w),
        "dx": lambda x, w, dy: jax.vjp(lambda x: f(x, w), x)[1](dy),
        "dw": lambda x, w, dy: jax.vjp(lambda w: f(x, w), w)[1](dy),
        "all": everything,
    }


def row(
    table: Table, name: str, dtype: str, x_shape: tuple[int, ...], c_out: int, k: int, p: int, s: int, d: int, g: int
) -> None:
    dims = len(x_shape) - 2
    window = ((s,) * dims, ((p, p),) * dims, (d,) * dims, g)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], x_shape, dtype)
    w = jax.random.normal(keys[1], (c_out, x_shape[1] // g, *(k,) * dims), dtype)

    def plain(x: Array, w: Array) -> Array:
        return lax.conv_general_dilated(x, w, *window[:2], rhs_dilation=window[2], feature_group_count=g)

    def ours(x: Array, w: Array) -> Array:
        return convolution(x, w, *window)

    args = (x, w, jax.random.normal(keys[2], jax.eval_shape(plain, x, w).shape, dtype))
    cells: dict[str, list[float]] = {}
    for part, program in parts(plain).items():
        ways = [jax.jit(program), jax.jit(parts(ours)[part])]
        rounds = [[duration(way, args) for way in ways] for _ in range(3)]
        cells[part] = [min(times) for times in zip(*rounds, strict=True)]
    table.rows.append({"work": f"{name}, {dtype}", "plain, ours": cells})
    shown = (f"{part} {1e3 * a:7.2f} {1e3 * b:7.2f} ({b / a:4.2f}x)" for part, (a, b) in cells.items())
    print(f"{name:<16} {dtype}  " + "  ".join(shown), flush=True)


if MPI.COMM_WORLD.rank == 0:  # no messages: the other workers have nothing to do
    table = Table("local_convolution")
    for dtype in sys.argv[1:] or ["float32", "float64"]:
        for name, (x_shape, c_out, k, p, *rest) in SHAPES.items():
            s, d, g = (*rest, 1, 1, 1)[:3]
            row(table, name, dtype, x_shape, c_out, k, p, s, d, g)
    table.write()
