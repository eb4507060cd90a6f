"""A CPU device for every worker, on a client of its own.

On a device that all share, programs of one worker could hold what the others' need to go on: places in the queue of
programs under way, or threads of the pool. A client with its own pool, which runs programs in the thread that calls
them, leaves a worker as free as a process does.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from typing import Any

from distdl_jax.compat import new_cpu_device

FEWEST = 2
"""Threads that a client has at least. A program whose inputs are copied from elsewhere runs in one of them, and waits
there for other workers; those may wait, in their turn, for a copy that the client has to make."""

_lock = threading.Lock()
_free: dict[int, list[Any]] = defaultdict(list)


def threads_of_each(workers: int) -> int:
    """Return how many threads a worker computes with: NPROC, as over MPI, or its share of the cores."""
    return int(os.environ.get("NPROC") or max(1, (os.cpu_count() or 1) // workers))


def take_devices(count: int, threads: int) -> list[Any]:
    """Take as many devices that nobody else uses, each with as many threads."""
    with _lock:
        free = _free[threads]
        return [free.pop() if free else new_cpu_device(max(threads, FEWEST)) for _ in range(count)]


def give_back(devices: list[Any], threads: int) -> None:
    """Let others use them: making a client takes some milliseconds, and it is never freed."""
    with _lock:
        _free[threads].extend(devices)
