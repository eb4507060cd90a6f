"""What ends one worker ends the job: exceptions, exits with an error, signals. The others would wait for ever."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

from distdl_jax.backends.mpi.board import board, main_stack

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
        rank = MPI.COMM_WORLD.Get_rank()
        try:
            if previous is sys.__excepthook__:
                print(f"Worker {rank} of {MPI.COMM_WORLD.Get_size()} raised; the job ends.", file=sys.stderr)
                traceback.print_exception(kind, error, trace)
            else:
                previous(kind, error, trace)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            MPI.COMM_WORLD.Abort(1)

    end_job.ends_mpi_job = True  # type: ignore[attr-defined]
    sys.excepthook = end_job


def _remember_exit_status() -> None:
    """Python tells nobody the status of an exit, so what `sys.exit` is given is noted.

    It alone ends nothing (the exit may be caught, or all workers may exit alike): it counts once others wait.
    """
    leave = sys.exit

    def exit(status: Any = None, /) -> NoReturn:
        board.exit_status = status if isinstance(status, int) else int(status is not None)
        leave(status)

    sys.exit = exit


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
    signal.signal(signal.SIGTERM, lambda number, frame: _stop(number, frame))
    _signals.append(reading)


def heed_signals() -> None:
    """End the job if this worker was told to stop; called from the watch's thread."""
    for reading in _signals:
        try:
            numbers = os.read(reading, 64)
        except BlockingIOError:
            continue
        if signal.SIGTERM in numbers:
            _stop(signal.SIGTERM, main_stack())


def _stop(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    lines = [f"Worker {MPI.COMM_WORLD.Get_rank()} got {name}; the job ends. It was at:\n"]
    sys.stderr.write("".join(lines + traceback.format_stack(frame)))
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(128 + number)
