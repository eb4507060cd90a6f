"""What a worker is doing, written by the thread that runs its program and read by its watchdog.

Plain attributes, written in one step each, so that a training step pays next to nothing for them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Protocol

CALLS_REMEMBERED = 1024
"""Of how many calls of checked functions the names are remembered."""


class Channel(Protocol):
    """Where a waiting worker looks for messages, and what watches over it."""

    monitor: Any

    def has_message(self) -> bool:
        """Whether there is a message that the worker has not looked at."""


@dataclass(frozen=True)
class Waiting:
    """An agreement that the worker takes part in: over which channel (None before there is one), for what purpose, from
    which source line, for which workers it still waits, since when."""

    channel: Channel | None
    purpose: str
    where: str
    waits_for: tuple[int, ...]
    since: float


class WorkerStatus:
    """The state of one worker.

    - `rank`, `size`: its number among the workers that were launched together, and how many they are. If not given,
      those of MPI's COMM_WORLD, once MPI has started.
    - `waiting`: the agreement that it is in; None outside.
    - `calls`: the last calls of checked functions that it has begun, as number and name.
    - `in_call`, `tracing`: whether it is in such a call now, and whether it traces it.
    - `exit_status`: what the process ends with, once it does so by `sys.exit`; 0 before.
    """

    def __init__(self, rank: int | None = None, size: int | None = None) -> None:
        self._rank = rank
        self._size = size
        self.waiting: Waiting | None = None
        self.calls: deque[tuple[int, str]] = deque([(0, "")], maxlen=CALLS_REMEMBERED)
        self.in_call = False
        self.tracing = False
        self.exit_status = 0

    @property
    def rank(self) -> int:
        """This worker's number."""
        return _mpi_rank_and_size()[0] if self._rank is None else self._rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return _mpi_rank_and_size()[1] if self._size is None else self._size

    @contextmanager
    def agreeing(self, channel: Channel | None, purpose: str, where: str, waits_for: tuple[int, ...]) -> Iterator[None]:
        """Record that the worker waits for others to agree on something."""
        self.waiting = Waiting(channel, purpose, where, waits_for, monotonic())
        try:
            yield
        finally:
            self.waiting = None

    def still_waits_for(self, workers: tuple[int, ...]) -> None:
        """Record for whom it still waits."""
        if self.waiting is not None:
            self.waiting = replace(self.waiting, waits_for=workers)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Record that a checked function is called; calls inside it are part of it."""
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


_of_process = WorkerStatus()
_acting: ContextVar[WorkerStatus] = ContextVar("worker_status", default=_of_process)


def worker_status() -> WorkerStatus:
    """The status of the worker that this thread acts for: the process's own, outside `acting_as`."""
    return _acting.get()


@contextmanager
def acting_as(status: WorkerStatus) -> Iterator[None]:
    """Inside, this thread is a worker of its own, one of several in this process."""
    before = _acting.set(status)
    try:
        yield
    finally:
        _acting.reset(before)


def _mpi_rank_and_size() -> tuple[int, int]:
    # Without importing mpi4py, which would start MPI.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return 0, 1
    return mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
