"""XLA's own convolution, forward and gradients, in the order in memory that its CPU compiler computes in.

The compiler brings convolutions into that order by itself, but not those inside a loop, which then take 5 to 100 times
as long: a training loop in `lax.scan` is such a loop. So in one and two dimensions they are written in it here.
Groups and three dimensions are left as they are, but for the input's gradient with a stride.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from distdl_jax.kernels.geometry import Pairs, row_major
from distdl_jax.kernels.phases import TransposedProblem, by_phases
from distdl_jax.kernels.problem import Problem
from distdl_jax.kernels.xla_conv import conv


def forward(problem: Problem, x: Array, weight: Array) -> Array:
    """Return the convolution of `x` with `weight`."""
    if not _is_reordered(problem):
        return _as_it_is(problem, x, weight)
    if problem.dims == 1:
        return forward(_with_row(problem), x[:, :, None], weight[:, :, None])[:, :, 0]
    window = problem.window
    return _reordered(x, jnp.transpose(weight, (2, 3, 1, 0)), window.stride, window.padding, (1, 1), window.dilation)


def input_gradient(problem: Problem, weight: Array, dy: Array) -> Array:
    """Return the gradient of x, from the cotangent `dy` of the result."""
    if not _is_reordered(problem) and set(problem.window.stride) != {1}:
        # XLA takes far longer for zeros between the entries, and jaxlib 0.12 ends the process at some small shapes.
        transposed = TransposedProblem.of_input_gradient(problem)
        if transposed.ordinary is not None:
            return by_phases(transposed, transposed.ordinary, dy, weight, forward)
    if not _is_reordered(problem):
        x = jnp.zeros(problem.x, dy.dtype)
        return jax.vjp(lambda x: _as_it_is(problem, x, weight), x)[1](dy)[0]
    if problem.dims == 1:
        return input_gradient(_with_row(problem), weight[:, :, None], dy[:, :, None])[:, :, 0]
    window = problem.window
    reaches = window.reach(weight.shape[2:])
    along = zip(reaches, window.padding, window.stride, problem.x[2:], dy.shape[2:], strict=True)
    padding = tuple((reach - low, n - (m - 1) * stride - 1 + low) for reach, (low, _), stride, n, m in along)
    kernel = jnp.transpose(jnp.flip(weight, (2, 3)), (2, 3, 0, 1))
    return _reordered(dy, kernel, (1, 1), padding, window.stride, window.dilation)


def weight_gradient(problem: Problem, x: Array, dy: Array) -> Array:
    """Return the gradient of the weight: the convolution of x, whose channels are a batch, with dy."""
    if not _is_reordered(problem):
        weight = jnp.zeros(problem.weight, dy.dtype)
        return jax.vjp(lambda weight: _as_it_is(problem, x, weight), weight)[1](dy)[0]
    if problem.dims == 1:
        return weight_gradient(_with_row(problem), x[:, :, None], dy[:, :, None])[:, :, 0]
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


def _with_row(problem: Problem) -> Problem:
    """Return the same problem with one more dimension, in front, of which there is one row."""
    x, weight = ((*shape[:2], 1, *shape[2:]) for shape in (problem.x, problem.weight))
    return replace(problem, x=x, weight=weight, window=problem.window.with_row())


def _as_it_is(problem: Problem, x: Array, weight: Array) -> Array:
    window = problem.window
    return conv(x, weight, window.stride, window.padding, dilation=window.dilation, groups=problem.groups)


def _reordered(
    x: Array, kernel: Array, stride: tuple[int, ...], padding: Pairs, spread: tuple[int, ...], dilation: tuple[int, ...]
) -> Array:
    x = row_major(jnp.moveaxis(x, 1, 3))
    y = conv(x, kernel, stride, padding, x_dilation=spread, dilation=dilation, channels_last=True)
    return row_major(jnp.moveaxis(y, 3, 1))
