"""Balanced blocks, boxes, and grids of boxes: the cutting of a tensor into the parts that workers own or need.

A *range* is a half-open interval `(start, stop)` of one dimension's indices, a *box* one range per dimension. A
*product grid* gives every cell of a grid of workers the product of its row's, column's, ... ranges as its box.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.plans.worker_ranks import ConsecutiveRanks, positions, worker_ranks

Range = tuple[int, int]
Box = tuple[Range, ...]


def _checked(n: int, p: int) -> tuple[int, int]:
    """Return both as Python integers: a plan with numpy's would be equal, and stay in caches, but not work."""
    if n < 0:
        raise InvalidArgumentError(f"`n` (={n}) must be 0 or more: it is a number of items.")
    if p < 1:
        raise InvalidArgumentError(f"`p` (={p}) must be 1 or more: it is a number of workers.")
    return operator.index(n), operator.index(p)


def balanced_sizes(n: int, p: int) -> tuple[int, ...]:
    """Return how many of `n` items each of `p` workers holds: the first n mod p workers hold one more than the rest.

    >>> balanced_sizes(10, 4)
    (3, 3, 2, 2)
    >>> balanced_sizes(2, 3)
    (1, 1, 0)
    """
    n, p = _checked(n, p)
    each, rest = divmod(n, p)
    return (each + 1,) * rest + (each,) * (p - rest)


def balanced_range(n: int, p: int, i: int) -> Range:
    """Return the items that worker `i` of `p` holds of `n`: floor(n/p) * i + min(i, n mod p) onwards.

    >>> [balanced_range(10, 4, i) for i in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    n, p = _checked(n, p)
    if not 0 <= i < p:
        raise InvalidArgumentError(f"`i` (={i}) must be a worker's index, 0 to {p - 1}.")
    each, rest = divmod(n, p)
    start = each * i + min(i, rest)
    return start, start + each + (i < rest)


@lru_cache(maxsize=256)
def balanced_ranges(n: int, p: int) -> tuple[Range, ...]:
    """Return the balanced ranges of all `p` workers, in order.

    >>> balanced_ranges(2, 3)
    ((0, 1), (1, 2), (2, 2))
    """
    return ranges_of_sizes(balanced_sizes(n, p))


def ranges_of_sizes(sizes: Sequence[int]) -> tuple[Range, ...]:
    """Return the ranges of consecutive blocks of the given sizes, balanced or not.

    >>> ranges_of_sizes((2, 0, 5))
    ((0, 2), (2, 2), (2, 7))
    """
    ranges = []
    stop = 0
    for size in sizes:
        if size < 0:
            raise InvalidArgumentError(f"`sizes` (={tuple(sizes)}) must all be 0 or more.")
        start, stop = stop, stop + operator.index(size)
        ranges.append((start, stop))
    return tuple(ranges)


def balanced_box(global_shape: Sequence[int], partition_shape: Sequence[int], index: Sequence[int]) -> Box:
    """Return the block of a tensor of `global_shape` for the worker at `index` of a balanced partition.

    >>> balanced_box((10, 4), (4, 2), (1, 0))
    ((3, 6), (0, 2))
    """
    if not len(global_shape) == len(partition_shape) == len(index):
        raise InvalidArgumentError(
            f"`global_shape` (={tuple(global_shape)}), `partition_shape` (={tuple(partition_shape)}) and "
            f"`index` (={tuple(index)}) must have the same number of dimensions."
        )
    return tuple(balanced_range(n, p, i) for n, p, i in zip(global_shape, partition_shape, index, strict=True))


def intersect_ranges(a: Range, b: Range) -> Range:
    """Return the indices that are in both ranges, as a range; an empty one has start == stop.

    >>> intersect_ranges((0, 5), (3, 9)), intersect_ranges((0, 2), (6, 9))
    ((3, 5), (6, 6))
    """
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))


def intersect(a: Box, b: Box) -> Box:
    """Return the intersection of two boxes; its volume is 0 if they don't overlap.

    >>> intersect(((0, 5), (0, 5)), ((3, 9), (4, 6)))
    ((3, 5), (4, 5))
    """
    return tuple(intersect_ranges(r, s) for r, s in zip(a, b, strict=True))


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of the block that fills `box`.

    >>> box_shape(((3, 5), (4, 4)))
    (2, 0)
    """
    return tuple(stop - start for start, stop in box)


