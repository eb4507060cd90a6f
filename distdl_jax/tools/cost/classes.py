"""Workers by class: those that have the same value, as arrays of world ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from distdl_jax.plans.alike import ByClass

Index = np.ndarray | slice | int
"""Workers, as an index of arrays with an entry for each worker."""


def groups(values: Mapping[int, Any]) -> Iterator[tuple[int, Index]]:
    """Yield a worker of each class of `values`, and all workers of it."""
    if not isinstance(values, ByClass):
        yield from zip(values, values, strict=True)
        return
    for workers in values.classes.members:
        yield int(workers[0]), workers


def codes(several: Iterable[Mapping[int, Any]], before: np.ndarray) -> np.ndarray:
    """Return a number for each worker: the same for those of one number `before` and equal values in all mappings."""
    for values in several:
        own = np.zeros(len(before), np.int64)
        numbers: dict[Any, int] = {}
        for worker, workers in groups(values):
            own[workers] = numbers.setdefault(values[worker], len(numbers) + 1)
        before = np.unique(before * (len(numbers) + 1) + own, return_inverse=True)[1].reshape(-1)
    return before


def same(codes: np.ndarray) -> list[np.ndarray]:
    """Return the places of each code."""
    order = np.argsort(codes, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)
