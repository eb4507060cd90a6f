"""How the job is ended: with a message that arrives, and once. The only file of this room that calls MPI.

Nothing in here can fail: a message that can't be written is no reason to let the others wait.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

mpi_lock = threading.RLock()
"""Held by the watchdog's thread while it calls MPI: a process that ends in the middle of a call may crash instead."""

LAST_RESORT = 10.0
"""Seconds that MPI is given to end the job before the process leaves on its own."""

_ending = threading.Lock()
_process = os.getpid()


def say(text: str) -> None:
    """Write to stderr in one piece, so that the workers' lines don't mix; past Python where its stderr is of no use."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:  # closed, replaced, on a full disk, or None
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="replace"))


def end_the_job(text: str, status: int = 1) -> None:
    """Write `text`, and end all workers with exit status `status`. Does not return, but in a second thread."""
    if is_forked():
        say(text)
        os._exit(status)  # a process that a worker has forked is no worker, and must not end the job
    if not _ending.acquire(blocking=False):
        time.sleep(60)  # another thread is about to end the process
        return
    try:
        say(text)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        time.sleep(0.2)  # for the launcher to pass it on
        mpi_lock.acquire(timeout=2)
    finally:
        _abort(status)


def is_forked() -> bool:
    """Whether this process is not the one that imported the library, but a fork of it."""
    return os.getpid() != _process


def mpi_has_ended() -> bool:
    """Whether MPI was finalised, so that it must not be called any more."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_finalized())


def _abort(status: int) -> None:
    try:
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            with contextlib.suppress(Exception):  # no thread is left to be had: then MPI alone must do it
                threading.Thread(target=_leave_later, args=(status,), daemon=True).start()
            mpi.COMM_WORLD.Abort(status)
    finally:
        os._exit(status)


def _leave_later(status: int) -> None:
    time.sleep(LAST_RESORT)
    os._exit(status)
