"""Whom waiting is for in the end: a worker that comes late since it waits itself is not what the others wait for."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Wait(NamedTuple):
    """A time in which a worker waits for another one, in ns."""

    start: int
    end: int
    worker: int


def causes(waits: Mapping[int, Sequence[Wait]], wait: Wait) -> Counter[int]:
    """Return how long a wait is for which worker: for the time in which that one waits, for whom it waits for.

    - `waits`: of each worker, in the order in which they begin.
    """
    found = Counter[int]()
    left = [wait]
    while left:
        start, end, worker = left.pop()
        others = waits.get(worker, ())
        at = bisect_right(others, start, key=lambda each: each.end)
        for other in others[at:]:
            if other.start >= end:
                break
            inside = Wait(max(start, other.start), min(end, other.end), other.worker)
            found[worker] += max(inside.start - start, 0)
            left.append(inside)
            start = inside.end
        found[worker] += max(end - start, 0)
    return found
