"""`sys.excepthook`: an exception that ends one worker's program ends the job. The others would wait for ever."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType

from distdl_jax.watchdog.launch import run_program
from distdl_jax.watchdog.watch.abort import end_the_job, is_forked
from distdl_jax.watchdog.watch.status import worker_status

_ExceptionHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _Hook:
    """Print an exception by the hook that was there before, and end the job."""

    def __init__(self, previous: _ExceptionHook) -> None:
        self.previous = previous
        self.is_on = True

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A process that a worker has forked inherits the hook, and must not end the job.
        if not self.is_on or is_forked() or _main_program_goes_on() or _is_of_a_prompt(trace):
            self.previous(kind, error, trace)
            return
        text = ""
        try:
            if self.previous is sys.__excepthook__:
                status = worker_status()
                text = f"Worker {status.rank} of {status.size} raised; the job ends.\n"
                text += "".join(traceback.format_exception(kind, error, trace))
            else:
                self.previous(kind, error, trace)
        finally:
            end_the_job(text)


def install() -> None:
    """Put the hook in front of the one that is there."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


def remove() -> None:
    """Take the hook out; where another one stands in front of it, it only passes on from now on."""
    if isinstance(hook := sys.excepthook, _Hook):
        hook.is_on = False
        sys.excepthook = hook.previous


def _main_program_goes_on() -> bool:
    """Return whether the main program itself shows an exception (as consoles do), and has not ended by it.

    Python calls the hook, or one that calls it in turn, when no line of the program is left to run.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code, name = frame.f_code, frame.f_globals.get("__name__")
        if code.co_name == "<module>" and name == "__main__" and code.co_filename != run_program.__file__:
            return True
        frame = frame.f_back
    return False


def _is_of_a_prompt(trace: TracebackType | None) -> bool:
    """Return whether a line at Python's own prompt has raised, which asks for the next one."""
    return hasattr(sys, "ps1") and (trace is None or trace.tb_frame.f_code.co_filename.startswith("<"))


def has_raised() -> bool:
    """Return whether an exception has ended the main program, where a hook of its own is in the place of this one.

    Python keeps such an exception for debuggers. An interactive one does so for each that it goes on after.
    """
    trace: TracebackType | None = getattr(sys, "last_traceback", None)
    is_interactive = sys.flags.interactive or hasattr(sys, "ps1")
    return trace is not None and not is_interactive and trace.tb_frame.f_back is None
