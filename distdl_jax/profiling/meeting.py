"""Joins the workers: how long each message waited for which worker, and how long it then took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distdl_jax.errors import PlanError
from distdl_jax.profiling.activities import Message
from distdl_jax.profiling.meetings import meetings


@dataclass(frozen=True)
class Arrow:
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
    ends = {worker: np.array([each.end for each in several], np.int64) for worker, several in timed.items()}
    until = {worker: start.copy() for worker, start in starts.items()}
    waited_for = {worker: np.full(len(start), worker) for worker, start in starts.items()}
    try:
        met = meetings({worker: [each.operation for each in several] for worker, several in timed.items()})
    except PlanError:
        return Met(until, waited_for, (), matched=False)
    numbers = [
        (worker, number)
        for worker, several in timed.items()
        for number, each in enumerate(several)
        if not each.operation.is_message or each.operation.dest is not None or each.operation.source is not None
    ]

    def wait(mine: tuple[int, int], other: tuple[int, int]) -> None:
        worker, number = mine
        came = starts[other[0]][other[1]]
        if until[worker][number] < came < ends[worker][number]:
            until[worker][number], waited_for[worker][number] = came, other[0]

    arrows = []
    for wave in met.waves:
        for send, receive in zip(wave.messages.send, wave.messages.receive, strict=True):
            sender, receiver = numbers[send], numbers[receive]
            wait(sender, receiver)
            wait(receiver, sender)
            arrows.append(Arrow(*sender, *receiver))
        for collective in wave.collectives:
            team = [numbers[each] for each in collective.operations]
            last = max(team, key=lambda each: starts[each[0]][each[1]])
            for mine in team:
                wait(mine, last)
    return Met(until, waited_for, tuple(arrows))
