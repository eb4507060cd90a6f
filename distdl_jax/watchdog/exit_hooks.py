"""What ends one worker ends the job: exceptions, exits with an error, signals. The others would wait for ever.

Each hook may be installed again: it sees that it is there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from distdl_jax.watchdog.abort import end_the_job
from distdl_jax.watchdog.main_thread import main_stack, stack_text, user_frames
from distdl_jax.watchdog.status import worker_status

_ExceptionHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def end_the_job_on_uncaught_exceptions() -> None:
    """`sys.excepthook`: print the exception as before, and end the job."""
    previous: _ExceptionHook = sys.excepthook
    if getattr(previous, "ends_the_job", False):
        return

    def end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text, status = "", worker_status()
        try:
            if previous is sys.__excepthook__:
                text = f"Worker {status.rank} of {status.size} raised; the job ends.\n"
                text += "".join(traceback.format_exception(kind, error, trace))
            else:
                previous(kind, error, trace)
        finally:
            end_the_job(text)

    end_job.ends_the_job = True  # type: ignore[attr-defined]
    sys.excepthook = end_job


def record_exit_status() -> None:
    """`sys.exit`: record the status that it is given, which Python keeps to itself.

    It alone ends nothing (the exit may be caught, or all workers may exit alike): it counts once others wait.
    """
    leave = sys.exit
    if getattr(leave, "records_the_status", False):
        return

    def exit(status: Any = None, /) -> NoReturn:
        worker_status().exit_status = status if isinstance(status, int) else int(status is not None)
        leave(status)

    exit.records_the_status = True  # type: ignore[attr-defined]
    sys.exit = exit


_signals: list[int] = []


def end_the_job_on_sigterm() -> None:
    """The handler of SIGTERM: say which worker was told to stop, and where it was; unless the program has its own.

    Python runs handlers between two lines of the main thread, which may wait in a compiled program for ever. So the
    number goes through a pipe too (`signal.set_wakeup_fd`), to the watchdog's thread.
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
    """End the job if this worker was told to stop; called from the watchdog's thread."""
    for reading in _signals:
        try:
            numbers = os.read(reading, 64)
        except BlockingIOError:
            continue
        if signal.SIGTERM in numbers:
            _stop(signal.SIGTERM)


def _stop(number: int) -> None:
    name = signal.Signals(number).name
    text = f"Worker {worker_status().rank} got {name}; the job ends. It was at:\n"
    end_the_job(text + stack_text(user_frames(main_stack())), 128 + number)