def rank_of(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the row-major number of the cell at `index` of a grid of `shape`.

    >>> rank_of((1, 2), (2, 3))
    5
    """
    if len(index) != len(shape) or not all(0 <= i < p for i, p in zip(index, shape, strict=True)):
        raise InvalidArgumentError(f"`index` (={tuple(index)}) is not a cell of a grid of shape {tuple(shape)}.")
    rank = 0
    for i, p in zip(index, shape, strict=True):
        rank = rank * p + i
    return rank


def index_of(rank: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of cell number `rank`, row-major, of a grid of `shape`: the inverse of `rank_of`.

    >>> index_of(5, (2, 3))
    (1, 2)
    """
    if not 0 <= rank < prod(shape):
        raise InvalidArgumentError(
            f"`rank` (={rank}) must be 0 to {prod(shape) - 1} in a grid of shape {tuple(shape)}."
        )
    index = []
    for p in reversed(shape):
        rank, i = divmod(rank, p)
        index.append(i)
    return tuple(reversed(index))


@dataclass(frozen=True)
class ProductGrid:
    """A grid of workers, each with a box: the product of one range per dimension.

    - `ranks`: the world rank of each cell, row-major; no worker has two cells.
    - `ranges`: per dimension, the range of each index along it. The cell at (i, j, ...) has the box
      `ranges[0][i]` x `ranges[1][j]` x ... Ranges may be empty, overlap, leave gaps, or reach outside the tensor.

    >>> grid = ProductGrid.balanced((5, 4), (2, 1), ranks=(7, 3))
    >>> grid.shape, grid.box(grid.cell_of[3])
    ((2, 1), ((3, 5), (0, 4)))
    """

    ranks: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        if not self.ranges:
            raise InvalidArgumentError("`ranges` (=()) must hold one tuple of ranges for each of 1 or more dimensions.")
        if len(self.ranks) != prod(self.shape):
            raise InvalidArgumentError(
                f"`ranks` (of length {len(self.ranks)}) must hold one rank per cell of a grid of shape {self.shape}."
            )
        if not isinstance(self.ranks, ConsecutiveRanks) and len(self.cell_of) != len(self.ranks):
            twice = sorted(rank for rank, count in Counter(self.ranks).items() if count > 1)
            raise InvalidArgumentError(f"`ranks` holds {twice} more than once, but a worker has only one cell.")
        for d, ranges in enumerate(self.ranges):
            for start, stop in ranges:
                if stop < start:
                    raise InvalidArgumentError(
                        f"`ranges` holds ({start}, {stop}) in dimension {d}; stop must be >= start."
                    )

    @classmethod
    def balanced(cls, global_shape: Sequence[int], partition_shape: Sequence[int], ranks: Sequence[int]) -> ProductGrid:
        """Return the balanced partition of a tensor of `global_shape` over the workers `ranks`."""
        if len(global_shape) != len(partition_shape):
            raise InvalidArgumentError(
                f"`global_shape` (={tuple(global_shape)}) and `partition_shape` (={tuple(partition_shape)}) "
                f"must have the same number of dimensions."
            )
        ranges = (balanced_ranges(n, p) for n, p in zip(global_shape, partition_shape, strict=True))
        return cls(worker_ranks(ranks), tuple(ranges))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The number of workers along each dimension."""
        return tuple(len(ranges) for ranges in self.ranges)

    @cached_property
    def cell_of(self) -> Mapping[int, int]:
        """From a world rank to the row-major number of its cell."""
        return positions(self.ranks)

    def index(self, cell: int) -> tuple[int, ...]:
        """Return the index of cell number `cell`."""
        return index_of(cell, self.shape)

    def box(self, cell: int) -> Box:
        """Return the box of cell number `cell`."""
        return tuple(ranges[i] for ranges, i in zip(self.ranges, self.index(cell), strict=True))

    def line(self, cell: int, d: int) -> tuple[int, ...]:
        """Return the world ranks of the cells that differ from `cell` in dimension `d` only, `cell` included, in order.

        >>> ProductGrid.balanced((4, 6), (2, 3), ranks=range(10, 16)).line(4, 1)
        (13, 14, 15)
        """
        if self.shape[d] == len(self.ranks):
            return self.ranks
        stride = prod(self.shape[d + 1 :])
        first = cell - self.index(cell)[d] * stride
        return self.ranks[first : first + self.shape[d] * stride : stride]

    @property
    def tiles(self) -> bool:
        """Whether the ranges of each dimension are consecutive from 0 on, so that the boxes tile one tensor."""
        return all(ranges[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(ranges)) for ranges in self.ranges)

    @property
    def extent(self) -> tuple[int, ...]:
        """The global shape of the tensor covered by the boxes of a grid that `tiles`."""
        return tuple(ranges[-1][1] for ranges in self.ranges)
