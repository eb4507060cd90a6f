"""How fast this machine runs Python now, for limits on how much work an algorithm may take."""

import time

USUAL = 0.1  # seconds of processor time that `python_slowdown` counts with


def python_slowdown() -> float:
    """Measure how many times longer than usual a fixed piece of Python takes, in processor time; at least 1."""
    began = time.process_time()
    counts: dict[int, int] = {}
    for i in range(600_000):
        counts[i % 1000] = counts.get(i % 1000, 0) + i
    return max(1.0, (time.process_time() - began) / USUAL)
