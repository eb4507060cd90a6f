"""The watchdog's awake time, and the durations shared by workers and the coordinator."""

from __future__ import annotations

PATIENCE = 0.25
"""Seconds that a worker waits before it reports the wait."""

LONGEST_PATIENCE = 10.0
"""The same for a program, if programs have taken long before."""

LONGEST_TURN = 1.0
"""A pause between two turns counts as at most this many seconds: in a longer one the job was suspended, or stopped."""

ANNOUNCED = 1 / 16
"""The fraction of the limit after which a worker announces a wait: from then on the coordinator asks all repeatedly."""

ASKED = (1 / 64, 1 / 4)
"""The fractions of the limit after which the coordinator asks all again: at least, and at most if one waits."""

COMPILATION = 8
"""The number of limits for which no wait ends the job while some worker compiles."""

GIVEN_UP = 1 + 1 / 16
"""The multiple of the limit after which a worker that has announced a wait, and was not asked, ends the job."""

FIRST_LINE = 60.0
"""The seconds of a wait, or after the end of some programs, after which a line tells for whom the job continues."""

LINES = (FIRST_LINE, 300.0, 900.0, *(1800.0 * 2**n for n in range(16)))
"""The seconds of one wait after which a line tells who waits where, for whom; with a limit below two minutes, at half
of it, too."""


def seconds_text(seconds: float) -> str:
    """Return a duration, as in messages: in whole seconds, or with two digits below one.

    >>> [seconds_text(seconds) for seconds in (0.00123, 0.5, 2.3, 61.7)]
    ['0.0012 s', '0.5 s', '2 s', '62 s']
    """
    return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.0f} s"


def lines_within(limit: float) -> tuple[float, ...]:
    """Return the seconds of a wait after which a line is printed, if the clock has this limit (0: none).

    >>> lines_within(40.0)[:2], lines_within(1800.0)[:4], lines_within(0.0)[:2]
    ((20.0, 60.0), (60.0, 300.0, 900.0, 1800.0), (60.0, 300.0))
    """
    return LINES if not limit or limit >= 2 * FIRST_LINE else (limit / 2, *LINES)


def last_line(lines: tuple[float, ...], seconds: float) -> float:
    """Return the last of these times that has passed after `seconds`, 0 if none has."""
    return max((line for line in lines if line <= seconds), default=0.0)


class AwakeClock:
    """Seconds in which the watchdog took turns: differences of wall time would count a suspended job as waiting."""

    def __init__(self, now: float) -> None:
        self._before = now
        self.seconds = 0.0

    def turn(self, now: float) -> float:
        """Count one more turn, at `now`."""
        self.seconds += min(max(now - self._before, 0.0), LONGEST_TURN)
        self._before = now
        return self.seconds
