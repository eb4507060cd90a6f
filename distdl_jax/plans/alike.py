"""Values of many workers, computed once for each class of equivalent workers.

Along each dimension of a grid a worker is first, inner or last, with the larger or the smaller balanced block. So
100,000 workers fall into some hundred classes; a plan computes a value for one worker of each class, and checks these.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, reduce
from typing import Any, TypeVar

import numpy as np

from distdl_jax.plans.worker_ranks import Workers, covers, positions, union, worker_ranks

T = TypeVar("T")
U = TypeVar("U")


class Classes:
    """Workers by class, a value: their world ranks, and the number of each worker's class.

    Classes are numbered in the order of their first workers, so equal ones have equal numbers.
    """

    def __init__(self, ranks: Workers, numbers: np.ndarray) -> None:
        self.ranks = ranks
        _, first, number = np.unique(numbers, return_index=True, return_inverse=True)
        self.numbers = np.argsort(np.argsort(first)).astype(np.int32)[number.reshape(-1)]
        self.count = len(first)
        self._hash = hash(self.numbers.tobytes())

    @cached_property
    def places(self) -> Mapping[int, int]:
        """From each worker to its position among the ranks."""
        return positions(self.ranks)

    @cached_property
    def members(self) -> list[np.ndarray]:
        """The workers of each class, in their order here."""
        order = np.argsort(self.numbers, kind="stable")
        cuts = np.flatnonzero(np.diff(self.numbers[order])) + 1
        return np.split(np.asarray(self.ranks)[order], cuts) if self.ranks else []

    def numbers_of(self, ranks: Workers) -> np.ndarray:
        """Return the class numbers of some of the workers."""
        return self.numbers if ranks == self.ranks else self.numbers[[self.places[rank] for rank in ranks]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Classes):
            return NotImplemented
        equal = self._hash == other._hash and self.ranks == other.ranks
        return self is other or (equal and np.array_equal(self.numbers, other.numbers))

    def __hash__(self) -> int:
        return self._hash


@lru_cache(maxsize=128)  # each 0.4 MB at 100,000
def _on_grid(ranks: Workers, labels: tuple[tuple[Hashable, ...], ...]) -> Classes:
    numbers = np.zeros(1, np.int64)
    for along in labels:
        number = {label: n for n, label in enumerate(dict.fromkeys(along))}
        numbers = np.add.outer(numbers * len(number), [number[label] for label in along]).ravel()
    return Classes(ranks, numbers[: len(ranks)])


@lru_cache(maxsize=128)
def _joined(first: Classes, other: Classes) -> Classes:
    """Return the workers of `first`, by their classes in both."""
    joined = Classes(first.ranks, first.numbers.astype(np.int64) * other.count + other.numbers_of(first.ranks))
    return first if joined == first else joined


@lru_cache(maxsize=128)
def _united(first: Classes, other: Classes) -> Classes:
    """Return the workers of both, those of `first` by its classes and the others by theirs."""
    more = tuple(rank for rank in other.ranks if rank not in first.places)
    numbers = np.concatenate([first.numbers, first.count + other.numbers_of(more)])
    return Classes(worker_ranks(first.ranks + more), numbers)


@lru_cache(maxsize=128)
def _restricted(classes: Classes, ranks: Workers) -> Classes:
    return Classes(ranks, classes.numbers_of(ranks))


class ByClass(Mapping[int, T]):
    """A value for each worker of a grid, by world rank; equal within a class.

    A value is computed on demand, once for each class. A worker's class is given by the labels of its index in all
    dimensions: if two workers have equal labels, `value` must be the same for both.

    - `ranks`: the world rank of each cell of the grid, row-major.
    - `labels`: for each dimension, the label of each index.
    - `value`: from a world rank to the worker's value.

    >>> size = ByClass(range(4, 10), [(2, 1, 1), (5, 5)], lambda worker: 10 if worker < 6 else 5)
    >>> size[5], size[9], representatives(size)
    (10, 5, (4, 6))
    """

    def __init__(self, ranks: Sequence[int], labels: Iterable[Sequence[Hashable]], value: Callable[[int], T]) -> None:
        self._fill(_on_grid(worker_ranks(ranks), tuple(map(tuple, labels))), value)

    @classmethod
    def of(cls, classes: Classes, value: Callable[[int], U]) -> ByClass[U]:
        """Return the values of workers whose classes are known."""
        values: ByClass[U] = ByClass.__new__(ByClass)
        values._fill(classes, value)
        return values

    def _fill(self, classes: Classes, value: Callable[[int], T]) -> None:
        self.classes, self._value = classes, value
        self._values: dict[int, T] = {}

    @property
    def ranks(self) -> Workers:
        """The world ranks, in the order of the cells."""
        return self.classes.ranks

    @cached_property
    def workers(self) -> Workers:
        """The world ranks, ascending."""
        return union(self.ranks)

    def __getitem__(self, worker: int) -> T:
        number = self.classes.numbers.item(self.classes.places[worker])
        if number not in self._values:
            self._values[number] = self._value(worker)
        return self._values[number]

    def __contains__(self, worker: object) -> bool:
        return worker in self.classes.places

    def __iter__(self) -> Iterator[int]:
        return iter(self.workers)

    def __len__(self) -> int:
        return len(self.ranks)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ByClass) and other.workers == self.workers:
            return all(self[worker] == other[worker] for worker in representatives(derived(int, self, other)))
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]  # as of a dictionary

    def __repr__(self) -> str:
        return repr(dict(self))


def on_grids(*several: Mapping[int, T]) -> Mapping[int, T]:
    """Return the values of the first mapping that has a worker.

    >>> halves = (ByClass(ranks, [(0, 0)], lambda worker: worker) for ranks in [(0, 1), (1, 2)])
    >>> on_grids(*halves)
    {0: 0, 1: 0, 2: 2}
    """
    parts: list[ByClass[T]] = []
    present: Workers = ()
    for values in several:
        if (more := union(present, workers_of(values))) == present:
            continue
        if not isinstance(values, ByClass):
            return {worker: value for values in reversed(several) for worker, value in values.items()}
        present = more
        parts.append(values)
    if len(parts) == 1:
        return parts[0]
    classes = reduce(_united, (part.classes for part in parts))
    return ByClass.of(classes, lambda worker: next(part[worker] for part in parts if worker in part))


def of_team(values: Mapping[int, T], ranks: Workers) -> Mapping[int, T]:
    """Return the values of the workers `ranks`, in this order."""
    if not isinstance(values, ByClass):
        return {worker: values[worker] for worker in ranks}
    return values if values.ranks == ranks else ByClass.of(_restricted(values.classes, ranks), values.__getitem__)


def derived(value: Callable[[int], U], first: Mapping[int, Any], *others: Mapping[int, Any]) -> Mapping[int, U]:
    """Return a value for each worker of `first`, which depends only on the worker's values in `first` and `others`.

    >>> lengths = ByClass(range(4), [(2, 2, 1, 1)], lambda worker: 2 if worker < 2 else 1)
    >>> derived(lambda worker: 3 * lengths[worker], lengths), derived(str, {5: 0})
    ({0: 6, 1: 6, 2: 3, 3: 3}, {5: '5'})
    """
    classes = [values.classes for values in (first, *others) if isinstance(values, ByClass)]
    if len(classes) <= len(others) or not all(covers(other.ranks, classes[0].ranks) for other in classes[1:]):
        return {worker: value(worker) for worker in first}
    return ByClass.of(reduce(_joined, classes), value)


def representatives(values: Mapping[int, Any]) -> Iterable[int]:
    """Return workers that cover all values of `values`: for each value the first worker that has it."""
    return tuple(int(workers[0]) for workers in values.classes.members) if isinstance(values, ByClass) else values


def workers_of(values: Mapping[int, Any]) -> Workers:
    """Return the workers that have a value, ascending."""
    return values.workers if isinstance(values, ByClass) else tuple(sorted(values))
