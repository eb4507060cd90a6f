"""The slowdown of this machine now: limits are multiples of how long worlds take to start in the same run."""

import math
import os
import time
from collections.abc import Hashable

MOST = 20.0
USUAL_COST = 4.0  # processor seconds of such a start, of each rank
USUAL_START = 4.0  # seconds in which as many ranks as there are cores start and collect their tests


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Slowdown:
    """1 on a machine where worlds start as fast as usual; the slowest start of the run says how much slower it is."""

    def __init__(self) -> None:
        self.slowest = 1.0
        self.cheapest: float | None = None
        self.starting: dict[Hashable, tuple[int, float]] = {}

    def begin(self, group: Hashable, processes: int) -> None:
        self.starting[group] = processes, time.monotonic()

    def end(self, group: Hashable) -> None:
        self.slowest = min(MOST, max(self.slowest, _slower(*self.starting.pop(group))))

    def started(self, cost: float) -> None:
        """Count a start that cost so many processor seconds a rank."""
        self.cheapest = cost if self.cheapest is None else min(self.cheapest, cost)

    @property
    def processor(self) -> float:
        """The factor by which processor seconds are more than usual; what else runs hardly counts."""
        return max(1.0, (self.cheapest or 0) / USUAL_COST)

    def factor(self) -> float:
        """Return the slowdown; a start that is still under way counts with the time it has taken so far."""
        so_far = [_slower(*start) for start in list(self.starting.values())]
        return min(MOST, max([self.slowest, *so_far]))


def _slower(processes: int, began: float) -> float:
    return (time.monotonic() - began) / (USUAL_START * math.ceil(processes / cores()))
