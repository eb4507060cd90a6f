"""Who waits for whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def follow(start: T, waits_for: Callable[[T], T | None]) -> tuple[list[T], int]:
    """Return the chain of waits from `start` on, each for the next, and the place of the one that the last waits for.

    `waits_for` gives None for one that doesn't wait: it is the last one, and the place is after it.

    >>> follow(3, {3: 1, 1: 2, 2: 1}.get), follow(3, {3: 1}.get)
    (([3, 1, 2], 1), ([3, 1], 2))
    """
    path = [start]
    while (following := waits_for(path[-1])) is not None and following not in path:
        path.append(following)
    return path, len(path) if following is None else path.index(following)
