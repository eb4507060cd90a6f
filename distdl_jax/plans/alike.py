"""Workers that are alike: values of all workers of a grid, of which as few are computed as there are different ones.

Along each dimension of a grid a worker is first, inner or last, with the larger or the smaller balanced block: so
100,000 workers are of some hundred classes, and what plans say of a worker is computed once for its class.
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

    A value is computed when it is asked for, once for each class. A worker's class are the labels of its index in all
    dimensions: where two workers have equal labels, `value` must be the same for both.

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
        # The labels along each dimension, and how many cells lie between two indices.
        self._strided = [(along, prod(self.shape[d + 1 :])) for d, along in enumerate(self.labels)]
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

    @cached_property
    def _first_cells(self) -> tuple[int, ...]:
        first = ([along.index(label) for label in range(max(along) + 1)] for along in self.labels)
        return tuple(sorted(self._cells(first)))

    @cached_property
    def sample(self) -> tuple[int, ...]:
        """The cells of the first worker of each class, and of those along each dimension from cell 0 on."""
        axes = range(len(self.shape))
        lines = (self._cells(range(n) if d == axis else (0,) for d, n in enumerate(self.shape)) for axis in axes)
        return tuple(sorted({*self._first_cells, *(cell for line in lines for cell in line)}))

    @property
    def classes(self) -> Iterator[Iterator[int]]:
        """For each class its workers, in the order of the cells."""
        places = ([[i for i, of in enumerate(along) if of == label] for label in set(along)] for along in self.labels)
        return (map(self.ranks.__getitem__, self._cells(of_class)) for of_class in product(*places))

    def _cells(self, along: Iterable[Iterable[int]]) -> Iterator[int]:
        """Yield the numbers of the cells whose index along each dimension is one of those given."""
        steps = ([i * stride for i in indices] for indices, (_, stride) in zip(along, self._strided, strict=True))
        return map(sum, product(*steps))

    def is_on(self, ranks: Sequence[int], shape: Sequence[int]) -> bool:
        """Say whether the grid is one of `shape` and `ranks`, apart from dimensions of length 1."""
        return self.shape == tuple(n for n in shape if n > 1) and self.ranks == ranks

    def __getitem__(self, worker: int) -> T:
        cell = self._cell_of[worker]
        of_class = tuple([along[cell // stride % len(along)] for along, stride in self._strided])
        if of_class not in self._values:
            self._values[of_class] = self._value(worker)
        return self._values[of_class]

    def __contains__(self, worker: object) -> bool:
        return worker in self._cell_of

    def __iter__(self) -> Iterator[int]:
        return iter(self.workers)

    def __len__(self) -> int:
        return len(self.ranks)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ByClass) and other.is_on(self.ranks, self.shape):
            of_both = representatives(derived(lambda worker: worker, self, other))
            return all(self[worker] == other[worker] for worker in of_both)
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
        for of_class in self.parts[place].classes:
            yield from islice((worker for worker in of_class if not any(worker in each for each in before)), 1)

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
            return {worker: value for each in reversed(several) for worker, value in each.items()}
        for part in parts_of(values):
            if (more := union(present, part.ranks)) != present:
                present = more
                parts.append(part)
    return parts[0] if len(parts) == 1 else OnGrids(parts)


def parts_of(values: ByClass[T] | OnGrids[T]) -> tuple[ByClass[T], ...]:
    """Return the values on each grid."""
    return values.parts if isinstance(values, OnGrids) else (values,)


def of_team(values: Mapping[int, T], ranks: Sequence[int]) -> Mapping[int, T]:
    """Return values of the workers `ranks`, and perhaps of more: those of these alone where they have a grid."""
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
    of_grids = [parts_of(each) for each in (first, *others) if isinstance(each, ByClass | OnGrids)]
    if len(of_grids) <= len(others) or len(set(map(len, of_grids))) > 1:
        return {worker: value(worker) for worker in first}
    found = []
    for part, *of_others in zip(*of_grids, strict=True):
        labels: Sequence[Sequence[Hashable]] = part.labels
        for other in of_others:
            if not other.is_on(part.ranks, part.shape):
                return {worker: value(worker) for worker in first}
            if other.labels != labels:
                labels = [tuple(zip(*along, strict=True)) for along in zip(labels, other.labels, strict=True)]
        found.append(ByClass(part.ranks, labels, value))
    return found[0] if len(found) == 1 else OnGrids(found)


def representatives(values: Mapping[int, Any]) -> Iterable[int]:
    """Return workers among which are all values of `values`, and of each value the first worker that has it."""
    return values.representatives if isinstance(values, ByClass | OnGrids) else values


def workers_of(values: Mapping[int, Any]) -> Workers:
    """Return the workers that have a value, ascending."""
    return values.workers if isinstance(values, ByClass | OnGrids) else tuple(sorted(values))
