"""How the job is ended: with a message that arrives, and once. The only file of this room that calls MPI."""

from __future__ import annotations

import os
import sys
import threading
import time

mpi_lock = threading.RLock()
"""Held by the watchdog's thread while it calls MPI: a process that ends in the middle of a call may crash instead."""

_ending = threading.Lock()


def say(text: str) -> None:
    """Write to stderr in one piece, so that the workers' lines don't mix."""
    sys.stderr.write(text)
    sys.stderr.flush()


def end_the_job(text: str, status: int = 1) -> None:
    """Write `text`, and end all workers with exit status `status`. Does not return, but in a second thread."""
    if not _ending.acquire(blocking=False):
        time.sleep(60)  # another thread is about to end the process
        return
    say(text)
    sys.stdout.flush()
    time.sleep(0.2)  # for the launcher to pass it on
    mpi_lock.acquire(timeout=2)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        os._exit(status)
    mpi.COMM_WORLD.Abort(status)


def mpi_has_ended() -> bool:
    """Whether MPI was finalised, so that it must not be called any more."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_finalized())
