"""What this worker is doing, written by its main thread and read by its watch.

Plain attributes, written in one step each, so that a training step pays next to nothing for them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, Protocol

CALLS_REMEMBERED = 1024
"""Of how many calls of checked functions the names are remembered."""

_LIBRARIES = (
    *(
        str(Path(spec.origin).parent) + os.sep
        for name in ("distdl_jax", "jax", "mpi4jax", "mpi4py")
        if (spec := find_spec(name)) and spec.origin
    ),
    *(str(module.__file__) for module in (functools, contextlib, threading)),
)


class Mailbox(Protocol):
    """Where a waiting worker looks for messages, and what watches over it."""

    monitor: Any

    def has_mail(self) -> bool:
        """Whether there is a message that the worker has not looked at."""


@dataclass(frozen=True)
class Waiting:
    """An agreement that the worker takes part in: over which channel (None before there is one), for what purpose, from
    which source line, for which workers it still waits, since when."""

    channel: Mailbox | None
    purpose: str
    where: str
    waits_for: tuple[int, ...]
    since: float


class Status:
    """The state of this process.

    - `waiting`: the agreement that it is in; None outside.
    - `calls`: the last calls of checked functions that it has begun, as number and name.
    - `in_call`, `tracing`: whether it is in such a call now, and whether in its tracing.
    - `exit_status`: what `sys.exit` was last called with; 0 before.
    """

    def __init__(self) -> None:
        self.waiting: Waiting | None = None
        self.calls: deque[tuple[int, str]] = deque([(0, "")], maxlen=CALLS_REMEMBERED)
        self.in_call = False
        self.tracing = False
        self.exit_status = 0

    @contextmanager
    def agreeing(self, channel: Mailbox | None, purpose: str, where: str, waits_for: tuple[int, ...]) -> Iterator[None]:
        """Note that the worker waits for others to agree on something."""
        self.waiting = Waiting(channel, purpose, where, waits_for, monotonic())
        try:
            yield
        finally:
            self.waiting = None

    def still_waits_for(self, workers: tuple[int, ...]) -> None:
        """Note for whom it still waits."""
        if self.waiting is not None:
            self.waiting = replace(self.waiting, waits_for=workers)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Note that a checked function is called; calls inside it are part of it."""
        if self.in_call:
            yield
            return
        # In this order: who sees the call in the list sees that the worker is in it, or that it has been.
        self.in_call = True
        self.calls.append((self.calls[-1][0] + 1, name))
        try:
            yield
        finally:
            self.in_call = self.tracing = False


worker_status = Status()


def user_line() -> str:
    """The source line of the user's program that this thread is at, `train.py:31 in loss`: the innermost outside
    libraries."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def is_library(file_name: str) -> bool:
    """Whether a source file belongs to this library, to those that it stands on, or to Python."""
    return file_name.startswith(_LIBRARIES) or file_name.startswith("<")
