"""The end of a job: with a message that arrives, and once. The only file of this package that calls MPI.

Nothing here may raise: a message that can't be written is no reason to let the others wait.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from distdl_jax.watchdog.launch import supervised
from distdl_jax.watchdog.launch.said_once import remove_files

mpi_lock = threading.RLock()
"""Held by the watchdog's thread while it calls MPI: a process that ends in the middle of a call may crash instead."""

LAST_RESORT = 10.0
"""Seconds that MPI is given to end the job before the process leaves on its own."""

say_elsewhere: list[Callable[[str], None]] = []
"""Has another worker write a text, if there is one to ask."""

_ending = threading.Lock()
_process = os.getpid()


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


_has_stderr = _is_open(2)  # if not, descriptor 2 may be any file opened since, such as a checkpoint


def say(text: str) -> bool:
    """Write to stderr in one piece, so that the workers' lines don't mix; directly if Python's stderr is unusable.
    Returns whether that succeeded."""
    with contextlib.suppress(Exception):  # closed, replaced, on a full disk, or None
        if _has_stderr or sys.stderr is not sys.__stderr__:
            sys.stderr.write(text)
            sys.stderr.flush()
            return True
    with contextlib.suppress(OSError):
        if _has_stderr:
            os.write(2, text.encode(errors="replace"))
            return True
    return False


def end_the_job(text: str, status: int = 1, last: Callable[[], str] = str) -> None:
    """Write `text`, then what `last` returns, and end all workers with exit status `status`. Does not return, except in
    a second thread."""
    if is_forked():
        say(text)
        os._exit(status)  # a process forked by a worker is not a worker, and must not end the job
    if not _ending.acquire(blocking=False):
        time.sleep(60)  # another thread is about to end the process
        return
    try:
        with contextlib.suppress(Exception):
            if not say(text) and say_elsewhere:
                say_elsewhere[0](text)
            say(last())
        supervised.tell(supervised.ENDS)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        time.sleep(0.2)  # for the launcher to forward it
        mpi_lock.acquire(timeout=2)
    finally:
        _abort(status)


def is_ending() -> bool:
    """Return whether this process is ending the job."""
    return _ending.locked()


def is_forked() -> bool:
    """Return whether this process is a fork of the one that imported the library."""
    return os.getpid() != _process


def mpi_has_ended() -> bool:
    """Return whether MPI was finalised, after which it must not be called."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_finalized())


def _abort(status: int) -> None:
    status = status & 0xFF or 1  # a shell sees only eight bits: 256 would be 0 there
    try:
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            with contextlib.suppress(Exception):  # no thread is available: then MPI must do it
                threading.Thread(target=_leave_later, args=(status,), daemon=True).start()
            remove_shared_memory()
            remove_files()
            _hide_what_mpi_says()
            mpi.COMM_WORLD.Abort(status)
    finally:
        os._exit(status)


def _hide_what_mpi_says() -> None:
    """Leave out MPI's own line about the end of the job, after all has been said."""
    with contextlib.suppress(OSError):
        if _has_stderr:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def remove_shared_memory() -> None:
    """Unlink the workers' shared files on this host, which MPICH leaves in /dev/shm if a job aborts: 1 to 3 MB.

    Since the start of MPI all of them have mapped it, and don't need its name any more.
    """
    with contextlib.suppress(Exception):  # no /proc
        for file in set(re.findall(r"/dev/shm/mpich_shm_\w+$", Path("/proc/self/maps").read_text(), re.MULTILINE)):
            os.unlink(file)


def _leave_later(status: int) -> None:
    time.sleep(LAST_RESORT)
    os._exit(status)
