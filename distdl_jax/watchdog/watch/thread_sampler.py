"""The activity of calling threads, observed from another one: whether one is in a compiled program, or compiles one.

The frames of a running thread must not be followed from another one: it may leave them at any moment, and CPython 3.11
then crashes. So only the innermost one is inspected; whole stacks are written by `faulthandler`, in one go.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax

from distdl_jax.jax_compat import activity
from distdl_jax.source_lines import is_library, is_of_python
from distdl_jax.watchdog.watch.call_log import CallLog
from distdl_jax.watchdog.watch.clock import PATIENCE
from distdl_jax.watchdog.watch.status import WorkerStatus, is_pending, worker_status

_JIT = str(Path(__file__).parents[2] / "transforms" / "checked_jit.py")
_RUN = "_run"
_OF_JAX = str(Path(jax.__file__).parent) + os.sep


class Line(NamedTuple):
    """One line of a stack."""

    file: str
    number: str
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number} in {self.function}"


@dataclass
class Run:
    """A run of a program: its number, since when it has been seen, the thread that dispatched it, its own token if it
    runs concurrently with the thread, and the thread's tokens meanwhile.

    The next communicating program finds other tokens. (Others have no Python frame, except for the first time.)

    - `where`, `function`: once it has lasted for a while, its line, and the function of its program, if known.
    - `log`, `call`: the call of its program, by its number in a world, if known.
    """

    number: int
    began: float
    thread: int
    token: Any
    tokens: list[Any]
    where: str = ""
    function: str = ""
    log: CallLog | None = None
    call: int = 0
    is_described: bool = False

    def describe(self, status: WorkerStatus) -> None:
        """Look up its details: a stack is expensive, so not before it has lasted for a while."""
        self.is_described = True
        record = status.threads.get(status.shown)
        log = None if record is None else record.log
        number = 0 if log is None else log.number
        stack = main_stack()
        self.where = next(map(str, user_frames(stack)), "")
        if self.token is not None:
            if (dispatched := status.run_of(self.token)) is not None:
                self.function, self.log, self.call = dispatched.name, dispatched.log, dispatched.number
        elif record is not None and record.call and runs_own_program(stack):
            self.function = record.call
            if log is not None and record.log is log and log.inside and number == log.number:
                self.log, self.call = log, number


@dataclass(frozen=True)
class Sample:
    """The activity of the worker.

    - `run`: the current run of a program; None if there is none.
    - `compiles`: for how many seconds the worker has compiled without a pause, 0.0 if it does not. `compiled`: how many
      seconds ago it last did.
    """

    run: Run | None = None
    compiles: float = 0.0
    compiled: float = float("inf")


class Sampler:
    """Samples the threads that have made calls, or the main one if there is none."""

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status
        self._runs: dict[tuple[int, ...], Run] = {}
        self._number = 0
        self._compiles, self._compiled_at = 0.0, -float("inf")
        self._looked_at = 0.0

    def look(self, now: float) -> Sample:
        """Return the worker's activity `now`, in seconds in which the watchdog was awake."""
        frames = sys._current_frames()
        threads = self._status.threads
        for thread in [thread for thread in list(threads) if thread not in frames]:
            threads.pop(thread)
        activities = {thread: _activity(frame) for thread, frame in frames.items()}
        compiles = "compiling" in activities.values()  # in any thread: the others may wait for it
        self._compiles = self._compiles + now - self._looked_at if compiles else 0.0
        self._compiled_at, self._looked_at = now if compiles else self._compiled_at, now
        self._runs = self._running(activities, now)
        # A program that runs concurrently with its thread started before the one that the thread is in.
        run = min(self._runs.values(), key=lambda run: (run.token is None, run.number), default=None)
        waiting, running = self._status.waiting, self._status.home if run is None else run.thread
        self._status.shown = running if waiting is None else waiting.thread
        if run is not None and not run.is_described and now - run.began >= PATIENCE:
            run.describe(self._status)
        return Sample(run, self._compiles, now - self._compiled_at)

    def _running(self, activities: Mapping[int, str | None], now: float) -> dict[tuple[int, ...], Run]:
        """Return the current runs: of programs that threads are in, by their tokens meanwhile, and of those that run
        concurrently with their threads, by their own token."""
        runs = {key: run for key, run in self._runs.items() if run.token is not None}
        for thread in list(self._status.threads) or [threading.main_thread().ident or 0]:
            record = self._status.threads.get(thread)
            tokens = [] if record is None else record.programs()
            if activities.get(thread) == "executing":
                key = (thread, *map(id, tokens))
                runs[key] = self._runs.get(key) or self._new_run(now, thread, None, tokens)
            for token in tokens:
                if (0, id(token)) not in runs:
                    runs[0, id(token)] = self._new_run(now, thread, token, [])
        return {key: run for key, run in runs.items() if run.token is None or is_pending(run.token, False)}

    def _new_run(self, now: float, thread: int, token: Any, tokens: list[Any]) -> Run:
        self._number += 1
        return Run(self._number, now, thread, token, tokens)


