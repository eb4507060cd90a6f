"""One worker's convolution by oneDNN, forward and gradients: calls of the library that `distdl_jax.onednn` compiles.

float32 only. XLA computes where oneDNN can't, or only slowly. Each of the three is linear in both of its operands, and
their derivatives are each other, so that they can be differentiated again and again. oneDNN joins the parts of x as it
brings them into its own order.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.kernels.cpu import plain
from distdl_jax.kernels.cpu.onednn.shared_library import bytes_needed, target
from distdl_jax.kernels.geometry import padded
from distdl_jax.kernels.problem import DIRECTIONS, Direction, Parts, Problem, Shape

CHOSEN, AS_THEY_ARE, CHANNELS_LAST = range(3)
"""In which order activations are in memory while oneDNN computes; as convolution.cc numbers them."""

MOST_DIMS = 3
"""Of so many feature dimensions, at most, oneDNN has convolutions."""


def can_compute(problem: Problem, direction: Direction) -> bool:
    """Tell whether oneDNN is here, and has something fast for it."""
    return memory(replace(_cut(problem), split_input=None), direction) is not None


def forward(problem: Problem, parts: Parts, weight: Array) -> Array:
    """Return the convolution of x, which lies in `parts`, with `weight`."""
    return _forward(*_without_unread(problem, parts), weight)


def input_gradient(problem: Problem, parts: Parts, weight: Array, dy: Array) -> Parts:
    """Return the gradients of the parts of x, from the cotangent `dy` of the result."""
    read = _cut(problem)
    gradients = _input_gradient(read, weight, dy)
    if read is problem:
        return gradients
    (gradient,) = gradients
    return (padded(gradient, [(max(0, -low), max(0, -high)) for low, high in problem.window.padding]),)


def weight_gradient(problem: Problem, parts: Parts, weight: Array, dy: Array) -> Array:
    """Return the gradient of the weight, from the cotangent `dy` of the result."""
    return _weight_gradient(*_without_unread(problem, parts), dy)


def order(problem: Problem, direction: Direction) -> int:
    """Return the order to compute in: the fastest for 43 shapes on an AMD EPYC, by up to seven times."""
    c_out, c_in = problem.weight[:2]
    if problem.groups > 1:
        return CHOSEN
    if math.prod(problem.weight[2:]) == 1:
        return AS_THEY_ARE  # a product of matrices, which takes less time than another order
    # In oneDNN's own order there are blocks of 16 channels, of which few fill a part.
    match direction:
        case "input_gradient" if c_in == 1 or (c_in <= 3 and problem.dims < 3):
            return AS_THEY_ARE
        case "input_gradient" if c_out < 16:
            return CHANNELS_LAST
        case "weight_gradient" if c_out < 16 or 3 < c_in < 16:
            return CHANNELS_LAST
    return CHOSEN


@cache
def memory(problem: Problem, direction: Direction) -> int | None:
    """Return how many bytes it needs beside operands and result; None where oneDNN can't compute it, or slowly."""
    if problem.dims > MOST_DIMS:
        return None
    low, high = zip(*problem.window.padding, strict=True)
    window = problem.window.stride, problem.window.dilation, low, high
    shapes, sides = (problem.x, problem.weight, problem.y), _sides(problem)
    place = DIRECTIONS.index(direction)
    integers = (*shapes, *window, (len(sides),), *sides)
    return bytes_needed(place, order(problem, direction), problem.groups, integers)


def _sides(problem: Problem) -> tuple[tuple[int, int, int], ...]:
    return () if problem.split_input is None else problem.split_input.sides


def _run(
    problem: Problem, direction: Direction, operands: Parts, results: tuple[Shape, ...], needed: int
) -> tuple[Array, ...]:
    """Call the library with `operands` in the order of convolution.cc: x last, in its parts."""
    low, high = np.array(problem.window.padding, np.int64).T
    axes, before, _ = np.array(_sides(problem), np.int64).reshape(-1, 3).T
    outputs = [jax.ShapeDtypeStruct(result, jnp.float32) for result in results]
    scratch = len(outputs) if direction != "input_gradient" else 0
    outputs.insert(scratch, jax.ShapeDtypeStruct((needed,), jnp.uint8))
    found = jax.ffi.ffi_call(target(direction), outputs, vmap_method="sequential")(
        *operands,
        stride=np.array(problem.window.stride, np.int64),
        dilation=np.array(problem.window.dilation, np.int64),
        low=low,
        high=high,
        groups=np.int64(problem.groups),
        order=np.int64(order(problem, direction)),
        axes=axes,
        before=before,
    )
    return (*found[:scratch], *found[scratch + 1 :])


def _cut(problem: Problem) -> Problem:
    """Return the problem of the entries of x that are read: without those that negative padding takes away."""
    window = problem.window
    if all(pad >= 0 for pair in window.padding for pad in pair):
        return problem
    sizes = (n + min(0, low) + min(0, high) for n, (low, high) in zip(problem.x[2:], window.padding, strict=True))
    padding = tuple((max(0, low), max(0, high)) for low, high in window.padding)
    return replace(problem, x=(*problem.x[:2], *sizes), window=replace(window, padding=padding))


def _without_unread(problem: Problem, parts: Parts) -> tuple[Problem, Parts]:
    read = _cut(problem)
    if read is problem:
        return problem, parts
    (x,) = parts
    return read, (padded(x, [(min(0, low), min(0, high)) for low, high in problem.window.padding]),)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward(problem: Problem, parts: Parts, weight: Array) -> Array:
    if (needed := memory(problem, "forward")) is None:
        return plain.forward(problem.join(parts), weight, problem.window, problem.groups)
    return _run(problem, "forward", (weight, *parts), (problem.y,), needed)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _input_gradient(problem: Problem, weight: Array, dy: Array) -> Parts:
    if (needed := memory(problem, "input_gradient")) is None:
        x = jnp.zeros(problem.x, dy.dtype)
        return problem.split(plain.input_gradient(x, weight, dy, problem.window, problem.groups))
    return _run(problem, "input_gradient", (weight, dy), problem.part_shapes, needed)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weight_gradient(problem: Problem, parts: Parts, dy: Array) -> Array:
    if (needed := memory(problem, "weight_gradient")) is None:
        weight = jnp.zeros(problem.weight, dy.dtype)
        return plain.weight_gradient(problem.join(parts), weight, dy, problem.window, problem.groups)
    return _run(problem, "weight_gradient", (dy, *parts), (problem.weight,), needed)[0]


def _forward_backward(problem: Problem, operands: tuple[Parts, Array], dy: Array) -> tuple[Parts, Array]:
    parts, weight = operands
    return _input_gradient(problem, weight, dy), _weight_gradient(problem, parts, dy)


def _input_gradient_backward(problem: Problem, operands: tuple[Array, Array], parts: Parts) -> tuple[Array, Array]:
    weight, dy = operands
    return _weight_gradient(problem, parts, dy), _forward(problem, parts, weight)


def _weight_gradient_backward(problem: Problem, operands: tuple[Parts, Array], weight: Array) -> tuple[Parts, Array]:
    parts, dy = operands
    return _input_gradient(problem, weight, dy), _forward(problem, parts, weight)


_forward.defvjp(lambda problem, *both: (_forward(problem, *both), both), _forward_backward)
_input_gradient.defvjp(lambda problem, *both: (_input_gradient(problem, *both), both), _input_gradient_backward)
_weight_gradient.defvjp(lambda problem, *both: (_weight_gradient(problem, *both), both), _weight_gradient_backward)
