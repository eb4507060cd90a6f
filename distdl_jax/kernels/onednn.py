"""One worker's convolution by oneDNN, forward and gradients: calls of the library that `distdl_jax.onednn` compiles.

float32, and bfloat16 on processors that multiply it. Arrays are row-major: N x C x features and c_out x C/groups x
kernel, or, if `Problem.channels_last`, N x features x C and kernel x C/groups x c_out. No array is transposed: oneDNN
gets the strides of its logical dimensions.

All sums are of float32 numbers. With `Problem.fast_math`, operands of float32 are rounded to bfloat16 on their way in,
where bfloat16 itself would be computed; elsewhere it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.kernels.onednn_library import Planned, multiplies_bfloat16, planned, target
from distdl_jax.kernels.problem import DIRECTIONS, Direction, Problem, Shape

CHOSEN, AS_THEY_ARE, CHANNELS_LAST = range(3)
"""The memory order of activations while oneDNN computes, numbered as in onednn.cc."""

MOST_DIMS = 3
"""oneDNN supports convolutions of up to this many feature dimensions."""


def can_compute(problem: Problem, direction: Direction) -> bool:
    """Say whether oneDNN is available, and has a fast implementation for the problem's own dtype.

    Half precision for which this is False is computed in float32 faster than by XLA, or by oneDNN.
    """
    return memory(problem, direction) is not None


def memory(problem: Problem, direction: Direction) -> int | None:
    """Return how many bytes it needs besides operands and result; None if oneDNN can't compute it, or only slowly."""
    plan = _planned(_of_what_is_read(problem), direction)
    return plan.bytes if plan else None


def implementation(problem: Problem, direction: Direction) -> str | None:
    """Return oneDNN's name of its implementation, such as "brgconv:avx512_core"; None if it can't compute it."""
    plan = _planned(_of_what_is_read(problem), direction)
    return plan.implementation if plan else None


def forward(problem: Problem, x: Array, weight: Array) -> Array:
    """Return the convolution of `x` with `weight`."""
    return _run(problem, "forward", (_read(problem, x), weight), _in_memory(problem, problem.y))


def input_gradient(problem: Problem, weight: Array, dy: Array) -> Array:
    """Return the gradient of x, from the cotangent `dy` of the result."""
    gradient = _run(problem, "input_gradient", (weight, dy), _in_memory(problem, _of_what_is_read(problem).x))
    return _padded(problem, gradient, [(max(0, -low), max(0, -high)) for low, high in problem.window.padding])


def weight_gradient(problem: Problem, x: Array, dy: Array) -> Array:
    """Return the gradient of the weight, from the cotangent `dy` of the result."""
    c_out, c_in, *kernel = problem.weight
    shape = (*kernel, c_in, c_out) if problem.channels_last else problem.weight
    return _run(problem, "weight_gradient", (_read(problem, x), dy), shape)


def order(problem: Problem, direction: Direction) -> int:
    """Return the order to compute in, by a rule of shapes; docs/benchmarks.md has the timings behind it."""
    if problem.channels_last:
        is_wide = direction == "input_gradient" and _is_mostly_padding(problem)
        return CHOSEN if is_wide else AS_THEY_ARE
    c_out, c_in = problem.weight[:2]
    if problem.groups > 1:
        return CHOSEN
    if math.prod(problem.weight[2:]) == 1:
        return AS_THEY_ARE  # a matrix product, which takes less time than another order
    is_half = problem.dtype == "bfloat16" or _rounds_operands(problem)
    # oneDNN's own order has blocks of 16 channels, which few channels would only partly fill.
    match direction:
        case "forward" if is_half and c_in > 3 and min(c_in, c_out) < 16:
            return CHANNELS_LAST  # on processors with AMX it chooses badly, on others the same
        case "input_gradient" if c_in == 1 or (c_in <= 3 and problem.dims < 3):
            return AS_THEY_ARE
        case "input_gradient" if c_out < 16:
            return CHANNELS_LAST
        case "weight_gradient" if c_out < 16 or 3 < c_in < 16:
            return CHANNELS_LAST
    return CHOSEN


