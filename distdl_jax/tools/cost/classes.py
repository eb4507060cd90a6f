"""Numbers for all workers at once: by class of workers with equal values, and for the messages of box movements.

A worker's messages are the products of the overlaps of its ranges with others', dimension by dimension. So their
number, and their elements, are products of numbers determined by its index along each dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np

from distdl_jax.functional.halo_exchange import RangesPlan
from distdl_jax.functional.repartition import RepartitionPlan
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.plans.alike import ByClass
from distdl_jax.plans.decomposition import ProductGrid, Range
from distdl_jax.plans.exchange import Exchange, Overlap
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.worker_ranks import ConsecutiveRanks, Workers

Index = np.ndarray | slice | int
"""Workers, as an index into arrays with an entry for each worker."""


def groups(values: Mapping[int, Any]) -> Iterator[tuple[int, Index]]:
    """Yield a worker of each class of `values`, and all workers of the class."""
    if not isinstance(values, ByClass):
        yield from zip(values, values, strict=True)
        return
    for workers in values.classes.members:
        yield int(workers[0]), workers


def codes(several: Iterable[Mapping[int, Any]], before: np.ndarray) -> np.ndarray:
    """Return a number for each worker: equal if the number `before` and the values in all mappings are."""
    for values in several:
        own = np.zeros(len(before), np.int64)
        numbers: dict[Any, int] = {}
        for worker, workers in groups(values):
            own[workers] = numbers.setdefault(values[worker], len(numbers) + 1)
        before = np.unique(before * (len(numbers) + 1) + own, return_inverse=True)[1].reshape(-1)
    return before


def same(codes: np.ndarray) -> list[np.ndarray]:
    """Return the positions of each code."""
    order = np.argsort(codes, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)


class Traffic(NamedTuple):
    """The number of messages that each worker of a movement, or of its adjoint, sends, and their bytes."""

    workers: np.ndarray | slice
    messages: np.ndarray
    bytes: np.ndarray


Counts = tuple[np.ndarray, np.ndarray]
"""The messages, and their elements, of each cell of a grid."""

Line = Mapping[int, Sequence[Overlap]]
"""The overlap of one index along a dimension with the indices of the other grid."""


def traffic(movement: RepartitionPlan | RangesPlan, *, adjoint: bool = False) -> Traffic:
    """Return the messages of workers in a movement, or in its adjoint."""
    if isinstance(movement, RepartitionPlan):
        grid, other = movement.exchange.owned, movement.exchange.needed
        grid, other = (other, grid) if adjoint else (grid, other)
        messages, elements = repartition_counts(grid, other)
    else:
        grid = movement.halos.owned
        messages, elements = halo_counts(movement.halos, adjoint=adjoint)
    dtype = accumulation_dtype(movement.dtype) if adjoint and movement.copies else movement.dtype
    return Traffic(as_index(grid.ranks), messages, elements * dtype.itemsize)


def as_index(workers: Workers) -> np.ndarray | slice:
    """Return workers as an index into an array with an entry for each worker of the world."""
    return slice(workers[0], workers[-1] + 1) if isinstance(workers, ConsecutiveRanks) else np.asarray(workers)


def repartition_counts(owned: ProductGrid, needed: ProductGrid) -> Counts:
    """Return the messages from the workers of `owned` to those of `needed` in a repartition, and in reverse.

    Both grids cover the tensor.

    >>> rows, columns = (ProductGrid.balanced((4, 6), shape, range(2)) for shape in ((2, 1), (1, 2)))
    >>> [numbers.tolist() for numbers in repartition_counts(rows, columns)]
    [[1, 1], [6, 6]]
    """
    messages, elements = map(_product, zip(*map(_along, owned.ranges, needed.ranges), strict=True))
    # Entries that a worker has on both grids need no message.
    place = np.full(max(*owned.ranks, *needed.ranks) + 1, -1)
    place[as_index(needed.ranks)] = np.arange(len(needed.ranks))
    place = place[as_index(owned.ranks)]
    own = np.where(place < 0, 0, 1)
    here, there = _indices(len(place), owned.shape), np.unravel_index(place.clip(0), needed.shape)
    for d, (i, j) in enumerate(zip(here, there, strict=True)):
        (start, stop), (first, last) = (np.asarray(g.ranges[d])[at].T for g, at in ((owned, i), (needed, j)))
        own = own * np.maximum(np.minimum(stop, last) - np.maximum(start, first), 0)
    return messages - (own > 0), elements - own


@lru_cache(maxsize=4096)
def _along(ranges: tuple[Range, ...], others: tuple[Range, ...]) -> Counts:
    """Return, for each range, the number of other ranges that it overlaps, and its length."""
    (starts, stops), (first, last) = (np.asarray(each).reshape(-1, 2).T for each in (ranges, others))
    first, last = first[last > first], last[last > first]  # without empty ones; both ascend
    overlapping = np.searchsorted(first, stops, "left") - np.searchsorted(last, starts, "right")
    return np.where(stops > starts, overlapping, 0), stops - starts


@lru_cache(maxsize=256)
def _indices(workers: int, grid: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return np.unravel_index(np.arange(workers), grid)


def halo_counts(halos: Halos, *, adjoint: bool = False) -> Counts:
    """Return the messages of the workers of `halos.owned` in a halo exchange, over all dimensions.

    >>> grid = ProductGrid.balanced((6, 4), (3, 1), range(3))
    >>> [numbers.tolist() for numbers in halo_counts(Halos(grid, (((0, 3), (1, 5), (3, 6)), ((0, 4),))))]
    [[1, 2, 1], [4, 8, 4]]
    """
    sizes = [_sizes(ranges) for ranges in halos.owned.ranges]
    messages = elements = np.zeros(len(halos.owned.ranks), np.int64)
    for d, (owned, needed) in enumerate(zip(halos.owned.ranges, halos.needed, strict=True)):
        if owned == needed:
            continue
        line = tuple(range(len(owned)))
        own, wanted = (ProductGrid(line, (ranges,)) for ranges in (owned, needed))
        exchange = Exchange(own, wanted, halos.periodic[d : d + 1])
        overlaps = exchange.overlaps_of_needed if adjoint else exchange.overlaps_of_owned
        others = [[shared for j, shared in overlaps(0, i).items() if j != i] for i in line]
        counts, lengths = [len(shared) for shared in others], [sum(map(_length, shared)) for shared in others]
        # Rows have the lengths needed in previous dimensions, and owned in later ones.
        messages = messages + _product((*map(_signs, sizes[:d]), counts, *map(_signs, sizes[d + 1 :])))
        elements = elements + _product((*sizes[:d], lengths, *sizes[d + 1 :]))
        sizes[d] = _sizes(needed)
    return messages, elements


def _sizes(ranges: Sequence[Range]) -> list[int]:
    return [stop - start for start, stop in ranges]


def _signs(sizes: Sequence[int]) -> list[int]:
    return [min(size, 1) for size in sizes]


def _length(shared: Sequence[Overlap]) -> int:
    return sum(overlap.length for overlap in shared)


def _product(along: Iterable[Sequence[int]]) -> np.ndarray:
    """Return the product of the numbers for each cell's index along each dimension."""
    return reduce(np.multiply.outer, (np.asarray(numbers, np.int64) for numbers in along)).ravel()