def _activity(innermost: FrameType) -> str | None:
    code = innermost.f_code
    is_run = code.co_filename == _JIT and code.co_name == _RUN  # functions called from C++ have no frame
    return "executing" if is_run else activity(innermost)


@cache
def _stack_file() -> tuple[int, os.stat_result] | None:
    """Open the file for stacks, once: later there may be no descriptor left. It is closed by the end of the process."""
    try:
        descriptor = os.memfd_create("stacks")
    except (AttributeError, OSError):
        try:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        except OSError:
            return None
    return descriptor, os.fstat(descriptor)


def prepare_to_write_stacks() -> None:
    """Open the required file."""
    _stack_file()


_writing_stacks = threading.Lock()


def main_stack() -> list[Line]:
    """Return the stack of the calling thread, the innermost line first; safe while it runs.

    It is the main thread's if none has made calls or it has ended; empty if it can't be written.
    """
    if (file := _stack_file()) is None:
        return []
    descriptor, opened = file
    with _writing_stacks:
        try:
            if not os.path.samestat(os.fstat(descriptor), opened):  # the program has closed it: a file of its own
                return []
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            faulthandler.dump_traceback(descriptor, all_threads=True)
            text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
        except (OSError, ValueError):
            return []
    threads = re.split(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*\n", text, flags=re.M)
    stacks = {int(ident, 16): lines for ident, lines in zip(threads[1::2], threads[2::2], strict=False)}
    idents = (worker_status().shown, threading.main_thread().ident or 0)
    lines = next((stacks[ident] for ident in idents if ident in stacks), "")
    found = [Line(*found) for found in re.findall(r'^  File "(.*)", line (\S+) in (.*)$', lines, re.M)]
    return found or _innermost_line(idents)


def _innermost_line(idents: Iterable[int]) -> list[Line]:
    """Return the innermost line of the first of these threads in Python; `faulthandler` writes at most 100 threads."""
    frames = sys._current_frames()
    frame = next((frames[ident] for ident in idents if ident in frames), None)
    return [] if frame is None else [Line(frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name)]


def runs_own_program(stack: list[Line]) -> bool:
    """Return whether a stack is in the program of the called checked function, not in one inside its trace.

    In the former case no frames of other code are between the two.
    """
    if not stack or not (stack[0].file == _JIT or stack[0].file.endswith("jax/_src/interpreters/pxla.py")):
        return False
    for place, line in enumerate(stack):
        if line.file == _JIT:
            functions = [further.function for further in stack[place:] if further.file == _JIT]
            return functions in (["__call__"], [_RUN, "__call__"])
        if not line.file.startswith(_OF_JAX):
            return False
    return False


def user_frames(stack: list[Line]) -> list[Line]:
    """Return the lines outside libraries; all of them if there are none."""
    return [line for line in stack if not is_library(line.file)] or stack


def main_line() -> str:
    """Return the user's line at which the main thread is."""
    stack = user_frames(main_stack())
    lines = [line for line in stack if not is_of_python(line.file)] or stack
    if not lines:  # a main thread that runs no Python is past the program
        return "its end (an exit handler, say)"
    if lines[-1].function == "_shutdown" and is_of_python(lines[-1].file):
        others = [thread.name for thread in threading.enumerate() if not thread.daemon]
        names = ", ".join(name for name in others if name != threading.main_thread().name)
        return f"its end, where it waits for its threads ({names})"
    return str(lines[0])


def stack_text(stack: list[Line]) -> str:
    """Return a stack as Python prints it, the innermost line last."""
    return "".join(f'  File "{line.file}", line {line.number}, in {line.function}\n' for line in reversed(stack))
