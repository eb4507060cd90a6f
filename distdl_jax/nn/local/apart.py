"""A worker's input as two arrays: its own block, and what it got of its neighbours' rows around that."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Apart(NamedTuple):
    """Where the rows are: along dimension `axis`, `low` before the block and `high` after it."""

    axis: int
    low: int
    high: int

    def whole(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the two joined, from that of the block."""
        return (*block[: self.axis], block[self.axis] + self.low + self.high, *block[self.axis + 1 :])

    def parts(self, whole: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the block and of the rows, from that of the two joined."""
        before, size, after = whole[: self.axis], whole[self.axis], whole[self.axis + 1 :]
        rows = self.low + self.high
        return (*before, size - rows, *after), (*before, rows, *after)


def joined(block: Array, rows: Array, apart: Apart) -> Array:
    """The block with the rows around it; `rows` are those before it, and then those after it."""
    before = lax.slice_in_dim(rows, 0, apart.low, axis=apart.axis)
    after = lax.slice_in_dim(rows, apart.low, apart.low + apart.high, axis=apart.axis)
    return jnp.concatenate([before, block, after], apart.axis)


def taken_apart(x: Array, apart: Apart) -> tuple[Array, Array]:
    """The way back: the block, and the rows."""
    axis, low, stop = apart.axis, apart.low, x.shape[apart.axis] - apart.high
    before = lax.slice_in_dim(x, 0, low, axis=axis)
    after = lax.slice_in_dim(x, stop, x.shape[axis], axis=axis)
    return lax.slice_in_dim(x, low, stop, axis=axis), jnp.concatenate([before, after], axis)
