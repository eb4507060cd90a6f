"""A worker's input as several arrays: its own block, and what it got of its neighbours' entries around that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jax import Array

from distdl_jax.primitives.packing import joined_slices, side_by_side

Parts = tuple[Array, ...]
"""A block, and for each side of it an array of what is around it there."""

_Shape = tuple[int, ...]


class Side(NamedTuple):
    """What is around a block along dimension `axis`, as one array: `low` entries before it, then `high` after it."""

    axis: int
    low: int
    high: int


@dataclass(frozen=True)
class Apart:
    """Where the entries around a block are, which lie apart from it.

    - `sides`: in order; along the axes of the sides before it, one is as long as all is when joined, along those of the
      sides after it as the block. So the corners belong to the last side that they are on.
    """

    sides: tuple[Side, ...]

    def whole(self, block: _Shape) -> _Shape:
        """The shape of all that is joined, from that of the block."""
        shape = list(block)
        for axis, low, high in self.sides:
            shape[axis] += low + high
        return tuple(shape)

    def parts(self, whole: _Shape) -> tuple[_Shape, ...]:
        """The shapes of the parts, from that of all that is joined."""
        shape, shapes = list(whole), []
        for axis, low, high in reversed(self.sides):
            own, shape[axis] = shape[axis] - low - high, low + high
            shapes.append(tuple(shape))
            shape[axis] = own
        return (tuple(shape), *reversed(shapes))


def joined(parts: Parts, apart: Apart) -> Array:
    """The block with what is around it."""
    block = parts[0]
    for its, (axis, low, high) in zip(parts[1:], apart.sides, strict=True):
        pieces = [(its, 0, low), (block, 0, block.shape[axis]), (its, low, low + high)]
        block = joined_slices(pieces, axis, side_by_side)
    return block


def taken_apart(x: Array, apart: Apart) -> Parts:
    """The way back."""
    around = []
    for axis, low, high in reversed(apart.sides):
        stop = x.shape[axis] - high
        around.append(ends(x, axis, low, high))
        x = joined_slices([(x, low, stop)], axis)
    return (x, *reversed(around))


def ends(x: Array, axis: int, first: int, last: int) -> Array:
    """The first and the last entries of x along a dimension, side by side."""
    size = x.shape[axis]
    return joined_slices([(x, 0, first), (x, size - last, size)], axis)
