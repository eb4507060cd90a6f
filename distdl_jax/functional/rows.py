"""Rows by number: row numbers as values, and the exchange of rows between workers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np

from distdl_jax.plans.decomposition import ProductGrid, box_shape
from distdl_jax.plans.exchange import Exchange, Overlap
from distdl_jax.plans.messages import ExchangePlan, Piece, RowList, Start


class Rows(RowList):
    """Row numbers in an immutable array: compared and hashed by value, with the same repr on every worker.

    >>> rows = Rows([[2, 0], [2, 1]])
    >>> rows.shape, rows == Rows(rows.array)
    ((2, 2), True)
    >>> rows
    row numbers (of shape 2 x 2, checksum 91820e2e)
    """

    __slots__ = ("_checksum", "array")

    def __init__(self, numbers: Any) -> None:
        wide = np.array(numbers, np.int64, order="C")
        small = bool(np.all(np.abs(wide) < 2**31))
        self.array: np.ndarray[Any, np.dtype[Any]] = wide.astype(np.int32 if small else np.int64)
        self.array.setflags(write=False)
        self._checksum = zlib.crc32(self.array.tobytes())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.array.shape

    @property
    def repeats(self) -> bool:
        """Whether a non-negative number occurs in it more than once."""
        return bool(np.any(np.bincount(self.array.ravel()) > 1))

    @property
    def ascends(self) -> bool:
        """Whether the numbers are nondecreasing."""
        return bool(np.all(np.diff(self.array.ravel()) >= 0))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rows):
            return NotImplemented
        same = self._checksum == other._checksum and self.shape == other.shape
        return self is other or (same and np.array_equal(self.array, other.array))

    def __hash__(self) -> int:
        return hash((self.shape, self._checksum))

    def __repr__(self) -> str:
        return f"row numbers (of shape {' x '.join(map(str, self.shape))}, checksum {self._checksum:08x})"


def run_or_rows(numbers: np.ndarray) -> Start:
    """Return the first of consecutive numbers, otherwise all of them.

    >>> run_or_rows(np.array([3, 4, 5])), run_or_rows(np.array([3, 5])).shape
    (3, (2,))
    """
    if len(numbers) and np.array_equal(numbers, np.arange(numbers[0], numbers[0] + len(numbers))):
        return int(numbers[0])
    return Rows(numbers)


def numbers_of(start: Start, length: int) -> np.ndarray:
    """Return the numbers of `length` rows: the inverse of `run_or_rows`."""
    numbers: np.ndarray = np.arange(start, start + length) if isinstance(start, int) else start.array
    return numbers


def distinct(numbers: np.ndarray) -> np.ndarray:
    """Return the distinct numbers, ascending; for many integers much faster than `np.unique`.

    >>> distinct(np.array([3, 1, 3])).tolist()
    [1, 3]
    """
    ascending = np.sort(numbers, axis=None)
    return ascending[np.diff(ascending, prepend=ascending[:1] - 1) != 0]


@dataclass(frozen=True, kw_only=True)
class RowExchange(Exchange):
    """The owners of a table's rows, and the workers that need them: an exchange whose needs along `axis` are lists.

    - `owned`: the blocks of the table, with its rows along dimension `axis`.
    - `entries`: the blocks of the result, with the dimensions of `indices` in place of `axis`.
    - `indices`: the row number of each entry.
    - `rows`: by index along `axis`, the needed row numbers, ascending.

    A worker needs each row once, however many of its entries have that number: `needed` has, along `axis`, the numbers
    of its entries, ascending, without duplicates. `plan` moves those rows, and `copy` copies them to the entries.
    Reversed, both are the adjoint: the sums, for each row, of the entries with that number.

    >>> table, entries = (ProductGrid.balanced((n,), (2,), ranks=(0, 1)) for n in (4, 6))
    >>> exchange = RowExchange.of(table, entries, 0, Rows([0, 2, 2, 3, 0, 3]))
    >>> exchange.plan(0).out_shape, exchange.plan(0).rounds[0].recv.size, exchange.copy(0).out_shape
    ((2,), 1, (3,))
    """

    axis: int
    entries: ProductGrid
    indices: Rows
    rows: tuple[np.ndarray, ...] = field(compare=False, repr=False)

    @classmethod
    def of(cls, owned: ProductGrid, entries: ProductGrid, axis: int, indices: Rows) -> RowExchange:
        """Return the exchange of the rows of a table that the entries need."""
        after = axis + len(indices.shape)
        places = product(*(range(p) for p in entries.shape[axis:after]))
        rows = tuple(distinct(_numbers(entries, axis, indices, place)) for place in places)
        lists = tuple((0, len(numbers)) for numbers in rows)
        needed = ProductGrid(entries.ranks, (*entries.ranges[:axis], lists, *entries.ranges[after:]))
        return cls(owned, needed, axis=axis, entries=entries, indices=indices, rows=rows)

    @cached_property
    def _plans(self) -> dict[int, ExchangePlan]:
        return {}

    def plan(self, rank: int) -> ExchangePlan:
        """Return the part of the worker of world rank `rank` in moving the rows; cached."""
        if rank not in self._plans:
            self._plans[rank] = super().plan(rank)
        return self._plans[rank]

    def copy(self, rank: int) -> ExchangePlan:
        """Return the copies from a worker's rows to its entries."""
        origin = (0,) * len(self.needed.shape)
        if (cell := self.needed.cell_of.get(rank)) is None:
            return ExchangePlan(origin, origin, (), ())
        before = box_shape(self.needed.box(cell))
        place = self.entries.index(self.entries.cell_of[rank])[self.axis :][: len(self.indices.shape)]
        numbers = _numbers(self.entries, self.axis, self.indices, place)
        start, count = (
            run_or_rows(np.searchsorted(self.rows[self.needed.index(cell)[self.axis]], numbers)),
            len(numbers),
        )
        source = (*origin[: self.axis], start, *origin[self.axis + 1 :])
        shape = (*before[: self.axis], count, *before[self.axis + 1 :])
        copies = (Piece(source, origin, shape),) if prod(shape) else ()
        return ExchangePlan(before, shape, copies, (), in_disjoint=count == before[self.axis])

    @cached_property
    def repeats(self) -> bool:
        """Whether a row is needed more than once, on one worker or several."""
        return self.indices.repeats

    def overlaps_of_owned(self, d: int, i: int) -> dict[int, list[Overlap]]:
        if d != self.axis:
            return super().overlaps_of_owned(d, i)
        start, stop = self.owned.ranges[d][i]
        overlaps = {}
        for j, rows in enumerate(self.rows):
            first, last = np.searchsorted(rows, (start, stop)).tolist()
            if first < last:
                overlaps[j] = [Overlap(run_or_rows(rows[first:last] - start), first, last - first)]
        return overlaps

    def overlaps_of_needed(self, d: int, j: int) -> dict[int, list[Overlap]]:
        if d != self.axis:
            return super().overlaps_of_needed(d, j)
        rows = self.rows[j]
        ends = pairwise(np.searchsorted(rows, [0, *(stop for _, stop in self.owned.ranges[d])]).tolist())
        return {
            i: [Overlap(run_or_rows(rows[first:last] - start), first, last - first)]
            for i, ((start, _), (first, last)) in enumerate(zip(self.owned.ranges[d], ends, strict=True))
            if first < last
        }

    def _are_disjoint(self, line: Mapping[int, Sequence[Overlap]]) -> bool:
        overlaps_of_line = [overlap for overlaps in line.values() for overlap in overlaps]
        if all(isinstance(overlap.source, int) for overlap in overlaps_of_line):
            return super()._are_disjoint(line)
        numbers = [numbers_of(overlap.source, overlap.length) for overlap in overlaps_of_line]
        return not Rows(np.concatenate(numbers)).repeats


def _numbers(entries: ProductGrid, axis: int, indices: Rows, place: tuple[int, ...]) -> np.ndarray:
    """Return the numbers of a worker's entries, from its index along the dimensions of `indices`."""
    box = (entries.ranges[axis + d][i] for d, i in enumerate(place))
    return indices.array[tuple(slice(*side) for side in box)].ravel()
