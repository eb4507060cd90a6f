"""The clock of one worker: when it has waited so long that it asks to end the job."""

from __future__ import annotations

from typing import Literal

PATIENCE = 1.0
"""Seconds for which a worker waits before it says so."""

BETWEEN_QUESTIONS = 10.0
"""Seconds before a worker that was told to wait longer asks again."""


class Clock:
    """Told how long the worker has waited, and what time it is, it says what is to be done.

    - `limit`: seconds; 0 for never.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._asked_at: float | None = None
        self._not_before = 0.0

    def look(self, waited: float, now: float) -> Literal["ask", "give up"] | None:
        """To ask worker 0 whether to end the job; or, where it does not answer, to end it."""
        if not self._limit or waited < self._limit:
            return None
        if self._asked_at is None:
            if now <= self._not_before:
                return None
            self._asked_at = now
            return "ask"
        return "give up" if now - self._asked_at > 2 * BETWEEN_QUESTIONS else None

    def wait_longer(self, now: float) -> None:
        """The answer: not yet."""
        self._asked_at, self._not_before = None, now + BETWEEN_QUESTIONS
