"""Halo exchange as a sequence of exchanges, one for each dimension.

After the exchange along dimension 0 a worker holds its needed range there and its owned range elsewhere; the exchange
along dimension 1 then moves those longer rows, and so on. So corners are included, and a worker communicates only with
the workers of its own lines: 2D neighbours instead of 3^D - 1 if halos are narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.plans.decomposition import Box, ProductGrid, Range, box_shape
from distdl_jax.plans.exchange import Exchange, per_dimension
from distdl_jax.plans.messages import ExchangePlan

MOST_ROUNDS = 2**16
"""A periodic halo is planned period by period."""


def needed_ranges(
    owned: ProductGrid, halos: Sequence[Sequence[Sequence[int]]], periodic: tuple[bool, ...] = ()
) -> tuple[tuple[Range, ...], ...]:
    """Return the ranges to exchange, per dimension and index, from the halo widths requested by the workers of a grid.

    Each range is its owner's, extended by (left, right), and clipped to the tensor if the dimension isn't periodic.
    Corners are included in the rows, so workers of equal index in a dimension get equal ranges there: the widest that
    any of them requests; `own_box` is the part that one of them wants.

    **Arguments:**

    - `owned`: the grid, which tiles the tensor.
    - `halos`: for each cell, row-major, one pair (left, right) per dimension.
    - `periodic`: per dimension, whether it wraps around. Default: none.

    >>> grid = ProductGrid.balanced((9,), (3,), ranks=(0, 1, 2))
    >>> needed_ranges(grid, [[(1, 1)], [(1, 4)], [(0, 1)]])
    (((0, 4), (2, 9), (6, 9)),)
    """
    if len(halos) != len(owned.ranks):
        raise InvalidArgumentError(
            f"`halos` (of length {len(halos)}) must have one entry for each of {len(owned.ranks)} workers."
        )
    # Rows carry the corners, so all workers of one index along a dimension fetch what the neediest of them asks for.
    widest: list[dict[int, tuple[int, int]]] = [{} for _ in owned.shape]
    for cell, halo in enumerate(halos):
        if len(halo) != len(owned.shape):
            raise InvalidArgumentError(
                f"`halos` of rank {owned.ranks[cell]} (={tuple(halo)}) must have one pair of widths for each of "
                f"{len(owned.shape)} dimensions."
            )
        for d, (i, (left, right)) in enumerate(zip(owned.index(cell), halo, strict=True)):
            before, after = widest[d].get(i, (left, right))
            widest[d][i] = max(before, left), max(after, right)
    wraps = per_dimension(periodic, len(owned.shape))
    for d, (n, wrap) in enumerate(zip(owned.extent, wraps, strict=True)):
        if wrap and n == 0 and any(sum(pair) > 0 for pair in widest[d].values()):
            raise InvalidArgumentError(
                f"`halos` requests entries around the blocks in dimension {d}, which is periodic and has no entries: "
                "there is nothing to wrap around."
            )
        if wrap and max((width for pair in widest[d].values() for width in pair), default=0) > MOST_ROUNDS * n:
            raise InvalidArgumentError(
                f"`halos` requests entries that are more than {MOST_ROUNDS} times around dimension {d}, of length {n}."
            )
    return tuple(
        tuple(_widened(own, widest[d][i], None if wraps[d] else n) for i, own in enumerate(owned.ranges[d]))
        for d, n in enumerate(owned.extent)
    )


def own_box(owned: ProductGrid, cell: int, halo: Sequence[Sequence[int]], periodic: tuple[bool, ...] = ()) -> Box:
    """Return the ranges that one cell requests with its own widths.

    >>> own_box(ProductGrid.balanced((9,), (3,), ranks=(0, 1, 2)), 1, [(1, 4)])
    ((2, 9),)
    """
    wraps = per_dimension(periodic, len(owned.shape))
    return tuple(
        _widened(own, (left, right), None if wrap else n)
        for own, (left, right), wrap, n in zip(owned.box(cell), halo, wraps, owned.extent, strict=True)
    )


def _widened(own: Range, halo: tuple[int, int], n: int | None) -> Range:
    """Return `own` with its halo, clipped to [0, n) unless `n` is None."""
    start, stop = own[0] - halo[0], own[1] + halo[1]
    if n is not None:
        start, stop = min(max(start, 0), n), min(max(stop, 0), n)
    if stop < start:
        raise InvalidArgumentError(
            f"`halos` holds {halo}, which removes more than there is from a block of {own[1] - own[0]}."
        )
    return start, stop


@dataclass(frozen=True)
class Halos:
    """A halo exchange: the same value on every worker, from which each plans its part.

    - `owned`: the grid of workers, with the ranges that they own.
    - `needed`: per dimension, the range that each index along it needs: wider or narrower than the owned range, the
      same, empty, or somewhere else. Outside the tensor it wraps around if the dimension is periodic, and is zero
      otherwise.
    - `periodic`: per dimension, whether it wraps around. Default: none.

    As with `Exchange`, use one object for many plans.

    >>> grid = ProductGrid.balanced((6, 4), (3, 1), ranks=(0, 1, 2))
    >>> (plan,) = Halos(grid, (((0, 3), (1, 5), (3, 6)), ((0, 4),))).plans(rank=1)
    >>> plan.in_shape, plan.out_shape, [message.partner for message in plan.recvs]
    ((2, 4), (4, 4), [0, 2])
    """

    owned: ProductGrid
    needed: tuple[tuple[Range, ...], ...]
    periodic: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        shape = tuple(len(ranges) for ranges in self.needed)
        if shape != self.owned.shape:
            raise InvalidArgumentError(
                f"`needed` has {shape} ranges, but `owned` is a grid of shape {self.owned.shape}."
            )
        per_dimension(self.periodic, len(shape))

    @cached_property
    def wraps(self) -> tuple[bool, ...]:
        """For each dimension whether it is periodic."""
        return per_dimension(self.periodic, len(self.owned.shape))

    def plans(self, rank: int) -> tuple[ExchangePlan, ...]:
        """Return the plans of the worker of world rank `rank`: one per dimension along which anything moves, in order.

        Each plan takes the block that the previous one left. The adjoint is the reverse plans in reverse order. All
        workers get the same number of plans; a worker outside the grid gets empty ones. No plan at all means the
        identity.
        """
        cell = self.owned.cell_of.get(rank)
        if cell is None:
            nothing = (0,) * len(self.owned.shape)
            return tuple(ExchangePlan(nothing, nothing, (), ()) for _ in self._moving)
        return tuple(self._along(d, cell).plan(rank) for d in self._moving)

    def shape_needed(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the block of the worker of world rank `rank`, one of the grid, after the exchange."""
        return box_shape(self.wanted.box(self.owned.cell_of[rank]))

    @cached_property
    def patterns(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """For each dimension and index, the size of the block, and the number of additional entries at its ends."""
        return tuple(
            tuple(
                (own[1] - own[0], own[0] - wide[0], wide[1] - own[1]) for own, wide in zip(owned, needed, strict=True)
            )
            for owned, needed in zip(self.owned.ranges, self.needed, strict=True)
        )

    @cached_property
    def _moving(self) -> tuple[int, ...]:
        return tuple(d for d, wanted in enumerate(self.needed) if wanted != self.owned.ranges[d])

    @cached_property
    def wanted(self) -> ProductGrid:
        """The grid of workers, with the ranges that they need."""
        return ProductGrid(self.owned.ranks, self.needed)

    @cached_property
    def _lines(self) -> dict[tuple[int, int], Exchange]:
        return {}

    def _along(self, d: int, cell: int) -> Exchange:
        """Return the exchange along dimension `d` among the workers of `cell`'s line."""
        line = self.owned.line(cell, d)
        if (d, line[0]) not in self._lines:
            widened = self.wanted.box(cell)[:d] + self.owned.box(cell)[d:]
            across = [((0, n),) for n in box_shape(widened)]
            before, after = (
                ProductGrid(line, (*across[:d], ranges, *across[d + 1 :]))
                for ranges in (self.owned.ranges[d], self.needed[d])
            )
            periodic = tuple(wraps and e == d for e, wraps in enumerate(self.wraps))
            self._lines[d, line[0]] = Exchange(before, after, periodic)
        return self._lines[d, line[0]]
