"""How the job is ended: with a message that arrives, and once."""

from __future__ import annotations

import sys
import threading
import time

from mpi4py import MPI

turn_lock = threading.RLock()
"""Held by the watch's thread while it calls MPI: a process that ends in the middle of a call may crash instead."""

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
    turn_lock.acquire(timeout=2)
    MPI.COMM_WORLD.Abort(status)
