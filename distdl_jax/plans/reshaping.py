"""From the blocks of a tensor to blocks of another shape with the same elements, in row-major order: one exchange.

Adjacent dimensions of x and of y with the same number of elements form a *group*; the content of a message is a product
over the groups, as it is over dimensions in `exchange`. Within a group a block is a set of *runs*, ranges of the flat
numbers of the group's elements, and two blocks share parts of runs. So a worker's block is viewed with one flat
dimension for each group, which costs nothing, and there a message's pieces are boxes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.plans.decomposition import ProductGrid, Range, index_of, rank_of
from distdl_jax.plans.exchange import Overlap, product_pieces, shift_schedule
from distdl_jax.plans.messages import ExchangePlan, Piece
from distdl_jax.plans.worker_ranks import positions, union

Axis = tuple[Range, ...]
"""The ranges along a dimension, consecutive from 0 on."""


class _Run(NamedTuple):
    """A range of a group's flat numbers that lies in one block: its start, there and in the block."""

    start: int
    stop: int
    cell: int
    local: int


@dataclass(frozen=True)
class _Side:
    """The blocks of one of the tensors, in the dimensions `axes` of one group."""

    axes: tuple[Axis, ...]

    @cached_property
    def cells(self) -> tuple[int, ...]:
        """The number of blocks along each dimension."""
        return tuple(len(axis) for axis in self.axes)

    @cached_property
    def _rows(self) -> tuple[tuple[Axis, ...], Axis]:
        """The leading dimensions, and the last split one with the following ones, which are whole."""
        front = list(self.axes)
        behind = 1
        while len(front) > 1 and len(front[-1]) == 1:
            behind *= front.pop()[-1][1]
        last = front.pop()
        return tuple(front), tuple((start * behind, stop * behind) for start, stop in last)

    def size(self, index: Sequence[int]) -> int:
        """Return the number of elements of the block at `index`."""
        return prod(axis[i][1] - axis[i][0] for axis, i in zip(self.axes, index, strict=True))

    def runs(self, index: Sequence[int]) -> Iterator[_Run]:
        """Return the runs of the block at `index`, ascending."""
        front, last = self._rows
        start, stop = last[index[len(front)]]
        cell, local = rank_of(index, self.cells), 0
        lengths = [axis[-1][1] for axis in front]
        for places in product(*(range(*axis[i]) for axis, i in zip(front, index, strict=False))):
            row = 0
            for place, n in zip(places, lengths, strict=True):
                row = row * n + place
            if start < stop:
                yield _Run(row * last[-1][1] + start, row * last[-1][1] + stop, cell, local)
            local += stop - start

    def parts(self, start: int, stop: int) -> Iterator[_Run]:
        """Cut the range from `start` to `stop` at the ends of the runs of the blocks."""
        front, last = self._rows
        width, begins = last[-1][1], [axis[0] for axis in last]
        while start < stop:
            row, column = divmod(start, width)
            i = bisect_right(begins, column) - 1  # of ranges with the same start, the last one is not empty
            end = min(stop, start + last[i][1] - column)
            index, local = self._row(front, row)
            cell = rank_of((*index, i, *(0,) * (len(self.axes) - len(front) - 1)), self.cells)
            yield _Run(start, end, cell, local * (last[i][1] - last[i][0]) + column - last[i][0])
            start = end

    @staticmethod
    def _row(front: Sequence[Axis], row: int) -> tuple[list[int], int]:
        """Return the block that has a row of the leading dimensions, and the row's number in it."""
        index, local, times = [], 0, 1
        for axis in reversed(front):
            row, place = divmod(row, axis[-1][1])
            i = bisect_right(axis, (place, axis[-1][1] + 1)) - 1
            index.append(i)
            local += (place - axis[i][0]) * times
            times *= axis[i][1] - axis[i][0]
        return index[::-1], local


