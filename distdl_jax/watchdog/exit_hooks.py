"""What ends one worker ends the job: exceptions, exits with an error, signals. The others would wait for ever."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

from distdl_jax.watchdog.abort import end_the_job
from distdl_jax.watchdog.main_thread import main_line, main_stack, stack_text, user_frames
from distdl_jax.watchdog.status import worker_status

UNDERSTANDING = 3.0
"""Seconds that are given to the watches when MPI fails."""

_ExceptionHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def end_the_job_with_this_worker() -> None:
    """See to it that a worker that fails takes the others with it. May be called again."""
    if getattr(sys.excepthook, "ends_mpi_job", False):
        return
    _abort_on_uncaught_exceptions()
    _remember_exit_status()
    _report_termination()


def _abort_on_uncaught_exceptions() -> None:
    previous: _ExceptionHook = sys.excepthook

    def end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = ""
        try:
            if previous is sys.__excepthook__:
                text = f"Worker {MPI.COMM_WORLD.Get_rank()} of {MPI.COMM_WORLD.Get_size()} raised; the job ends.\n"
                text += "".join(traceback.format_exception(kind, error, trace))
            else:
                previous(kind, error, trace)
        finally:
            end_the_job(text)

    end_job.ends_mpi_job = True  # type: ignore[attr-defined]
    sys.excepthook = end_job


def _remember_exit_status() -> None:
    """Python tells nobody the status of an exit, so what `sys.exit` is given is recorded.

    It alone ends nothing (the exit may be caught, or all workers may exit alike): it counts once others wait.
    """
    leave = sys.exit

    def exit(status: Any = None, /) -> NoReturn:
        worker_status.exit_status = status if isinstance(status, int) else int(status is not None)
        leave(status)

    sys.exit = exit


def reporting_errors(comm: MPI.Intracomm) -> MPI.Intracomm:
    """`comm`, on which a failed operation of a compiled program says what it means; MPI's own words come last."""
    comm.Set_errhandler(_failed_operation())
    return comm


@cache
def _failed_operation() -> MPI.Errhandler:
    def end(comm: MPI.Comm, code: int) -> None:
        time.sleep(UNDERSTANDING)  # the watches may find out more: they compare what was called
        end_the_job(
            f"Worker {MPI.COMM_WORLD.Get_rank()}: MPI failed in a compiled program, at {main_line()}. Most "
            "often a message of another operation came in: the workers run different programs. dj.jit compares them "
            f"before they run. MPI says: {MPI.Get_error_string(code)}\n"
        )

    return MPI.Comm.Create_errhandler(end)


_signals: list[int] = []


def _report_termination() -> None:
    """Say which worker was told to stop, and where it was; unless the program has its own handler.

    Python runs handlers between two lines of the main thread, which may wait in a compiled program for ever. So the
    number goes through a pipe too, to the watch's thread.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    if (other := signal.set_wakeup_fd(writing, warn_on_full_buffer=False)) != -1:
        signal.set_wakeup_fd(other)
        return
    signal.signal(signal.SIGTERM, lambda number, frame: _stop(number))
    _signals.append(reading)


def handle_pending_signals() -> None:
    """End the job if this worker was told to stop; called from the watch's thread."""
    for reading in _signals:
        try:
            numbers = os.read(reading, 64)
        except BlockingIOError:
            continue
        if signal.SIGTERM in numbers:
            _stop(signal.SIGTERM)


def _stop(number: int) -> None:
    name = signal.Signals(number).name
    text = f"Worker {MPI.COMM_WORLD.Get_rank()} got {name}; the job ends. It was at:\n"
    end_the_job(text + stack_text(user_frames(main_stack())), 128 + number)
