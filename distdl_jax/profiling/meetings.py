"""Which of the workers' operations meet in a movement, and in which order they can: a movement's `Meetings`.

A message is a meeting of its sender and its receiver, a collective one of its team. Meetings are put into waves: those
of one wave depend on none of each other, so that a play with a clock for each worker goes through them as arrays.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distdl_jax.errors import PlanError
from distdl_jax.programs.ir import Operation


class Messages(NamedTuple):
    """The messages of one wave: arrays with an entry for each message.

    - `send`, `receive`: the numbers of the operations that send and receive it.
    - `nbytes`: its length.
    """

    send: np.ndarray
    receive: np.ndarray
    nbytes: np.ndarray


class Collective(NamedTuple):
    """A collective operation: MPI's name of its `kind`, the numbers of its `operations`, the bytes of each worker."""

    kind: str
    operations: np.ndarray
    nbytes: int


class Wave(NamedTuple):
    """Meetings that depend on none of each other."""

    messages: Messages
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Meetings:
    """The operations of all workers in one movement, numbered from 0, and their meetings.

    - `workers`: the world rank that each operation belongs to.
    - `before`: the number of the operation before it on that worker; of the first one -1.
    - `waves`: the meetings, in an order in which they can happen.
    """

    workers: np.ndarray
    before: np.ndarray
    waves: tuple[Wave, ...]


def meetings(operations: Mapping[int, Sequence[Operation]]) -> Meetings:
    """Return the meetings of the operations of workers, by world rank; refuse those that can't complete together."""
    numbered = [
        (worker, op)
        for worker, several in operations.items()
        for op in several
        if not op.is_message or op.dest is not None or op.source is not None
    ]
    before = [
        number - 1 if number and numbered[number - 1][0] == worker else -1
        for number, (worker, _) in enumerate(numbered)
    ]
    pairs, teams = _messages(numbered), _collectives(numbered)
    parts = [*pairs, *teams]
    levels = _levels([list(part) for part in parts], before)
    if levels is None:
        waiting = sorted(operations)
        raise PlanError(f"The operations of workers {waiting[0]} to {waiting[-1]} in a movement wait for each other.")
    waves = []
    for level in range(1, max(levels, default=0) + 1):
        chosen = [number for number, at in enumerate(levels) if at == level]
        messages = [pairs[number] for number in chosen if number < len(pairs)]
        send, receive = (np.array([pair[side] for pair in messages], np.int64) for side in (0, 1))
        nbytes = np.array([numbered[number][1].bytes_sent for number, _ in messages], np.int64)
        collectives = tuple(
            Collective(op.kind, np.array(team), op.bytes_sent)
            for team in (teams[number - len(pairs)] for number in chosen if number >= len(pairs))
            for op in [numbered[team[0]][1]]
        )
        waves.append(Wave(Messages(send, receive, nbytes), collectives))
    return Meetings(np.array([worker for worker, _ in numbered], np.int64), np.array(before, np.int64), tuple(waves))


def _messages(numbered: Sequence[tuple[int, Operation]]) -> list[tuple[int, int]]:
    """Return the numbers of sender's and receiver's operation of each message: between two workers in order."""
    sent: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
    for number, (worker, op) in enumerate(numbered):
        if op.is_message and op.dest is not None:
            sent[worker, op.dest].append(number)
    pairs = []
    for number, (worker, op) in enumerate(numbered):
        if op.is_message and op.source is not None:
            if not (waiting := sent[op.source, worker]):
                raise PlanError(f"Worker {worker} receives a message from worker {op.source} that it doesn't send.")
            pairs.append((waiting.popleft(), number))
    if left := [key for key, waiting in sent.items() if waiting]:
        raise PlanError(f"Worker {left[0][0]} sends worker {left[0][1]} a message that it doesn't receive.")
    return pairs


def _collectives(numbered: Sequence[tuple[int, Operation]]) -> list[tuple[int, ...]]:
    """Return the numbers of the team's operations of each collective: the n-th of each worker with the same team."""
    met: defaultdict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
    count: defaultdict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
    for number, (worker, op) in enumerate(numbered):
        if not op.is_message:
            met[op.team, count[worker, op.team]].append(number)
            count[worker, op.team] += 1
    for (team, _), present in met.items():
        if len(present) != len(team):
            raise PlanError(f"Only {len(present)} of {len(team)} workers take part in a collective of theirs.")
    return [tuple(present) for present in met.values()]


def _levels(parts: Sequence[Sequence[int]], before: Sequence[int]) -> list[int] | None:
    """Return the wave of each meeting, from 1, given the operations that take part; None where they wait in a circle.

    It lies after the waves of the operations before those that take part.
    """
    of: list[list[int]] = [[] for _ in before]
    for meeting, present in enumerate(parts):
        for number in present:
            of[number].append(meeting)
    after = {earlier: number for number, earlier in enumerate(before) if earlier >= 0}
    absent, levels = [len(present) for present in parts], [1] * len(parts)
    pending, done = [len(several) for several in of], [0] * len(before)
    arriving = [number for number, earlier in enumerate(before) if earlier < 0]
    while arriving:
        number = arriving.pop()
        start = done[before[number]] if before[number] >= 0 else 0
        for meeting in of[number]:
            absent[meeting] -= 1
            levels[meeting] = max(levels[meeting], start + 1)
            if absent[meeting]:
                continue
            for other in parts[meeting]:
                pending[other] -= 1
                done[other] = max(done[other], levels[meeting])
                if not pending[other] and other in after:
                    arriving.append(after[other])
    return None if any(absent) else levels