@dataclass(frozen=True)
class Reshaping:
    """Who owns which block of x, and who needs which block of y, which is x in another shape: like `Exchange`.

    - `owned`, `needed`: grids of workers, of any number of dimensions; their ranges are consecutive from 0 on, with the
      same number of elements in both.

    >>> rows = ProductGrid.balanced((4, 3), (2, 1), ranks=(0, 1))
    >>> flat = ProductGrid.balanced((12,), (3,), ranks=(0, 1, 2))
    >>> plan = Reshaping(rows, flat).plan(0)
    >>> plan.in_shape, plan.out_shape, plan.copies
    ((6,), (4,), (Piece(source_start=(0,), dest_start=(0,), shape=(4,)),))
    >>> plan.rounds[0].send
    Message(partner=1, pieces=(Piece(source_start=(4,), dest_start=(0,), shape=(2,)),))
    """

    owned: ProductGrid
    needed: ProductGrid

    def __post_init__(self) -> None:
        if not (self.owned.tiles and self.needed.tiles and prod(self.owned.extent) == prod(self.needed.extent)):
            raise InvalidArgumentError(
                f"`owned` (of shape {self.owned.extent}) and `needed` (of shape {self.needed.extent}) must have "
                "consecutive ranges that start at 0, and the same number of elements."
            )

    @cached_property
    def groups(self) -> tuple[tuple[_Side, _Side], ...]:
        """The dimensions of x and of y, group by group."""
        if prod(self.owned.extent) == 0:
            return ((_Side(self.owned.ranges), _Side(self.needed.ranges)),)
        sides, groups = (list(self.owned.ranges), list(self.needed.ranges)), []
        while sides[0] and sides[1]:
            group: tuple[list[Axis], list[Axis]] = ([sides[0].pop()], [sides[1].pop()])
            while (sizes := [prod(axis[-1][1] for axis in axes) for axes in group])[0] != sizes[1]:
                small, large = (0, 1) if sizes[0] < sizes[1] else (1, 0)
                axis = group[large][0]
                inner, rest = divmod(sizes[small] * axis[-1][1], sizes[large])
                if rest == 0 and inner and all(end % inner == 0 for ends in axis for end in ends):
                    # The first dimension is cut between elements: outside of the group, and in it.
                    sides[large].append(tuple((start // inner, stop // inner) for start, stop in axis))
                    group[large][0] = ((0, inner),)
                else:
                    group[small].insert(0, sides[small].pop())
            groups.append(group)
        for n in (0, 1):  # the rest has length 1
            groups[-1][n][:0] = sides[n]
        return tuple((_Side(tuple(x)), _Side(tuple(y))) for x, y in reversed(groups))

    @cached_property
    def team(self) -> tuple[int, ...]:
        """The world ranks of all workers that own or need something, ascending."""
        return union(self.owned.ranks, self.needed.ranks)

    def in_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape in which a worker's block of x is viewed: a length for each group, 0 if it has none."""
        return self._shape(0, self.owned, rank)

    def out_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape in which a worker's block of y is viewed."""
        return self._shape(1, self.needed, rank)

    def plan(self, rank: int) -> ExchangePlan:
        """Return the part of the worker of world rank `rank`, on blocks of `in_shape` and `out_shape`.

        Its cost grows with the number of runs of this worker's blocks.
        """
        sends, recvs = self._shared(0, self.owned, self.needed, rank), self._shared(1, self.needed, self.owned, rank)
        copies = sends.pop(rank, ())
        recvs.pop(rank, None)
        rounds = shift_schedule(self._position, rank, sends, recvs)
        return ExchangePlan(self.in_shape(rank), self.out_shape(rank), copies, rounds)

    @cached_property
    def _position(self) -> Mapping[int, int]:
        return positions(self.team)

    def _indices(self, side: int, grid: ProductGrid, rank: int) -> list[tuple[int, ...]] | None:
        """Return the index of a worker's block in each group."""
        if (cell := grid.cell_of.get(rank)) is None:
            return None
        index = index_of(cell, [count for group in self.groups for count in group[side].cells])
        lengths = [len(group[side].axes) for group in self.groups]
        return [index[sum(lengths[:n]) : sum(lengths[: n + 1])] for n in range(len(lengths))]

    def _shape(self, side: int, grid: ProductGrid, rank: int) -> tuple[int, ...]:
        if (indices := self._indices(side, grid, rank)) is None:
            return (0,) * len(self.groups)
        return tuple(group[side].size(index) for group, index in zip(self.groups, indices, strict=True))

    def _shared(self, side: int, grid: ProductGrid, other: ProductGrid, rank: int) -> dict[int, tuple[Piece, ...]]:
        """Return the pieces that a worker's block on one side shares with those on the other, by world rank."""
        if (indices := self._indices(side, grid, rank)) is None or 0 in self._shape(side, grid, rank):
            return {}
        lines = []
        for group, index in zip(self.groups, indices, strict=True):
            line: dict[int, list[Overlap]] = {}
            for run in group[side].runs(index):
                for part in group[1 - side].parts(run.start, run.stop):
                    own, there = run.local + part.start - run.start, part.local
                    source, dest = (own, there) if side == 0 else (there, own)
                    _append(line.setdefault(part.cell, []), Overlap(source, dest, part.stop - part.start))
            lines.append(line)
        return product_pieces(lines, [prod(group[1 - side].cells) for group in self.groups], other.ranks)


def _append(line: list[Overlap], more: Overlap) -> None:
    """Append an overlap to a line, or merge it with the last one if it continues that."""
    source, dest, length = line[-1] if line else (0, 0, 0)
    if line and isinstance(source, int) and (source + length, dest + length) == (more.source, more.dest):
        line[-1] = Overlap(source, dest, length + more.length)
    else:
        line.append(more)
