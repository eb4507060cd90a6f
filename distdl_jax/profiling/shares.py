"""Divides each moment of a worker's steps among what ran in it, so that all shares together are the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Span(NamedTuple):
    """A time in which something ran, in ns: `column` it counts in, and whether it is communication."""

    start: int
    end: int
    column: int
    communicates: bool


class Shares(NamedTuple):
    """The seconds of each column, and in which nothing ran; of communication, those in which arithmetic ran, too."""

    seconds: np.ndarray
    idle: float
    hidden: np.ndarray


def shares(spans: Sequence[Span], steps: Sequence[tuple[int, int]], columns: int) -> Shares:
    """Divide the time of all steps.

    A moment belongs to the arithmetic that runs in it, in equal parts where there are several; if there is none, to
    communication; else to nothing.
    """
    seconds, hidden, idle = np.zeros(columns), np.zeros(columns), 0.0
    changes = sorted(
        [(start, 1, number) for number, (start, _) in enumerate(steps)]
        + [(end, -1, number) for number, (_, end) in enumerate(steps)]
        + [(span.start, 2, number) for number, span in enumerate(spans) if span.end > span.start]
        + [(span.end, -2, number) for number, span in enumerate(spans) if span.end > span.start]
    )
    inside, before = 0, 0
    computing, communicating = set[int](), set[int]()
    for time, change, number in changes:
        took = (time - before) * 1e-9
        before = time
        if inside and took:
            running = computing or communicating
            for each in running:
                seconds[spans[each].column] += took / len(running)
            for each in communicating if computing else ():
                hidden[spans[each].column] += took
            idle += 0.0 if running else took
        if abs(change) == 1:
            inside += change
            continue
        among = communicating if spans[number].communicates else computing
        (among.add if change > 0 else among.discard)(number)
    return Shares(seconds, idle, hidden)
