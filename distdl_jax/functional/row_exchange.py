"""From the rows that workers own and the numbers of the rows that they need to one worker's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from math import prod

import numpy as np

from distdl_jax.functional.rows import Rows, distinct, numbers_of, run_or_rows
from distdl_jax.plans.decomposition import ProductGrid, box_shape
from distdl_jax.plans.exchange import Exchange, Overlap
from distdl_jax.plans.messages import ExchangePlan, Piece


@dataclass(frozen=True, init=False)
class RowExchange(Exchange):
    """Who owns which rows of a table, and who needs which of them: an exchange whose needs along `axis` are lists.

    - `owned`: the blocks of the table, whose dimension `axis` has the rows.
    - `entries`: the blocks of the result, which has the dimensions of `indices` in the place of `axis`.
    - `indices`: for each entry the number of its row.

    A worker needs each row once, however many of its entries have that number: `needed` has, along `axis`, the numbers
    of its entries, ascending, without repetitions. `plan` moves those rows, and `copy` puts them in the entries. Both
    read backwards are the adjoint: the sums, at each row, of the entries with that number.

    >>> table, entries = (ProductGrid.balanced((n,), (2,), ranks=(0, 1)) for n in (4, 6))
    >>> exchange = RowExchange(table, entries, 0, Rows([0, 2, 2, 3, 0, 3]))
    >>> exchange.plan(0).out_shape, exchange.plan(0).rounds[0].recv.size, exchange.copy(0).out_shape
    ((2,), 1, (3,))
    """

    axis: int
    entries: ProductGrid
    indices: Rows

    # By index along `axis`: the numbers of the rows that it needs, ascending. - What `plan` has found, by rank.
    _rows: list[np.ndarray] = field(compare=False, repr=False)
    _plans: dict[int, ExchangePlan] = field(compare=False, repr=False)

    def __init__(self, owned: ProductGrid, entries: ProductGrid, axis: int, indices: Rows) -> None:
        after = axis + len(indices.shape)
        vars(self).update(axis=axis, entries=entries, indices=indices, _plans={})
        places = product(*(range(p) for p in entries.shape[axis:after]))
        vars(self).update(_rows=[distinct(self._numbers(place)) for place in places])
        lists = tuple((0, len(rows)) for rows in self._rows)
        needed = ProductGrid(entries.ranks, (*entries.ranges[:axis], lists, *entries.ranges[after:]))
        super().__init__(owned, needed)

    def _numbers(self, place: tuple[int, ...]) -> np.ndarray:
        """Return the numbers of a worker's entries, from its place along the dimensions of `indices`."""
        box = (self.entries.ranges[self.axis + d][i] for d, i in enumerate(place))
        return self.indices.array[tuple(slice(*side) for side in box)].ravel()

    def plan(self, rank: int) -> ExchangePlan:
        """Return the part of the worker of world rank `rank` in moving the rows; it is kept."""
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
        numbers = self._numbers(place)
        start, count = (
            run_or_rows(np.searchsorted(self._rows[self.needed.index(cell)[self.axis]], numbers)),
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
        for j, rows in enumerate(self._rows):
            first, last = np.searchsorted(rows, (start, stop)).tolist()
            if first < last:
                overlaps[j] = [Overlap(run_or_rows(rows[first:last] - start), first, last - first)]
        return overlaps

    def overlaps_of_needed(self, d: int, j: int) -> dict[int, list[Overlap]]:
        if d != self.axis:
            return super().overlaps_of_needed(d, j)
        rows = self._rows[j]
        ends = pairwise(np.searchsorted(rows, [0, *(stop for _, stop in self.owned.ranges[d])]).tolist())
        return {
            i: [Overlap(run_or_rows(rows[first:last] - start), first, last - first)]
            for i, ((start, _), (first, last)) in enumerate(zip(self.owned.ranges[d], ends, strict=True))
            if first < last
        }

    def _are_disjoint(self, line: Mapping[int, Sequence[Overlap]]) -> bool:
        found = [overlap for overlaps in line.values() for overlap in overlaps]
        if all(isinstance(overlap.source, int) for overlap in found):
            return super()._are_disjoint(line)
        numbers = [numbers_of(overlap.source, overlap.length) for overlap in found]
        return not Rows(np.concatenate(numbers)).repeats
