"""Values of all workers of a grid, computed once for each class of workers that have the same.

Along each dimension of a grid a worker is first, inner or last, with the larger or the smaller balanced block. So
100,000 workers are of some hundred classes; a plan computes a value for one worker of each class, and checks those.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, product
from math import prod
from typing import Any, TypeVar

from distdl_jax.plans.worker_ranks import Workers, positions, union

T = TypeVar("T")
U = TypeVar("U")


class ByClass(Mapping[int, T]):
    """A value for each worker of a grid, by world rank; workers of one class have the same.

    A value is computed when it is asked for, once for each class. A worker's class is given by the labels of its index
    in all dimensions: if two workers have equal labels, `value` must be the same for both.

    - `ranks`: the world rank of each cell of the grid, row-major.
    - `labels`: for each dimension, the label of each index. Dimensions of length 1 are left out, so that grids that
      differ in those alone are the same.
    - `value`: from a world rank to the worker's value.

    >>> size = ByClass(range(4, 10), [(2, 1, 1), (5, 5)], lambda worker: 10 if worker < 6 else 5)
    >>> size[5], size[9], size.representatives
    (10, 5, (4, 6))
    """

    def __init__(self, ranks: Sequence[int], labels: Iterable[Sequence[Hashable]], value: Callable[[int], T]) -> None:
        self.ranks: Workers = ranks if isinstance(ranks, tuple) else tuple(ranks)
        self.labels = tuple(_numbered(along) for along in labels if len(along) > 1)
        self.shape = tuple(map(len, self.labels))
        self._strides = [prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        self._cell_of = positions(self.ranks)
        self._value = value
        self._values: dict[tuple[int, ...], T] = {}

    @cached_property
    def workers(self) -> Workers:
        """The world ranks, ascending."""
        return union(self.ranks)

    @cached_property
    def representatives(self) -> Workers:
        """The first worker of each class, in the order of the cells."""
        return tuple(self.ranks[cell] for cell in self._first_cells)

    @property
    def classes(self) -> Iterator[Iterator[int]]:
        """For each class its workers, in the order of the cells."""
        return (map(self.ranks.__getitem__, map(sum, product(*steps))) for steps in product(*self._steps))

    @cached_property
    def sample(self) -> tuple[int, ...]:
        """The cells of the first worker of each class, and of those along each dimension from cell 0 on."""
        lines = (i * stride for n, stride in zip(self.shape, self._strides, strict=True) for i in range(n))
        return tuple(sorted({0, *self._first_cells, *lines}))

    @cached_property
    def _first_cells(self) -> tuple[int, ...]:
        return tuple(sorted(map(sum, product(*([steps[0] for steps in along] for along in self._steps)))))

    @cached_property
    def _steps(self) -> list[list[list[int]]]:
        """For each dimension and label, how many cells lie between index 0 and each index that has the label."""
        return [
            [[i * stride for i, its in enumerate(along) if its == label] for label in range(max(along) + 1)]
            for along, stride in zip(self.labels, self._strides, strict=True)
        ]

    def is_on(self, ranks: Sequence[int], shape: Sequence[int]) -> bool:
        """Say whether the grid is one of `shape` and `ranks`, apart from dimensions of length 1."""
        return self.shape == tuple(n for n in shape if n > 1) and self.ranks == ranks

    def __getitem__(self, worker: int) -> T:
        cell = self._cell_of[worker]
        labels = tuple(
            [along[cell // stride % len(along)] for along, stride in zip(self.labels, self._strides, strict=True)]
        )
        if labels not in self._values:
            self._values[labels] = self._value(worker)
        return self._values[labels]

    def __contains__(self, worker: object) -> bool:
        return worker in self._cell_of

    def __iter__(self) -> Iterator[int]:
        return iter(self.workers)

    def __len__(self) -> int:
        return len(self.ranks)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ByClass) and other.is_on(self.ranks, self.shape):
            classes = representatives(derived(lambda worker: worker, self, other))
            return all(self[worker] == other[worker] for worker in classes)
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]  # as of a dictionary

    def __repr__(self) -> str:
        return repr(dict(self))


class OnGrids(Mapping[int, T]):
    """Values by class of workers on several grids: of the first of `parts` that has a worker, the worker's value."""

    def __init__(self, parts: Sequence[ByClass[T]]) -> None:
        self.parts = tuple(parts)

    @cached_property
    def workers(self) -> Workers:
        """The world ranks, ascending."""
        return union(*(part.ranks for part in self.parts))

    @cached_property
    def representatives(self) -> Workers:
        """The first worker of each class that has its value here, grid by grid."""
        return tuple(worker for place in range(len(self.parts)) for worker in self._representatives_of(place))

    def _representatives_of(self, place: int) -> Iterator[int]:
        before = self.parts[:place]
        for workers in self.parts[place].classes:
            yield from islice((worker for worker in workers if not any(worker in part for part in before)), 1)

    def __getitem__(self, worker: int) -> T:
        for part in self.parts:
            if worker in part:
                return part[worker]
        raise KeyError(worker)

    def __contains__(self, worker: object) -> bool:
        return any(worker in part for part in self.parts)

    def __iter__(self) -> Iterator[int]:
        return iter(self.workers)

    def __len__(self) -> int:
        return len(self.workers)

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
        if union(present, workers_of(values)) == present:
            continue
        if not isinstance(values, ByClass | OnGrids):
            return {worker: value for values in reversed(several) for worker, value in values.items()}
        for part in parts_of(values):
            if (more := union(present, part.ranks)) != present:
                present = more
                parts.append(part)
    return parts[0] if len(parts) == 1 else OnGrids(parts)


