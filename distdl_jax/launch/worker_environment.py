"""What has to be in a worker's environment before it starts: how malloc takes memory, and how many threads compute."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

HUGE_PAGES = ":".join(
    f"glibc.malloc.{name}"
    # Huge pages; no large buffer outside the heap; a heap that gives nothing back; and no second heap, whose blocks
    # above 64 MiB are fresh pages at each call, for threads.
    for name in ("hugetlb=1", "mmap_max=0", f"trim_threshold={2**62}", "arena_max=1")
)
"""glibc's malloc gives out each large buffer as fresh 4-KiB pages, and gives them back when the buffer is freed: a
step that makes a 16 MiB buffer pays 4,096 page faults each time. With these settings it keeps them."""


def worker_environment(environment: Mapping[str, str], local_workers: int, cores: int, bound: bool) -> dict[str, str]:
    """Return what a worker's environment is to have besides; what the user has set stays.

    **Arguments:**

    - `environment`: the supervisor's.
    - `local_workers`: how many workers share this host.
    - `cores`: how many cores this process may use; `bound`: whether they are for this worker alone.
    """
    added = {"UCX_DEBUG_SIGNO": "0"}  # to UCX, below MPI, SIGHUP is a wish to debug, and ends nothing
    if sys.platform == "linux" and "MALLOC_ARENA_MAX" not in environment:
        added["GLIBC_TUNABLES"] = HUGE_PAGES
    if local_workers > 1:
        threads = str(cores if bound else max(1, cores // local_workers))
        added |= {"NPROC": threads, "OMP_NUM_THREADS": threads}  # the pools of XLA and of oneDNN
    return {name: value for name, value in added.items() if name not in environment}


def usable_cores(local_workers: int) -> tuple[int, bool]:
    """Return how many cores this process may use, and whether the launcher has bound it to them alone."""
    count = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count
    return mine, mine < count and mine * local_workers <= count
