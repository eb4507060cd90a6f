"""Convolutions of any number of dimensions as matrix products of the weight and the contents of each window of x.

A column of the second matrix has the entries of x in one window, so forward is one product for each group. The input's
gradient is such a product of dy with the reversed kernel, and the weight's gradient a product of dy with the same
columns. The columns hold as many copies of x as the kernel has taps, so they are made in pieces that stay in the cache,
of several samples, or of several rows of one. With one input channel in each group, whose products would be of single
numbers, forward is a sum over the taps instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.kernels import phases
from distdl_jax.kernels.geometry import padded, row_major
from distdl_jax.kernels.problem import Problem, Shape

PIECE = 1 << 20
"""Bytes of columns in a piece: half of a typical second-level cache."""

MOST_TAPS = 64
"""The largest kernel that is unrolled tap by tap."""


_compiled_once = partial(jax.jit, static_argnums=0, inline=True)
"""For functions with a loop, whose body would otherwise be compiled in each call outside of a jitted program."""


@_compiled_once
def forward(problem: Problem, x: Array, weight: Array) -> Array:
    """Return the convolution of `x` with `weight`."""
    if weight.shape[1] == 1 and math.prod(weight.shape[2:]) <= MOST_TAPS:
        return _by_taps(problem, x, weight)
    pieces, matrix = _Pieces(problem), weight.reshape(problem.groups, len(weight) // problem.groups, -1)
    x = pieces.with_all_rows(x)

    def product(piece: Array) -> Array:
        y = lax.dot_general(matrix, pieces.columns(x, piece), (((2,), (1,)), ((0,), (0,))))
        return y.reshape(len(weight), pieces.samples, pieces.rows, *problem.y[3:])

    return pieces.joined(lax.map(product, pieces.numbers))


def input_gradient(problem: Problem, weight: Array, dy: Array) -> Array:
    """Return the gradient of x, from the cotangent `dy` of the result."""
    return phases.input_gradient(problem, weight, dy, forward)


@_compiled_once
def weight_gradient(problem: Problem, x: Array, dy: Array) -> Array:
    """Return the gradient of the weight, from the cotangent `dy` of the result."""
    pieces, c_out = _Pieces(problem), dy.shape[1]
    x, dy = pieces.with_all_rows(x), pieces.with_all_rows_of_y(dy)

    def add(total: Array, piece: Array) -> tuple[Array, None]:
        part = jnp.swapaxes(pieces.rows_of_y(dy, piece), 0, 1).reshape(problem.groups, c_out // problem.groups, -1)
        return total + lax.dot_general(part, pieces.columns(x, piece), (((2,), (2,)), ((0,), (0,)))), None

    zeros = jnp.zeros((problem.groups, c_out // problem.groups, math.prod(problem.weight[1:])), x.dtype)
    return lax.scan(add, zeros, pieces.numbers)[0].reshape(problem.weight)


def _by_taps(problem: Problem, x: Array, weight: Array) -> Array:
    """Sum, over the taps, the corresponding entries times a number for each output channel."""
    each = len(weight) // problem.groups
    numbers = weight.reshape(len(weight), -1, *(1,) * problem.dims)
    met = problem.window.met_by_taps(x, weight.shape[2:])
    met = met if 1 in (each, problem.groups) else [jnp.repeat(a, each, axis=1) for a in met]
    return reduce(jnp.add, [a * numbers[:, tap] for tap, a in enumerate(met)])


@dataclass(frozen=True)
class _Pieces:
    """The pieces in which a problem is computed: several samples, or several rows of one; all have the same size."""

    problem: Problem

    @cached_property
    def _row(self) -> int:
        """The number of bytes of the columns of one row of outputs."""
        numbers = self.problem.x[1] * math.prod(self.problem.weight[2:]) * math.prod(self.problem.y[3:])
        return numbers * jnp.dtype(self.problem.dtype).itemsize

    @cached_property
    def samples(self) -> int:
        """The number of samples in a piece."""
        samples, _, rows, *_ = self.problem.y
        most = max(1, PIECE // (self._row * rows))
        return max(n for n in range(1, samples + 1) if samples % n == 0 and n <= most)

    @cached_property
    def _parts(self) -> int:
        """The number of pieces of a sample."""
        if math.prod(self.problem.weight[2:]) == 1:  # the columns are x itself
            return 1
        return -(-self.problem.y[2] // max(1, PIECE // self._row))

    @cached_property
    def rows(self) -> int:
        """The number of rows of outputs in a piece, along the first feature dimension."""
        return -(-self.problem.y[2] // self._parts)

    @property
    def numbers(self) -> Array:
        """The numbers of all pieces."""
        return jnp.arange(self.problem.x[0] // self.samples * self._parts)

    def _first(self, piece: Array) -> tuple[Array, Array]:
        """Return the first sample, and the first row of outputs, of a piece."""
        return self.samples * (piece // self._parts), self.rows * (piece % self._parts)

    def with_all_rows_of_y(self, y: Array) -> Array:
        """Return `y` with rows of zeros appended, so that all pieces have the same number."""
        missing = self._parts * self.rows - y.shape[2]
        return padded(y, [(0, missing), *((0, 0),) * (y.ndim - 3)])

    def with_all_rows(self, x: Array) -> Array:
        """Return `x` with its padding, and with the rows that all pieces read."""
        outputs = (self._parts * self.rows, *self.problem.y[3:])
        return padded(x, self.problem.window.padding_read(x.shape[2:], self.problem.weight[2:], outputs))

    def rows_of_y(self, y: Array, piece: Array) -> Array:
        """Return a piece of `y`, which has all rows."""
        sample, row = self._first(piece)
        start: list[Any] = [sample, 0, row] + [0] * (y.ndim - 3)
        return lax.dynamic_slice(y, start, (self.samples, y.shape[1], self.rows, *y.shape[3:]))

    def columns(self, x: Array, piece: Array) -> Array:
        """Return the columns of a piece of `x`, which has all rows: groups x (C/groups taps) x (samples outputs)."""
        window, kernel, (sample, row) = self.problem.window, self.problem.weight[2:], self._first(piece)
        read = window.stride[0] * (self.rows - 1) + window.reach(kernel)[0] + 1
        start: list[Any] = [sample, 0, window.stride[0] * row] + [0] * (x.ndim - 3)
        x = lax.dynamic_slice(x, start, (self.samples, x.shape[1], read, *x.shape[3:]))
        met = jnp.stack(window.unpadded().met_by_taps(x, kernel), axis=2)
        return row_major(jnp.moveaxis(met, 0, 2).reshape(self.problem.groups, math.prod(self.problem.weight[1:]), -1))

    def joined(self, y: Array) -> Array:
        """Return the result, from its pieces, c_out x samples x rows x ... each."""
        shape: Shape = (-1, self._parts, *y.shape[1:])
        y = jnp.transpose(y.reshape(shape), (0, 3, 2, 1, 4, *range(5, y.ndim + 1)))
        y = y.reshape(self.problem.x[0], y.shape[2], -1, *y.shape[5:])
        return row_major(y[:, :, : self.problem.y[2]])
