"""What a repartition moves, for all workers at once: in closed form, from the overlaps along each dimension.

A worker's own share, and its numbers of partners, are products over the dimensions; plans have the same numbers.
"""

from __future__ import annotations

import math
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
    indices = zip(
        np.unravel_index(np.arange(workers) % p, grid), np.unravel_index(np.arange(workers) % q, other), strict=True
    )
    own = (here & there).astype(np.int64)
    sends, receives = here.astype(np.int64), there.astype(np.int64)
    block, needed = here.astype(np.int64), there.astype(np.int64)
    for n, p_d, q_d, (i, j) in zip(shape, grid, other, indices, strict=True):
        overlaps = _overlaps(n, p_d, q_d)
        own *= overlaps[i, j]
        sends *= (overlaps > 0).sum(1)[i]
        receives *= (overlaps > 0).sum(0)[j]
        block *= overlaps.sum(1)[i]
        needed *= overlaps.sum(0)[j]
    stays = own > 0
    return Traffic(sends - stays, block - own, receives - stays, needed - own)


def _overlaps(n: int, p: int, q: int) -> np.ndarray:
    """Return how many of n elements are in the i-th of p balanced blocks and in the j-th of q: p x q."""
    (a, b), (c, d) = _ends(n, p), _ends(n, q)
    return np.maximum(np.minimum(b[:, None], d) - np.maximum(a[:, None], c), 0)


def _ends(n: int, p: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the beginnings and the ends of p balanced blocks."""
    places = np.arange(p + 1)
    ends = places * (n // p) + np.minimum(places, n % p)
    return ends[:-1], ends[1:]
