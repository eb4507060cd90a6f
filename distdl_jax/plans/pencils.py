"""The sequence of grids on which a tensor is transformed along split dimensions.

A worker can transform along a dimension that is whole on it: a bundle of pencils. Each movement to another grid makes
some of the dimensions whole, and splits others instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from math import inf, prod
from typing import NamedTuple

Shape = tuple[int, ...]
Lengths = tuple[tuple[int, int], ...]

MOVEMENT = 2.0
"""The cost of moving an element, relative to transforming it along one dimension."""


class Stage(NamedTuple):
    """A grid of workers, and the dimensions, ascending, that are transformed on it."""

    shape: Shape
    axes: tuple[int, ...]


class Reals(NamedTuple):
    """Whether the tensor is real before the first transform, and after the last: half as much to move."""

    before: bool = False
    after: bool = False


COMPLEX = Reals()


@lru_cache(maxsize=256)
def pencils(
    extent: Shape, start: Shape, lengths: Lengths, target: Shape, *, same_team: bool = True, reals: Reals = COMPLEX
) -> tuple[Stage, ...]:
    """Return the stages from the grid `start` to the grid `target`, on which all dimensions of `lengths` are
    transformed.

    They are the cheapest, with the cost of a movement or a transform taken on the worker with most to do: the fewest
    movements, unless more of them keep more workers busy. (If a transform makes a dimension longer there may be cheaper
    ones: by up to a third, in 2 of 3,000 random cases.) Between two stages there is one movement.

    - `extent`: of the tensor, before.
    - `lengths`: pairs of a dimension to transform, and its length afterwards.
    - `same_team`: whether `target` has the workers of `start`, in the same order.

    A slab of a cube: two dimensions in place, and the third on another grid.

    >>> [tuple(stage) for stage in pencils((8, 8, 8), (2, 1, 1), ((0, 8), (1, 8), (2, 8)), (2, 1, 1))]
    [((2, 1, 1), (1, 2)), ((1, 2, 1), (0,)), ((2, 1, 1), ())]

    If both dimensions are split: one after the other, or both at once if the batch is large enough to split instead.

    >>> [tuple(stage) for stage in pencils((2, 8, 8), (1, 2, 2), ((1, 8), (2, 8)), (1, 2, 2))]
    [((1, 2, 2), ()), ((2, 1, 2), (1,)), ((2, 2, 1), (2,)), ((1, 2, 2), ())]
    >>> [tuple(stage) for stage in pencils((8, 8, 8), (1, 2, 2), ((1, 8), (2, 8)), (1, 2, 2))]
    [((1, 2, 2), ()), ((4, 1, 1), (1, 2)), ((1, 2, 2), ())]
    """
    search = _Search(extent, prod(start), dict(lengths), target, same_team, reals)
    return search.best(start, frozenset())[1]


class _Search(NamedTuple):
    """All paths from a grid, with some dimensions done."""

    extent: Shape
    workers: int
    lengths: dict[int, int]
    target: Shape
    same_team: bool
    reals: Reals

    def best(self, shape: Shape, done: frozenset[int], on_target: bool = False) -> tuple[float, tuple[Stage, ...]]:
        """Return the cost from `shape` on, and the stages."""
        here = tuple(a for a in sorted(self.lengths) if a not in done and shape[a] == 1)
        done = done.union(here)
        own = len(here) * self._largest(shape, done)
        left = [a for a in sorted(self.lengths) if a not in done]
        on_target = on_target or (self.same_team and shape == self.target)
        if not left and on_target:
            return own, (Stage(shape, here),)
        cost, stages = inf, tuple[Stage, ...]()
        for following, to_target in self._following(shape, done, left, on_target):
            move = MOVEMENT * max(self._largest(shape, done), self._largest(following, done))
            rest, behind = self.best(following, done, to_target)
            if own + move + rest < cost:
                cost, stages = own + move + rest, (Stage(shape, here), *behind)
        return cost, stages

    def _following(
        self, shape: Shape, done: frozenset[int], left: list[int], on_target: bool
    ) -> Iterator[tuple[Shape, bool]]:
        """Return the possible next grids, and whether they are the target on separate workers."""
        whole = [a for a in left if self.target[a] == 1]
        if whole == left or (whole and self.same_team):
            yield self.target, not self.same_team
        lengths = tuple(self.lengths[a] if a in done else n for a, n in enumerate(self.extent))
        for count in range(len(left), 0, -1):
            for axes in combinations(left, count):
                yield best_grid(self.workers, lengths, frozenset(axes), shape), False

    def _largest(self, shape: Shape, done: frozenset[int]) -> float:
        """Return the largest block of a worker, in reals."""
        lengths = (self.lengths[a] if a in done else n for a, n in enumerate(self.extent))
        real = (self.reals.before and not done) or (self.reals.after and len(done) == len(self.lengths))
        return largest_block(lengths, shape) * (1 if real else 2)


def largest_block(lengths: Iterator[int] | Shape, shape: Shape) -> int:
    """Return the number of elements on the first worker of a balanced grid of `shape`.

    >>> largest_block((5, 4), (2, 3))
    6
    """
    return prod(-(-n // p) for n, p in zip(lengths, shape, strict=True))


@lru_cache(maxsize=4096)
def best_grid(workers: int, lengths: Shape, whole: frozenset[int], before: Shape) -> Shape:
    """Return the grid of `workers`, or of one if nothing may be split, on which the dimensions `whole` are whole.

    Its largest block is as small as possible. Among several, it is one that differs from the grid `before` in as few
    dimensions as possible, and splits the first ones, so that messages are contiguous.

    >>> best_grid(4, (3, 8, 8), frozenset([1]), (1, 4, 1))
    (1, 1, 4)
    """
    free = [d for d in range(len(lengths)) if d not in whole]
    if not free:
        return (1,) * len(lengths)

    def rank(shape: Shape) -> tuple[int, int, Shape]:
        differ = sum(p != q for p, q in zip(shape, before, strict=True))
        return largest_block(lengths, shape), differ, tuple(-p for p in shape)

    grids = (dict(zip(free, factors, strict=True)) for factors in factorizations(workers, len(free)))
    return min((tuple(grid.get(d, 1) for d in range(len(lengths))) for grid in grids), key=rank)


def factorizations(n: int, count: int) -> Iterator[Shape]:
    """Return all tuples of `count` factors with the product `n`.

    >>> list(factorizations(4, 2))
    [(1, 4), (2, 2), (4, 1)]
    """
    if count == 1:
        yield (n,)
        return
    for first in _divisors(n):
        for rest in factorizations(n // first, count - 1):
            yield first, *rest


@lru_cache(maxsize=1024)
def _divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)
