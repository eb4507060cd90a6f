"""The clock over the start of MPI, where a worker waits for all others: for one that has failed before, say.

mpi4py keeps the interpreter's lock while MPI starts, so no thread of Python's can keep that clock. A process beside the
worker does: this file, run as a program, which imports nothing but the standard library. It counts its own turns, so
that time in which the job was suspended does not count, and leaves when its standard input is closed, in whatever way.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

LONGEST_TURN = 1.0
"""Seconds between two looks; a longer pause counts as so many."""


@contextmanager
def clock_over_the_start_of_mpi(limit: float, who: str) -> Iterator[None]:
    """Inside, this process is ended, with a sentence about `who`, after `limit` seconds; 0 for never."""
    with ExitStack() as until_started:
        if limit:
            command = [sys.executable, "-I", "-S", __file__, str(limit), str(os.getpid()), who]
            with suppress(OSError):  # no process is left to be had: then there is no clock
                until_started.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
        yield


def _keep(limit: float, worker: int, who: str) -> None:
    """Wait until standard input is closed; if that takes too long, end the process `worker`, this one's parent."""
    counted, before = 0.0, time.monotonic()
    while counted < limit:
        if select.select([0], [], [], min(LONGEST_TURN, limit - counted))[0]:
            return
        now = time.monotonic()
        counted += min(now - before, LONGEST_TURN)
        before = now
    text = (
        f"distdl_jax ends the job. {who} has waited for {limit:g} s (DISTDL_JAX_TIMEOUT, in seconds; 0 turns it off) "
        "for MPI to start, which takes all workers: one of them has not come to it. Look above for what another worker "
        "says, and on its host for a process that hangs; all need the same Python, the same packages and environment.\n"
    )
    with suppress(OSError):
        os.write(2, text.encode())
    if os.getppid() == worker:
        os.kill(worker, signal.SIGKILL)  # it runs no Python; and launchers end a job when a process is killed


if __name__ == "__main__":
    _keep(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
