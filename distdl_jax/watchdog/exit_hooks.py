"""What ends one worker ends the job: exceptions, exits, signals. The others would wait for ever.

Each hook may be installed again: it sees that it is there. They belong to the process that installed them: one that
it forks (a loader's worker, say) inherits them, and must neither end the job nor be kept from ending itself.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from distdl_jax.watchdog.abort import end_the_job, is_forked
from distdl_jax.watchdog.status import worker_status
from distdl_jax.watchdog.system_exit import MainProgram

_ExceptionHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def end_the_job_on_uncaught_exceptions() -> None:
    """`sys.excepthook`: print the exception as before, and end the job."""
    previous: _ExceptionHook = sys.excepthook
    if getattr(previous, "ends_the_job", False):
        return

    def end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_forked() or _main_program_goes_on() or _is_of_a_prompt(trace):
            previous(kind, error, trace)
            return
        text = ""
        try:
            if previous is sys.__excepthook__:
                status = worker_status()
                text = f"Worker {status.rank} of {status.size} raised; the job ends.\n"
                text += "".join(traceback.format_exception(kind, error, trace))
            else:
                previous(kind, error, trace)
        finally:
            end_the_job(text)

    end_job.ends_the_job = True  # type: ignore[attr-defined]
    sys.excepthook = end_job


def _main_program_goes_on() -> bool:
    """Whether it is the main program itself that shows an exception (as consoles do), and has not ended by it: Python
    calls the hook, or one that calls it in turn, when no line of the program is left to run."""
    if threading.current_thread() is not threading.main_thread():
        return False
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name == "<module>"


def _is_of_a_prompt(trace: TracebackType | None) -> bool:
    """Whether a line at Python's own prompt has raised, which asks for the next one."""
    return hasattr(sys, "ps1") and (trace is None or trace.tb_frame.f_code.co_filename.startswith("<"))


class _Ticket:
    """Goes with the `SystemExit` of a `sys.exit`. That dies with no Python around it only where it ends the process;
    one that is caught dies in the frames of those who caught it, and says nothing."""

    def __init__(self, status: int) -> None:
        self._status = status

    def __del__(self) -> None:
        is_main = threading.get_ident() == threading.main_thread().ident  # it ends no more than another thread
        if is_main and sys._getframe().f_back is None and not is_forked():
            worker_status().exit_status = self._status


def record_exit_status() -> None:
    """`sys.exit`: record the status that it ends the process with, which Python keeps to itself.

    It alone ends nothing (all workers may exit alike): it counts once others wait.
    """
    if getattr(sys.exit, "records_the_status", False):
        return

    def exit(status: Any = None, /) -> NoReturn:
        leaving = SystemExit(status)
        leaving._ticket = _Ticket(exit_status(leaving.code))  # type: ignore[attr-defined]
        try:
            raise leaving
        finally:
            del leaving  # its traceback holds this frame, and would keep it alive

    exit.records_the_status = True  # type: ignore[attr-defined]
    sys.exit = exit


_main: list[MainProgram] = []


def watch_main_program() -> None:
    """`sys.monitoring`: record the status of a `SystemExit` that ends the main program, where Python has that."""

    def found(code: object) -> None:
        if not is_forked():
            worker_status().exit_status = exit_status(code)

    if not _main:
        _main.append(MainProgram(found))


def how_it_ended() -> str:
    """What the exit status does not say of how the main program has ended, after "has ended its program "."""
    is_known = worker_status().exit_status is not None or has_raised() or not _main
    where, error = "" if is_known else _main[0].ended_at(), worker_status().thread_error
    how = [f"by SystemExit at {where}, its status unknown"] if where else []
    return ", ".join([*how, f"while {error}"] if error else how)


def record_errors_of_threads() -> None:
    """`threading.excepthook`: record what ends a thread, which ends nothing else, but is what others may wait for."""
    previous = threading.excepthook
    if getattr(previous, "records_errors", False):
        return

    def record(error: threading.ExceptHookArgs, /) -> None:
        if not is_forked() and not issubclass(error.exc_type, SystemExit):
            name = "a thread" if error.thread is None else error.thread.name
            worker_status().thread_error = f"its {name} raised {error.exc_type.__name__}: {error.exc_value}"
        previous(error)

    record.records_errors = True  # type: ignore[attr-defined]
    threading.excepthook = record


def has_raised() -> bool:
    """Whether an exception has ended the main program, where a hook of its own is in the place of this file's.

    Python keeps such an exception for debuggers. An interactive one does so for each that it goes on after.
    """
    trace: TracebackType | None = getattr(sys, "last_traceback", None)
    is_interactive = sys.flags.interactive or hasattr(sys, "ps1")
    return trace is not None and not is_interactive and trace.tb_frame.f_back is None


def exit_status(code: object) -> int:
    """The exit status that Python makes of what `SystemExit` was given."""
    return code if isinstance(code, int) else int(code is not None)
