"""Joins the workers: how long each message waited for which worker, and for whom that one waited."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.tools.profile.activities import Message

Place = tuple[int, int]
"""An operation: its worker, and its number among the worker's."""


class Arrow(NamedTuple):
    """A message: who sent it, the number of its operation among the sender's, the receiver, and the number of its."""

    sender: int
    sent: int
    receiver: int
    received: int


@dataclass(frozen=True)
class Met:
    """What became of the operations of each worker, by world rank.

    - `until`: when all partners of each operation had come, but not after its end.
    - `waited_for`: the worker that came last; the worker itself where it waited for nobody.
    - `arrows`: all messages. `matched`: whether each has its partner; else there are none.
    """

    until: Mapping[int, np.ndarray]
    waited_for: Mapping[int, np.ndarray]
    arrows: tuple[Arrow, ...]
    matched: bool = True


def meet(timed: Mapping[int, Sequence[Message]]) -> Met:
    """Return whom the workers' messages waited for, by world rank; where partners didn't record theirs, for nobody.

    A message is there when both have come; a sender that is done before its receiver comes did not wait for it.
    """
    starts = {worker: np.array([each.start for each in several], np.int64) for worker, several in timed.items()}
    until = {worker: start.copy() for worker, start in starts.items()}
    waited_for = {worker: np.full(len(start), worker) for worker, start in starts.items()}

    def wait(place: Place, other: Place) -> None:
        (worker, number), came = place, starts[other[0]][other[1]]
        if until[worker][number] < came < timed[worker][number].end:
            until[worker][number], waited_for[worker][number] = came, other[0]

    try:
        arrows, teams = _meetings(timed)
    except LookupError:
        return Met(until, waited_for, (), matched=False)
    for sender, sent, receiver, received in arrows:
        wait((sender, sent), (receiver, received))
        wait((receiver, received), (sender, sent))
    for team in teams:
        last = max(team, key=lambda place: starts[place[0]][place[1]])
        for place in team:
            wait(place, last)
    return Met(until, waited_for, tuple(arrows))


def _meetings(timed: Mapping[int, Sequence[Message]]) -> tuple[list[Arrow], list[list[Place]]]:
    """Return all messages, those between two workers in order, and the operations of teams, the n-th ones of a team.

    Raises `LookupError` where partners aren't there.
    """
    sent: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
    received: list[tuple[int, int, int]] = []
    teams: defaultdict[tuple[Workers, int], list[Place]] = defaultdict(list)
    for worker, several in timed.items():
        count: Counter[Workers] = Counter()
        for number, operation in enumerate(each.operation for each in several):
            if not operation.is_message:
                teams[operation.team, count[operation.team]].append((worker, number))
                count[operation.team] += 1
                continue
            if operation.dest is not None:
                sent[worker, operation.dest].append(number)
            if operation.source is not None:
                received.append((operation.source, worker, number))
    arrows = [Arrow(sender, sent[sender, worker].popleft(), worker, number) for sender, worker, number in received]
    if any(sent.values()) or any(len(team) != len(present) for (team, _), present in teams.items()):
        raise LookupError
    return arrows, [*teams.values()]


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
