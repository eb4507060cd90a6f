"""XLA's own convolution, forward and gradients, in the memory order in which its CPU compiler computes.

The compiler uses that order for convolutions by itself, but not for those inside a loop, which then take 5 to 100 times
as long: a training loop in `lax.scan` is such a loop. So in one and two dimensions they are written in that order here.
Groups and three dimensions are left unchanged, except for the input's gradient (`phases`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps

import jax
import jax.numpy as jnp
from jax import Array

from distdl_jax.kernels import phases
from distdl_jax.kernels.geometry import Pairs, row_major
from distdl_jax.kernels.problem import Problem, conv


def _one_dimension_as_a_row(compute: Callable[..., Array]) -> Callable[..., Array]:
    """Compute one dimension without groups as one row of two dimensions."""

    @wraps(compute)
    def computed(problem: Problem, *operands: Array) -> Array:
        if problem.groups > 1 or problem.dims > 1:
            return compute(problem, *operands)
        x, weight = ((*shape[:2], 1, *shape[2:]) for shape in (problem.x, problem.weight))
        row = replace(problem, x=x, weight=weight, window=problem.window.with_row())
        return compute(row, *(operand[:, :, None] for operand in operands))[:, :, 0]

    return computed


@_one_dimension_as_a_row
def forward(problem: Problem, x: Array, weight: Array) -> Array:
    """Return the convolution of `x` with `weight`."""
    if not _is_reordered(problem):
        return _as_it_is(problem, x, weight)
    window = problem.window
    return _reordered(x, jnp.transpose(weight, (2, 3, 1, 0)), window.stride, window.padding, (1, 1), window.dilation)


@_one_dimension_as_a_row
def input_gradient(problem: Problem, weight: Array, dy: Array) -> Array:
    """Return the gradient of x, from the cotangent `dy` of the result."""
    if not _is_reordered(problem):
        return phases.input_gradient(problem, weight, dy, forward)
    window = problem.window
    reaches = window.reach(weight.shape[2:])
    along = zip(reaches, window.padding, window.stride, problem.x[2:], dy.shape[2:], strict=True)
    padding = tuple((reach - low, n - (m - 1) * stride - 1 + low) for reach, (low, _), stride, n, m in along)
    kernel = jnp.transpose(jnp.flip(weight, (2, 3)), (2, 3, 0, 1))
    return _reordered(dy, kernel, (1, 1), padding, window.stride, window.dilation)


@_one_dimension_as_a_row
def weight_gradient(problem: Problem, x: Array, dy: Array) -> Array:
    """Return the gradient of the weight: the convolution of x, with channels as a batch, with dy."""
    if not _is_reordered(problem):
        weight = jnp.zeros(problem.weight, dy.dtype)
        return jax.vjp(lambda weight: _as_it_is(problem, x, weight), weight)[1](dy)[0]
    window = problem.window
    gradient = conv(
        row_major(jnp.transpose(x, (1, 2, 3, 0))),
        row_major(jnp.transpose(dy, (2, 3, 0, 1))),
        window.dilation,
        window.padding_read(x.shape[2:], problem.weight[2:], dy.shape[2:]),
        dilation=window.stride,
        channels_last=True,
    )
    return jnp.transpose(gradient, (3, 0, 1, 2))


def _is_reordered(problem: Problem) -> bool:
    return problem.groups == 1 and problem.dims < 3


def _as_it_is(problem: Problem, x: Array, weight: Array) -> Array:
    window = problem.window
    return conv(x, weight, window.stride, window.padding, dilation=window.dilation, groups=problem.groups)


def _reordered(
    x: Array, kernel: Array, stride: tuple[int, ...], padding: Pairs, spread: tuple[int, ...], dilation: tuple[int, ...]
) -> Array:
    x = row_major(jnp.moveaxis(x, 1, 3))
    y = conv(x, kernel, stride, padding, x_dilation=spread, dilation=dilation, channels_last=True)
    return row_major(jnp.moveaxis(y, 3, 1))
