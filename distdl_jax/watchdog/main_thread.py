"""What the thread that calls is doing, seen from another one: whether it is in a compiled program, or compiles one.

The frames of a thread that runs must not be followed from another: it may leave them at any moment, and CPython 3.11
then crashes. So only the innermost one is looked at; a whole stack is written by `faulthandler`, in one go.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple

import jax

from distdl_jax.compat import activity
from distdl_jax.watchdog.source_lines import is_library, is_of_python
from distdl_jax.watchdog.status import WorkerStatus, worker_status

_JIT = str(Path(__file__).parents[1] / "jit.py")
_OF_JAX = str(Path(jax.__file__).parent) + os.sep


@dataclass(frozen=True)
class Sample:
    """What the thread does: the number of the run of a program that goes on (0: none), for how long it has been seen,
    and the token of that run where it goes on beside the thread; whether it compiles, and for how long it has so far.
    """

    run: int = 0
    seconds: float = 0.0
    token: Any = None
    compiles: bool = False
    compiled: float = 0.0


class Line(NamedTuple):
    """One line of a stack."""

    file: str
    number: str
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number} in {self.function}"


class _Mark:
    """What marks a frame as seen: as its trace function, which nothing calls unless the frame is being traced."""

    def __call__(self, *event: Any) -> None:
        return None


class Sampler:
    """Looks from time to time at the thread that calls, or at the main one as long as none has."""

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status
        self._pending: dict[int, tuple[Any, int, float]] = {}
        self._runs = 0
        self._in_call_of_xla: tuple[int, float] | None = None
        self._mark: Any = None
        self._compiled = 0.0
        self._looked_at = 0.0

    def look(self, now: float) -> Sample:
        """What it does `now`, in seconds in which the watch was awake."""
        since, self._looked_at = self._looked_at, now
        frame = sys._current_frames().get(self._status.thread or threading.main_thread().ident or 0)
        kind = None if frame is None else activity(frame)
        if kind == "compiling":
            self._compiled += now - since
        if kind != "executing" or frame is None:
            self._in_call_of_xla = None
        elif self._in_call_of_xla is None or not self._is_marked(frame):
            self._runs += 1
            self._in_call_of_xla = (self._runs, now)
            self._put_mark(frame)
        run, began, token = 0, now, None
        if self._in_call_of_xla is not None:
            run, began = self._in_call_of_xla
        if (pending := self._oldest_pending(now)) is not None:
            token, run, began = pending
        return Sample(run, now - began, token, kind == "compiling", self._compiled)

    def _oldest_pending(self, now: float) -> tuple[Any, int, float] | None:
        """The token, the number and the beginning of a program that communicates and goes on beside the thread."""
        for buffer in self._status.tokens():
            if id(buffer) not in self._pending:
                self._runs += 1
                self._pending[id(buffer)] = (buffer, self._runs, now)
        self._pending = {
            key: (buffer, run, began)
            for key, (buffer, run, began) in self._pending.items()
            if not buffer.is_deleted() and not buffer.is_ready()
        }
        return min(self._pending.values(), key=lambda pending: pending[1], default=None)

    def _put_mark(self, frame: FrameType) -> None:
        # To hold the frame itself would hold the arrays of its call; its address says little, for it is used again.
        if frame.f_trace is None or isinstance(frame.f_trace, _Mark):
            self._mark = frame.f_trace = _Mark()
        else:
            self._mark = id(frame)  # a debugger has it

    def _is_marked(self, frame: FrameType) -> bool:
        return frame.f_trace is self._mark or self._mark == id(frame)


@cache
def _stack_file() -> IO[str] | None:
    """Where stacks are written: opened once, for there may be no descriptor left when it is needed."""
    try:
        return os.fdopen(os.memfd_create("stacks"), "w+")
    except (AttributeError, OSError):
        with suppress(OSError):
            return tempfile.TemporaryFile("w+")
    return None


def prepare_to_write_stacks() -> None:
    """Open what that takes."""
    _stack_file()


_writing_stacks = threading.Lock()


def main_stack() -> list[Line]:
    """The stack of the thread that calls, the innermost line first; safe while it runs. Of the main thread, where none
    has called or it has ended. Empty where that fails."""
    if (file := _stack_file()) is None:
        return []
    with _writing_stacks:
        try:
            file.seek(0)
            file.truncate()
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read()
        except (OSError, ValueError):
            return []
    threads = re.split(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*\n", text, flags=re.M)
    stacks = {int(ident, 16): lines for ident, lines in zip(threads[1::2], threads[2::2], strict=False)}
    lines = stacks.get(worker_status().thread) or stacks.get(threading.main_thread().ident or 0, "")
    return [Line(*found) for found in re.findall(r'^  File "(.*)", line (\S+) in (.*)$', lines, re.M)]


def runs_its_call(stack: list[Line]) -> bool:
    """Whether the program that a stack is in is that of the checked function that is called, not one inside its trace:
    then there is nothing of anybody else's between the two."""
    if not stack or not stack[0].file.endswith("jax/_src/interpreters/pxla.py"):
        return False
    for place, line in enumerate(stack):
        if line.file == _JIT:
            outer = stack[place + 1 :]
            return line.function == "__call__" and not any(further.file == _JIT for further in outer)
        if not line.file.startswith(_OF_JAX):
            return False
    return False


def user_frames(stack: list[Line]) -> list[Line]:
    """The lines outside libraries; all of them where there are none."""
    return [line for line in stack if not is_library(line.file)] or stack


def main_line() -> str:
    """The user's line that the main thread is at."""
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
    """A stack as Python prints it, the innermost line last."""
    return "".join(f'  File "{line.file}", line {line.number}, in {line.function}\n' for line in reversed(stack))
