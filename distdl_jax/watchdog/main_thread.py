"""What the main thread is doing, seen from another one: whether it is in a compiled program, or compiles one.

The frames of a thread that runs must not be followed from another: it may leave them at any moment, and CPython 3.11
then crashes. So only the innermost one is looked at; a whole stack is written by `faulthandler`, in one go.
"""

from __future__ import annotations

import faulthandler
import re
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple

from distdl_jax.compat import activity, dispatched_by_this_thread
from distdl_jax.watchdog.source_lines import is_library


@dataclass(frozen=True)
class Sample:
    """Seconds for which the main thread has been in one run of a program, or in one compilation."""

    executing_for: float = 0.0
    compiling_for: float = 0.0


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
    """Looks at the main thread from time to time; made in the main thread."""

    def __init__(self) -> None:
        self._dispatched = dispatched_by_this_thread()
        self._pending: dict[int, tuple[Any, float]] = {}
        self._kind: str | None = None
        self._since = 0.0
        self._mark: Any = None

    def look(self) -> Sample:
        """What the main thread does now, and since which of the looks before."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        dispatched_for = self._oldest_pending()
        kind = None if frame is None else activity(frame)
        if kind is None or frame is None:
            self._kind = None
            return Sample(executing_for=dispatched_for)
        if kind != self._kind or not self._is_marked(frame):
            self._kind, self._since = kind, monotonic()
            self._put_mark(frame)
        seconds = monotonic() - self._since
        if kind == "compiling":
            return Sample(compiling_for=seconds)
        return Sample(executing_for=max(seconds, dispatched_for))

    def _oldest_pending(self) -> float:
        """Seconds for which a program that communicates has been under way beside the main thread."""
        now = monotonic()
        for buffer in self._dispatched():
            self._pending.setdefault(id(buffer), (buffer, now))
        self._pending = {
            key: (buffer, since)
            for key, (buffer, since) in self._pending.items()
            if not buffer.is_deleted() and not buffer.is_ready()
        }
        return max((now - since for _, since in self._pending.values()), default=0.0)

    def _put_mark(self, frame: FrameType) -> None:
        # To hold the frame itself would hold the arrays of its call; its address says little, for it is used again.
        if frame.f_trace is None or isinstance(frame.f_trace, _Mark):
            self._mark = frame.f_trace = _Mark()
        else:
            self._mark = id(frame)  # a debugger has it

    def _is_marked(self, frame: FrameType) -> bool:
        return frame.f_trace is self._mark or self._mark == id(frame)


def main_stack() -> list[Line]:
    """The main thread's stack, the innermost line first; safe while it runs."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = re.split(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*\n", file.read(), flags=re.M)
    main = threading.main_thread().ident or 0
    for ident, lines in zip(threads[1::2], threads[2::2], strict=True):
        if int(ident, 16) == main:
            return [Line(*found) for found in re.findall(r'^  File "(.*)", line (\S+) in (.*)$', lines, re.M)]
    return []


def user_frames(stack: list[Line]) -> list[Line]:
    """The lines outside libraries; all of them where there are none."""
    return [line for line in stack if not is_library(line.file)] or stack


def main_line() -> str:
    """The user's line that the main thread is at."""
    lines = user_frames(main_stack())
    return str(lines[0]) if lines else "an unknown line"


def stack_text(stack: list[Line]) -> str:
    """A stack as Python prints it, the innermost line last."""
    return "".join(f'  File "{line.file}", line {line.number}, in {line.function}\n' for line in reversed(stack))
