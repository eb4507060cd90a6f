"""How slow this machine is now: limits are multiples of how long worlds take to start in the same run."""

import math
import os
import time

MOST = 20.0
USUAL_START = 4.0  # seconds in which as many ranks as there are cores start and collect their tests


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Pace:
    """1 on a machine where worlds start as fast as usual; the slowest start of the run says how much slower it is."""

    def __init__(self) -> None:
        self.slowest = 1.0
        self.starting: dict[int, float] = {}

    def begin(self, size: int) -> None:
        self.starting[size] = time.monotonic()

    def end(self, size: int) -> None:
        began = self.starting.pop(size)
        self.slowest = min(MOST, max(self.slowest, _slower(size, time.monotonic() - began)))

    def now(self) -> float:
        """Also a start that is still under way counts, with the time it has taken so far."""
        so_far = [_slower(size, time.monotonic() - began) for size, began in list(self.starting.items())]
        return min(MOST, max([self.slowest, *so_far]))


def _slower(size: int, seconds: float) -> float:
    return seconds / (USUAL_START * math.ceil(size / cores()))