def _is_mostly_padding(problem: Problem) -> bool:
    """Say whether the input's gradient, as a convolution of dy, has padding of over a quarter of dy's length."""
    reach, lows = problem.window.reach(problem.weight[2:]), (low for low, _ in problem.window.padding)
    return any(4 * (k - low) > n for k, low, n in zip(reach, lows, problem.y[2:], strict=True))


@cache
def _planned(problem: Problem, direction: Direction) -> Planned | None:
    """Return oneDNN's plan, for a problem whose padding isn't negative."""
    is_half = problem.dtype == "bfloat16"
    if problem.dims > MOST_DIMS or not (is_half or problem.dtype == "float32"):
        return None
    if is_half and not _multiplies_bfloat16(problem):
        return None
    flags = is_half, problem.channels_last, _rounds_operands(problem)
    options = (DIRECTIONS.index(direction), *map(int, flags), order(problem, direction), problem.groups)
    low, high = zip(*problem.window.padding, strict=True)
    window = problem.window.stride, problem.window.dilation, low, high
    return planned(options, (problem.x, problem.weight, problem.y, *window))


def _multiplies_bfloat16(problem: Problem) -> bool:
    """Say whether the processor does; depthwise convolutions are faster in float32."""
    return multiplies_bfloat16() and not (problem.groups > 1 and problem.weight[1] == 1)


def _rounds_operands(problem: Problem) -> bool:
    return problem.fast_math and problem.dtype == "float32" and _multiplies_bfloat16(problem)


def _run(problem: Problem, direction: Direction, operands: tuple[Array, Array], result: Shape) -> Array:
    """Call the library with `operands` in the order of onednn.cc."""
    read = _of_what_is_read(problem)
    low, high = np.array(read.window.padding, np.int64).T
    scratch = jax.ShapeDtypeStruct((memory(problem, direction) or 0,), jnp.uint8)
    call = jax.ffi.ffi_call(
        target(direction), (jax.ShapeDtypeStruct(result, problem.dtype), scratch), vmap_method="sequential"
    )
    found, _ = call(
        *operands,
        stride=np.array(read.window.stride, np.int64),
        dilation=np.array(read.window.dilation, np.int64),
        low=low,
        high=high,
        groups=np.int64(read.groups),
        order=np.int64(order(read, direction)),
        channels_last=read.channels_last,
        fast_math=_rounds_operands(read),
    )
    return found


def _of_what_is_read(problem: Problem) -> Problem:
    """Return the problem without the entries of x that negative padding removes."""
    window = problem.window
    sizes = (n + min(0, low) + min(0, high) for n, (low, high) in zip(problem.x[2:], window.padding, strict=True))
    padding = tuple((max(0, low), max(0, high)) for low, high in window.padding)
    return replace(problem, x=(*problem.x[:2], *sizes), window=replace(window, padding=padding))


def _read(problem: Problem, x: Array) -> Array:
    return _padded(problem, x, [(min(0, low), min(0, high)) for low, high in problem.window.padding])


def _padded(problem: Problem, x: Array, padding: Sequence[tuple[int, int]]) -> Array:
    """Return `x` with zeros around the features, or cropped if padding is negative."""
    if not any(map(any, padding)):
        return x
    none, features = (0, 0, 0), [(low, high, 0) for low, high in padding]
    around = [none, *features, none] if problem.channels_last else [none, none, *features]
    return lax.pad(x, jnp.zeros((), x.dtype), around)


def _in_memory(problem: Problem, shape: Shape) -> Shape:
    """Return the shape of the array of activations whose logical shape is N x C x features."""
    return (shape[0], *shape[2:], shape[1]) if problem.channels_last else shape
