"""Workers by class: those that have the same value, as arrays of world ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from distdl_jax.plans.alike import ByClass, OnGrids, parts_of
from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.tools.cost.traffic import as_index

Index = np.ndarray | slice | int
"""Workers, as an index of arrays with an entry for each worker."""


def groups(values: Mapping[int, Any]) -> Iterator[tuple[int, Index]]:
    """Yield a worker of each class of `values`, and all workers of it."""
    if not isinstance(values, ByClass | OnGrids):
        yield from zip(values, values, strict=True)
        return
    parts = parts_of(values)
    seen = np.zeros(max(values.workers) + 1, bool)
    for part in parts:
        for workers in _classes(part.ranks, part.labels):
            new = workers if part is parts[0] else workers[~seen[workers]]
            if new.size:
                yield int(new[0]), new
        if part is not parts[-1]:
            seen[as_index(part.ranks)] = True


def codes(several: Iterable[Mapping[int, Any]], before: np.ndarray) -> np.ndarray:
    """Return a number for each worker: the same for those of one number `before` and equal values in all mappings."""
    for values in several:
        own = np.zeros(len(before), np.int64)
        numbers: dict[Any, int] = {}
        for worker, workers in groups(values):
            own[workers] = numbers.setdefault(values[worker], len(numbers) + 1)
        before = np.unique(before * (len(numbers) + 1) + own, return_inverse=True)[1].reshape(-1)
    return before


@lru_cache(maxsize=64)
def _classes(ranks: Workers, labels: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    """Return the workers of each class, in the order of their first cells."""
    of_cell = np.zeros(1, np.int64)
    for along in labels:
        of_cell = np.add.outer(of_cell * (max(along) + 1), along).ravel()
    cells = sorted(same(of_cell), key=lambda several: several[0])
    world_ranks = np.asarray(ranks)
    return [world_ranks[several] for several in cells]


def same(codes: np.ndarray) -> list[np.ndarray]:
    """Return the places of each code."""
    order = np.argsort(codes, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)