def parts_of(values: ByClass[T] | OnGrids[T]) -> tuple[ByClass[T], ...]:
    """Return the values on each grid, as mappings."""
    return values.parts if isinstance(values, OnGrids) else (values,)


def of_team(values: Mapping[int, T], ranks: Sequence[int]) -> Mapping[int, T]:
    """Return the values of the workers `ranks` alone if these have a grid in `values`, otherwise all `values`."""
    if isinstance(values, OnGrids) and values.parts[0].workers == union(ranks):
        return values.parts[0]
    return values


def _numbered(labels: Sequence[Hashable]) -> tuple[int, ...]:
    """Return labels as numbers from 0 on, in the order in which they come up."""
    numbers: dict[Hashable, int] = {}
    return tuple([numbers.setdefault(label, len(numbers)) for label in labels])


def derived(value: Callable[[int], U], first: Mapping[int, Any], *others: Mapping[int, Any]) -> Mapping[int, U]:
    """Return a value for each worker of `first`; it depends on the worker's values in `first` and `others` alone.

    >>> lengths = ByClass(range(4), [(2, 2, 1, 1)], lambda worker: 2 if worker < 2 else 1)
    >>> derived(lambda worker: 3 * lengths[worker], lengths), derived(str, {5: 0})
    ({0: 6, 1: 6, 2: 3, 3: 3}, {5: '5'})
    """
    grids = [parts_of(values) for values in (first, *others) if isinstance(values, ByClass | OnGrids)]
    if len(grids) <= len(others) or len(set(map(len, grids))) > 1:
        return {worker: value(worker) for worker in first}
    parts = []
    for part, *other_parts in zip(*grids, strict=True):
        if not all(other.is_on(part.ranks, part.shape) for other in other_parts):
            return {worker: value(worker) for worker in first}
        labels: Sequence[Sequence[Hashable]] = part.labels
        for other in other_parts:
            if other.labels != labels:
                labels = [tuple(zip(*along, strict=True)) for along in zip(labels, other.labels, strict=True)]
        parts.append(ByClass(part.ranks, labels, value))
    return parts[0] if len(parts) == 1 else OnGrids(parts)


def representatives(values: Mapping[int, Any]) -> Iterable[int]:
    """Return workers among which are all values of `values`, and of each value the first worker that has it."""
    return values.representatives if isinstance(values, ByClass | OnGrids) else values


def workers_of(values: Mapping[int, Any]) -> Workers:
    """Return the workers that have a value, ascending."""
    return values.workers if isinstance(values, ByClass | OnGrids) else tuple(sorted(values))
