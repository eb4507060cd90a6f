"""`os._exit` on a worker. To launchers that is a crash, or nothing at all; MPICH's ends the job, with status 0."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from distdl_jax.process.launcher import tell_launcher_of_the_end
from distdl_jax.watchdog.abort import end_the_job, is_forked, leave_at_once, mpi_has_ended, say
from distdl_jax.watchdog.main_thread import main_stack, stack_text, user_frames
from distdl_jax.watchdog.status import worker_status


def announce_os_exit(leave: Callable[[], None]) -> None:
    """`os._exit`: with status 0, end as a worker ends whose program is over (`leave`: tell the others, and wait until
    theirs are, too); with any other, end the job."""
    if getattr(os._exit, "is_announced", False):
        return

    def _exit(status: int) -> NoReturn:
        if is_forked():
            leave_at_once(status)
        if mpi_has_ended():
            if not status:
                tell_launcher_of_the_end()
            leave_at_once(status)
        try:
            who = f"Worker {worker_status().rank} of {worker_status().size}"
            if status:
                where = stack_text(user_frames(main_stack()))
                end_the_job(f"{who} ends by os._exit({status}); the job ends. It was at:\n{where}", status)
            elif threading.current_thread() is threading.main_thread():
                leave()
                with contextlib.suppress(Exception):
                    sys.modules["mpi4py.MPI"].Finalize()  # or launchers end the others, who may be writing still
                    tell_launcher_of_the_end()
            else:
                say(f"{who} ends by os._exit(0), called by a thread, whatever its program is doing.\n")
        finally:
            leave_at_once(status)

    _exit.is_announced = True  # type: ignore[attr-defined]
    os._exit = _exit
