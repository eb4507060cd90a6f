"""What a repartition moves, for all workers at once: in closed form, from the overlaps along each dimension.

A worker's own share, and its numbers of partners, are products over the dimensions; plans have the same numbers.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Traffic(NamedTuple):
    """Messages and elements of each worker, by rank: those that it sends, and those that it receives."""

    sends: np.ndarray
    elements_sent: np.ndarray
    receives: np.ndarray
    elements_received: np.ndarray


def repartition_traffic(shape: Shape, grid: Shape, other: Shape) -> Traffic:
    """Return what moves where a tensor goes from balanced blocks on `grid` to those on `other`, both of ranks from 0.

    >>> repartition_traffic((4, 4), (2, 1), (1, 2)).elements_sent.tolist()
    [4, 4]
    """
    p, q = math.prod(grid), math.prod(other)
    workers = max(p, q)
    here, there = np.arange(workers) < p, np.arange(workers) < q
    indices = zip(_indices(workers, grid), _indices(workers, other), strict=True)
    own = (here & there).astype(np.int64)
    sends, receives = here.astype(np.int64), there.astype(np.int64)
    block, needed = here.astype(np.int64), there.astype(np.int64)
    for n, p_d, q_d, (i, j) in zip(shape, grid, other, indices, strict=True):
        line = _line(n, p_d, q_d)
        own *= line.overlaps[i, j]
        sends *= line.partners[i]
        receives *= line.sources[j]
        block *= line.lengths[i]
        needed *= line.needed[j]
    stays = own > 0
    return Traffic(sends - stays, block - own, receives - stays, needed - own)


@lru_cache(maxsize=4096)
def _indices(workers: int, grid: Shape) -> tuple[np.ndarray, ...]:
    """Return the places on a grid, per dimension, of so many workers; of those behind the grid any."""
    return np.unravel_index(np.arange(workers) % math.prod(grid), grid)


class _Line(NamedTuple):
    """What p balanced blocks of a dimension have in common with q others.

    - `overlaps`: p x q elements; `lengths`, `needed`: of the blocks.
    - `partners`, `sources`: how many others overlap with each block.
    """

    overlaps: np.ndarray
    lengths: np.ndarray
    needed: np.ndarray
    partners: np.ndarray
    sources: np.ndarray


@lru_cache(maxsize=4096)
def _line(n: int, p: int, q: int) -> _Line:
    (a, b), (c, d) = _ends(n, p), _ends(n, q)
    overlaps = np.maximum(np.minimum(b[:, None], d) - np.maximum(a[:, None], c), 0)
    return _Line(overlaps, b - a, d - c, (overlaps > 0).sum(1), (overlaps > 0).sum(0))


def _ends(n: int, p: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the beginnings and the ends of p balanced blocks."""
    places = np.arange(p + 1)
    ends = places * (n // p) + np.minimum(places, n % p)
    return ends[:-1], ends[1:]
