"""Messages of a worker to the supervisor that started it (`python -m distdl_jax`); none without a supervisor."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import NamedTuple

from distdl_jax.watchdog.launch.environment import take_out
from distdl_jax.watchdog.launch.launcher import job_rank, mark_worker

CHANNEL = "DISTDL_JAX_SUPERVISOR"
"""The environment variable with the supervisor's process, the two ends of a pipe (to write, and to read), the
launcher's process, and the names of variables that are for the worker alone."""

STARTS_MPI, HAS_MPI, IN_WORLD, ENDS = "starts-mpi", "has-mpi", "in-world", "ends"
FAILED, SAID = "failed:", "said"
"""The events: the worker starts MPI, in which all wait for all; MPI has started; the worker is in a world with others;
it has told the others of its end, or the user of the job's; its program has ended with this status, and workers not yet
at the first partition don't know it; another worker of its host has printed the same error, with its end."""

exit_status: int | None = None
"""The exit status of the program, once known; plain `python` reports a `SystemExit` to nobody."""


class _Pipe(NamedTuple):
    """The pipe to the supervisor, in the process for which it was made; `path` is its other end (Linux)."""

    descriptor: int
    path: str
    identity: tuple[int, int]
    process: int


_pipe: _Pipe | None = None
_launcher = os.getppid()


def connect() -> None:
    """Take over the pipe: child processes don't inherit it, and can know that they are inside a worker."""
    global _pipe, _launcher
    if channel := os.environ.pop(CHANNEL, ""):
        numbers, names = channel.split(":")[:4], channel.split(":")[4:]
        supervisor, own, other, _launcher = map(int, numbers)
        take_out(names)
        get_signal_at_end_of_parent(signal.SIGKILL)  # no worker outlives its supervisor
        os.kill(supervisor, 0)  # raises if it has already ended
        os.set_inheritable(own, False)
        _pipe = _Pipe(own, f"/proc/{supervisor}/fd/{other}", _identity(own), os.getpid())
    if job_rank() is not None:
        mark_worker()


def launcher_process() -> int:
    """Return the process that has started this worker, or its supervisor."""
    return _launcher


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def tell(event: str) -> None:
    """Tell the supervisor of an event.

    If the program has closed all descriptors, its own files have their numbers; then the pipe is opened again.
    """
    if _pipe is None or _pipe.process != os.getpid():
        return
    text = f"{event}\n".encode()
    with contextlib.suppress(OSError):
        if _identity(_pipe.descriptor) == _pipe.identity:
            os.write(_pipe.descriptor, text)
            return
    with contextlib.suppress(OSError):
        again = os.open(_pipe.path, os.O_WRONLY | os.O_CLOEXEC)
        with contextlib.closing(os.fdopen(again, "wb", buffering=0)) as pipe:
            if _identity(again) == _pipe.identity:
                pipe.write(text)


def get_signal_at_end_of_parent(number: int) -> None:
    """Have the system send this process a signal when its parent ends (Linux: PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)


def program_has_ended(status: int) -> None:
    """Tell the supervisor how the program has ended: the following end of MPI may wait for others for ever."""
    global exit_status
    exit_status = status
    if status:
        tell(f"{FAILED}{status}")
