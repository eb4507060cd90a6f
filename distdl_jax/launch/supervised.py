"""What a worker tells the supervisor that has started it (`python -m distdl_jax`); nothing where there is none."""

from __future__ import annotations

import contextlib
import os

CHANNEL = "DISTDL_JAX_SUPERVISOR"
"""The environment variable with the descriptor that a worker writes to."""

STARTS_MPI, HAS_MPI, IN_WORLD, ENDS, FAILED = "starts-mpi", "has-mpi", "in-world", "ends", "failed:"
"""The events: the worker starts MPI, in which all wait for all; MPI is up; the worker is in a world with others; it has
told the others of its end, or the user of the job's; its program has ended with this status, and who has not come to
the first partition knows nothing of it."""

exit_status: int | None = None
"""What the program ends with, once that is known; plain `python` tells nobody of a `SystemExit`."""

_channel: tuple[int, int] | None = None


def connect() -> None:
    """Take the descriptor over: no process that the worker starts gets it."""
    global _channel
    if channel := os.environ.pop(CHANNEL, ""):
        os.set_inheritable(int(channel), False)
        _channel = int(channel), os.getpid()


def tell(event: str) -> None:
    """Tell the supervisor of an event."""
    if _channel is not None and _channel[1] == os.getpid():
        with contextlib.suppress(OSError):
            os.write(_channel[0], f"{event}\n".encode())


def program_has_ended(status: int) -> None:
    """Tell the supervisor how the program has ended: what follows, the end of MPI, may wait for others for ever."""
    global exit_status
    exit_status = status
    if status:
        tell(f"{FAILED}{status}")
