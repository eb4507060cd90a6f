"""World ranks of workers in order. Consecutive ones, as in most partitions, are looked up by arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

Workers = tuple[int, ...]
"""World ranks, in the order of a team's ranks."""


class ConsecutiveRanks(tuple[int, ...]):
    """A tuple of consecutive world ranks: search, and comparison with another one, take no loop."""

    _hash: int
    _text: str

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, int):
            return super().__contains__(rank)
        return bool(self) and self[0] <= rank <= self[-1]

    def index(self, rank: Any, *limits: Any) -> int:
        """Return the position of `rank`; raises `ValueError` if it is missing."""
        if limits or not isinstance(rank, int) or rank not in self:
            return super().index(rank, *limits)
        return rank - self[0]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ConsecutiveRanks):
            return len(self) == len(other) and self[:1] == other[:1]
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        if "_hash" not in vars(self):
            self._hash = super().__hash__()
        return self._hash

    def __repr__(self) -> str:
        if "_text" not in vars(self):
            self._text = super().__repr__()
        return self._text

    def __reduce__(self) -> tuple[Any, ...]:
        # The ranks themselves would add 300 kB to every message that names a team of 100,000.
        return _consecutive, (self[0] if self else 0, len(self))


@lru_cache(maxsize=16)  # 4 MB each at 100,000
def _consecutive(first: int, count: int) -> ConsecutiveRanks:
    return ConsecutiveRanks(range(first, first + count))


def worker_ranks(ranks: Iterable[int]) -> Workers:
    """Return ranks as a tuple, a `ConsecutiveRanks` if they are consecutive.

    >>> worker_ranks([4, 5, 6]).index(6), worker_ranks([2, 0])
    (2, (2, 0))
    """
    if isinstance(ranks, ConsecutiveRanks):
        return ranks
    ranks = tuple(ranks)
    if ranks and ranks[-1] - ranks[0] + 1 == len(ranks) and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return _consecutive(ranks[0], len(ranks))
    return ranks


def union(*teams: Iterable[int]) -> Workers:
    """Return the ranks of all teams, ascending.

    >>> union((3, 1), (2, 1))
    (1, 2, 3)
    """
    largest = max(teams, key=lambda team: len(team) if isinstance(team, ConsecutiveRanks) else -1, default=())
    if isinstance(largest, ConsecutiveRanks) and all(_is_within(team, largest) for team in teams):
        return largest
    return worker_ranks(sorted({rank for team in teams for rank in team}))


def _is_within(team: Iterable[int], ranks: ConsecutiveRanks) -> bool:
    if isinstance(team, ConsecutiveRanks):
        return not team or (team[0] in ranks and team[-1] in ranks)
    return all(rank in ranks for rank in team)


def covers(ranks: Workers, some: Workers) -> bool:
    """Return whether all of some ranks are among `ranks`.

    >>> covers((1, 2, 3), (3, 1)), covers((1, 2), (3,))
    (True, False)
    """
    return ranks == some or union(ranks, some) == union(ranks)


@lru_cache(maxsize=64)  # 10 MB each at 100,000
def positions(ranks: Workers) -> Mapping[int, int]:
    """Return a mapping from each of `ranks` to its position.

    >>> positions((5, 3))[3]
    1
    """
    return {rank: place for place, rank in enumerate(ranks)}
