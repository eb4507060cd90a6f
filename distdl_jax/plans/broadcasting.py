"""The broadcast rules: the workers that form a team, and its root.

A broadcast copies along every dimension with one worker in the source partition; in the other dimensions the two
partitions agree. The source is left-padded with ones if it has fewer dimensions. A transposed partition has its index
reversed: worker (i, j) counts as (j, i).

A sum-reduction reverses this: its teams are those of the broadcast from its destination.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.plans.decomposition import index_of, rank_of
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.plans.worker_ranks import Workers, worker_ranks
from distdl_jax.validation import checked_axes

Shape = tuple[int, ...]


@dataclass(frozen=True)
class BroadcastRule:
    """The broadcast of a partition of shape `source` to one of shape `destination`.

    Ranks are positions in the partitions, in row-major order of the user's index (not reversed).

    >>> rule = BroadcastRule((1, 3), (2, 3))
    >>> rule.destinations(1), rule.source_of(4)
    ((1, 4), 1)
    """

    source: Shape
    destination: Shape
    transpose_source: bool = False
    transpose_destination: bool = False

    def __post_init__(self) -> None:
        source, destination = self._effective_source(), self._effective_destination()
        fits = len(source) == len(destination) and all(s in (1, d) for s, d in zip(source, destination, strict=True))
        if not fits:
            raise InvalidArgumentError(
                f"A partition of shape {self._side(self.source, self.transpose_source)} does not broadcast to one of "
                f"shape {self._side(self.destination, self.transpose_destination)}: counted from the last, every "
                "dimension of the broadcasting partition must be 1 or equal to the other's, and it must not have more "
                "dimensions."
            )

    @staticmethod
    def _side(shape: Shape, transposed: bool) -> str:
        return shape_text(shape) + (f" (transposed: {shape_text(shape[::-1])})" if transposed else "")

    def _effective_destination(self) -> Shape:
        return self.destination[::-1] if self.transpose_destination else self.destination

    def _effective_source(self) -> Shape:
        shape = self.source[::-1] if self.transpose_source else self.source
        return (1,) * (len(self.destination) - len(shape)) + shape

    @property
    def is_identity(self) -> bool:
        """Whether every worker is the source of only itself, if both partitions have the same team in order."""
        if self.source != self.destination or self.transpose_source == self.transpose_destination:
            return self.source == self.destination
        return all(self.source_of(rank) == rank for rank in range(math.prod(self.source)))

    def source_of(self, rank: int) -> int:
        """Return the rank in the source partition whose subtensor the worker `rank` of the destination receives."""
        index = index_of(rank, self.destination)
        if self.transpose_destination:
            index = index[::-1]
        extended = self._effective_source()
        index = tuple(0 if size == 1 else i for size, i in zip(extended, index, strict=True))
        index = index[len(index) - len(self.source) :]
        if self.transpose_source:
            index = index[::-1]
        return rank_of(index, self.source)

    def destinations(self, rank: int) -> tuple[int, ...]:
        """Return the destination ranks, ascending, that receive the subtensor of the source rank `rank`."""
        return _destinations(self, rank)


@lru_cache(maxsize=4096)
def _destinations(rule: BroadcastRule, rank: int) -> tuple[int, ...]:
    index = index_of(rank, rule.source)
    if rule.transpose_source:
        index = index[::-1]
    source, destination = rule._effective_source(), rule._effective_destination()
    index = (0,) * (len(source) - len(index)) + index
    along = [range(d) if s == 1 else (i,) for s, d, i in zip(source, destination, index, strict=True)]
    return _cells(along[::-1] if rule.transpose_destination else along, rule.destination)


def _cells(along: Sequence[Iterable[int]], shape: Shape) -> tuple[int, ...]:
    """Return the row-major numbers, ascending, of the cells of a grid whose index along each axis is one of `along`."""
    numbers = [0]
    for indices, size in zip(along, shape, strict=True):
        numbers = [number * size + i for number in numbers for i in indices]
    return tuple(numbers)


@dataclass(frozen=True)
class Team:
    """Workers, by world rank, that hold copies of one subtensor, and the root that holds the subtensor itself.

    The root is a member only if it holds a copy too.
    """

    root: int
    members: Workers

    @cached_property
    def participants(self) -> Workers:
        """The root, then the members that are not the root."""
        if self.members[:1] == (self.root,):
            return self.members
        return (self.root, *(worker for worker in self.members if worker != self.root))


def teams_of_worker(
    rule: BroadcastRule, source_ranks: Workers, destination_ranks: Workers, worker: int
) -> tuple[Team | None, Team | None]:
    """Return the team with `worker` as root, and the team in which it holds a copy; None if there is none.

    `source_ranks` and `destination_ranks` are the world ranks of the two partitions' teams, in order.
    """
    as_root = as_member = None
    if (place := place_of(worker, source_ranks)) is not None:
        as_root = _team(rule, source_ranks, destination_ranks, place)
    if (place := place_of(worker, destination_ranks)) is not None:
        as_member = _team(rule, source_ranks, destination_ranks, rule.source_of(place))
    return as_root, as_member


def place_of(worker: int, ranks: Workers) -> int | None:
    """Return the position of `worker` among `ranks`; None if it is missing."""
    try:
        return ranks.index(worker)
    except ValueError:
        return None


def _team(rule: BroadcastRule, source_ranks: Workers, destination_ranks: Workers, position: int) -> Team:
    return Team(source_ranks[position], tuple(destination_ranks[rank] for rank in rule.destinations(position)))


def reduction_axes(shape: Shape, axes_reduce: object, axes_keep: object) -> tuple[int, ...]:
    """Return the dimensions to sum along in an all-sum-reduce, ascending, from exactly one of the two arguments."""
    if (axes_reduce is None) == (axes_keep is None):
        raise InvalidArgumentError(
            f"Exactly one of `axes_reduce` (={axes_reduce!r}) and `axes_keep` (={axes_keep!r}) must be given: the "
            "dimensions of the partition to sum along, or the ones to keep."
        )
    if axes_keep is None:
        return checked_axes("axes_reduce", axes_reduce, shape)
    axes = checked_axes("axes_keep", axes_keep, shape)
    return tuple(axis for axis in range(len(shape)) if axis not in axes)


@lru_cache(maxsize=64)
def reduction_teams(ranks: Workers, shape: Shape, axes_reduce: tuple[int, ...]) -> tuple[Workers, ...]:
    """Return all teams of an all-sum-reduction on a grid of `shape`, as world ranks, in the order of their first ranks.

    >>> reduction_teams((4, 5, 6, 7), (2, 2), (0,))
    ((4, 6), (5, 7))
    """
    first = _cells([(0,) if axis in axes_reduce else range(size) for axis, size in enumerate(shape)], shape)
    if len(first) == 1:
        return (worker_ranks(ranks),)
    steps = reduction_team(shape, axes_reduce, 0)
    return tuple(tuple([ranks[cell + step] for step in steps]) for cell in first)


def team_at(ranks: Workers, shape: Shape, axes_reduce: tuple[int, ...], cell: int) -> Workers:
    """Return the team, one of `reduction_teams`, of the worker at a cell of the grid.

    >>> team_at((4, 5, 6, 7), (2, 2), (0,), 3)
    (5, 7)
    """
    teams = reduction_teams(ranks, shape, axes_reduce)
    place = 0
    for axis, (i, size) in enumerate(zip(index_of(cell, shape), shape, strict=True)):
        place = place if axis in axes_reduce else place * size + i
    return teams[place]


def reduction_team(shape: Shape, axes_reduce: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the ranks, ascending, that agree with `rank` in every index outside `axes_reduce`.

    >>> reduction_team((2, 3, 2), (0, 2), 3)
    (2, 3, 8, 9)
    """
    index = index_of(rank, shape)
    return _cells([range(size) if axis in axes_reduce else (index[axis],) for axis, size in enumerate(shape)], shape)
