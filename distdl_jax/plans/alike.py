"""Workers that are alike: values of all workers of a grid, of which as few are computed as there are different ones.

Along each dimension of a grid a worker is first, inner or last, with the larger or the smaller balanced block: so
100,000 workers are of some hundred classes, and what plans say of a worker is computed once for its class.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, TypeVar

from distdl_jax.plans.decomposition import index_of
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
        self._value = value
        self._values: dict[tuple[int, ...], T] = {}

    @cached_property
    def _cell_of(self) -> Mapping[int, int]:
        return positions(self.ranks)

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

    def _cells(self, along: Iterable[Iterable[int]]) -> Iterator[int]:
        """Yield the numbers of the cells whose index along each dimension is one of those given."""
        strides = [prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        steps = ([i * stride for i in indices] for indices, stride in zip(along, strides, strict=True))
        return map(sum, product(*steps))

    def is_on(self, ranks: Sequence[int], shape: Sequence[int]) -> bool:
        """Say whether the grid is one of `shape` and `ranks`, apart from dimensions of length 1."""
        return self.shape == tuple(n for n in shape if n > 1) and self.ranks == ranks

    def __getitem__(self, worker: int) -> T:
        index = index_of(self._cell_of[worker], self.shape)
        of_class = tuple([along[i] for along, i in zip(self.labels, index, strict=True)])
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
    if not isinstance(first, ByClass):
        return {worker: value(worker) for worker in first}
    labels: Sequence[Sequence[Hashable]] = first.labels
    for other in others:
        if not (isinstance(other, ByClass) and other.is_on(first.ranks, first.shape)):
            return {worker: value(worker) for worker in first}
        if other.labels != labels:
            labels = [tuple(zip(*along, strict=True)) for along in zip(labels, other.labels, strict=True)]
    return ByClass(first.ranks, labels, value)


def representatives(values: Mapping[int, Any]) -> Iterable[int]:
    """Return workers among which are all values of `values`, and of each value the first worker that has it."""
    return values.representatives if isinstance(values, ByClass) else values


def workers_of(values: Mapping[int, Any]) -> Workers:
    """Return the workers that have a value, ascending."""
    return values.workers if isinstance(values, ByClass) else tuple(sorted(values))
