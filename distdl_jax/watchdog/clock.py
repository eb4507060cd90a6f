"""Two clocks: the time in which a watch could look, and how long one worker has been waiting by it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from distdl_jax.watchdog.deadlock import Kind

PATIENCE = 0.25
"""Seconds for which a worker waits before it says so."""

LONGEST_PATIENCE = 10.0
"""The same for a program, where programs have taken long before."""

LONGEST_TURN = 1.0
"""A pause between two turns counts as so many seconds at most: in a longer one the job was suspended, or stood."""

ASKED_AT = (1 / 16, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""After which parts of the limit a worker that waits asks whether it may."""

FIRST_LINE = 60.0
"""Seconds after its end for which a worker waits before it asks for whom the job goes on."""

UNTIL_GIVEN_UP = 1 + 1 / 16
"""After how many times the limit without an answer a worker ends the job: a coordinator that waits for others as long
as the limit speaks first."""

LAST_QUESTION = len(ASKED_AT) - 1
"""How many are asked before that at the limit: the only one of a worker whose program has ended."""


def seconds_text(seconds: float) -> str:
    """How long something took, as messages have it: in whole seconds, or two digits of less than one.

    >>> [seconds_text(its) for its in (0.00123, 0.5, 2.3, 61.7)]
    ['0.0012 s', '0.5 s', '2 s', '62 s']
    """
    return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.0f} s"


class AwakeClock:
    """Seconds in which the watch took its turns: differences of wall time would count a suspended job as waiting."""

    def __init__(self, now: float) -> None:
        self._before = now
        self.seconds = 0.0

    def turn(self, now: float) -> float:
        """One more turn, at `now`."""
        self.seconds += min(max(now - self._before, 0.0), LONGEST_TURN)
        self._before = now
        return self.seconds


@dataclass(frozen=True)
class Wait:
    """A wait that goes on: in which episode, since when, how many seconds of it don't count, and the limit.

    - `asked`: how many of the questions of `ASKED_AT` were asked since it began to count.
    - `unanswered`: since when the coordinator has been silent that owes an answer.
    """

    kind: Kind
    episode: int
    began: float
    limit: float
    allowed: float = 0.0
    asked: int = 0
    unanswered: float | None = None

    def seconds(self, now: float) -> float:
        """For how long it has lasted."""
        return now - self.began

    def allow(self, seconds: float, limit: float, now: float) -> Wait:
        """The coordinator's answer."""
        counted = self.seconds(now) - seconds
        asked = max(1, sum(counted >= part * limit for part in ASKED_AT[:-1]))
        asked = LAST_QUESTION if self.kind == "left" else asked
        return replace(self, allowed=seconds, limit=limit, asked=asked, unanswered=None)

    def noted(self, now: float) -> Wait:
        """The coordinator is there, and will answer."""
        return replace(self, unanswered=now)

    def wakes_at(self) -> tuple[float, float]:
        """When the next question is due, and when it is to be given up; never where there is no limit."""
        never = float("inf")
        if not self.limit:
            return never, never
        asks = self._next_question() if self.asked < len(ASKED_AT) else never
        ends = max(self.unanswered, self.began + self.allowed) if self.unanswered is not None else never
        ends += UNTIL_GIVEN_UP * self.limit
        return asks, ends

    def look(self, now: float) -> Literal["ask", "give up"] | None:
        """Whether to ask the coordinator, or, if that has been silent for longer than the limit, to end the job."""
        asks, ends = self.wakes_at()
        # The last question is asked once: the coordinator comes back to it.
        return "give up" if now >= ends else "ask" if now >= asks else None

    def _next_question(self) -> float:
        return self.began + self.allowed + ASKED_AT[self.asked] * self.limit

    def after_asking(self, now: float) -> Wait:
        """It has asked."""
        return replace(self, asked=self.asked + 1, unanswered=self.unanswered if self.unanswered is not None else now)
