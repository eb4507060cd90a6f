"""What a worker is doing, written by the thread that runs its program and read by its watchdog.

Plain attributes, written in one step each, so that a training step pays next to nothing for them.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, NamedTuple, Protocol

from distdl_jax.compat import dispatched_by_this_thread
from distdl_jax.watchdog.call_log import REMEMBERED, CallLog

RUNS_REMEMBERED = 8
"""Of how many programs that were dispatched the calls are remembered."""


class Channel(Protocol):
    """Where a waiting worker looks for messages, what watches over it, and how many have been sent and received."""

    monitor: Any

    @property
    def sent(self) -> Mapping[int, int]:
        """To each other worker."""

    @property
    def received(self) -> Mapping[int, int]:
        """From each other worker."""


@dataclass(frozen=True)
class Waiting:
    """An agreement that the worker takes part in: its number, over which channel (None before there is one), for what
    label, from which source line, for which workers it still waits (by rank in COMM_WORLD, where there is no channel
    yet), since when, and in which thread."""

    number: int
    channel: Channel | None
    label: str
    where: str
    waits_for: tuple[int, ...]
    since: float
    thread: int


class Dispatched(NamedTuple):
    """What tells how far the program of a call is; of which call, by its number in which world (None: it does not
    count); and the function's name."""

    buffers: list[Any]
    log: CallLog | None
    number: int
    name: str


@dataclass
class Call:
    """A call of a checked function that a thread is in: of which, where it counts (None where that is not known yet),
    and whether it is traced."""

    name: str
    log: CallLog | None
    tracing: bool = False


class _OfThread(threading.local):
    """What each thread has for itself: whether it traces a checked function, which worlds it uses (None where nobody
    wants to know), and the tokens of its last call that is over."""

    def __init__(self) -> None:
        self.traces = False
        self.worlds: list[Any] | None = None
        self.before: list[Any] = []


class WorkerStatus:
    """The state of one worker.

    - `rank`, `size`: its number among the workers that were launched together, and how many they are. If not given,
      those of MPI's COMM_WORLD, once MPI has started.
    - `calls`: the last calls of checked functions that it has begun, as number and name.
    - `in_call`, `tracing`: whether a thread is in such a call now, and whether one traces it.
    - `log`: where the call counts that began first; None where that is not known yet.
    - `thread`: the one that has called last: agreements, and checked functions. `callers`: of all threads that have
      called, what tells how far their programs are. `home`: the one that has agreed with others last, or made a call
      that counts. `shown`: whose stack is reported.
    - `traces_here`: whether this thread traces a checked function.
    - `worlds`: where somebody wants to know them, the worlds whose partitions this thread has used.
    - `mixed`: whether it has run programs that communicate outside calls that count.
    - `dispatched`: of the last calls that are over, their programs, which may go on.
    """

    def __init__(self, rank: int | None = None, size: int | None = None) -> None:
        self._rank = rank
        self._size = size
        self._waiting: dict[int, Waiting] = {}
        self.calls: deque[tuple[int, str]] = deque([(0, "")], maxlen=REMEMBERED)
        self.thread = self.home = self.shown = 0
        self.callers: dict[int, Callable[[], list[Any]]] = {}
        self.mixed = False
        self.dispatched: deque[Dispatched] = deque(maxlen=RUNS_REMEMBERED)
        self._agreements = 0
        self._open: dict[int, Call] = {}
        self._here = _OfThread()

    @property
    def rank(self) -> int:
        """This worker's number."""
        return _mpi_rank_and_size()[0] if self._rank is None else self._rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return _mpi_rank_and_size()[1] if self._size is None else self._size

    @property
    def in_call(self) -> bool:
        return bool(self._open)

    @property
    def tracing(self) -> bool:
        return any(call.tracing for call in list(self._open.values()))

    @property
    def log(self) -> CallLog | None:
        return next((call.log for call in list(self._open.values())), None)

    @property
    def traces_here(self) -> bool:
        return self._here.traces

    @property
    def worlds(self) -> list[Any] | None:
        return self._here.worlds

    @worlds.setter
    def worlds(self, worlds: list[Any] | None) -> None:
        self._here.worlds = worlds

    @property
    def is_beside_the_program(self) -> bool:
        """Whether this thread is another one than the program's main one, in a process that is one worker."""
        return self is _of_process and threading.current_thread() is not threading.main_thread()

    def call_of(self, thread: int) -> Call | None:
        """Return the call that a thread is in."""
        return self._open.get(thread)

    @property
    def waiting(self) -> Waiting | None:
        """The agreement that the worker is in, None outside: in several threads, that which began first."""
        return min(list(self._waiting.values()), key=lambda waiting: waiting.number, default=None)

    @contextmanager
    def agreeing(self, channel: Channel | None, label: str, where: str, waits_for: tuple[int, ...]) -> Iterator[None]:
        """Record that the worker waits for others to agree on something."""
        self.is_called_here()
        self.home = self.thread
        self._agreements += 1
        thread = threading.get_ident()
        self._waiting[thread] = Waiting(self._agreements, channel, label, where, waits_for, monotonic(), thread)
        try:
            yield
        finally:
            self._waiting.pop(thread, None)

    def still_waits_for(self, workers: tuple[int, ...]) -> None:
        """Record for whom it still waits."""
        if (waiting := self._waiting.get(threading.get_ident())) is not None:
            self._waiting[waiting.thread] = replace(waiting, waits_for=workers)

    def uses(self, world: Any) -> None:
        """Record that what the worker does is about partitions of this world."""
        if self.worlds is not None:
            self.worlds.append(world)

    def is_called_here(self) -> None:
        """Record that this thread calls, so that it is sampled from now on."""
        if self.thread != (thread := threading.get_ident()) or thread not in self.callers:
            if thread not in self.callers:
                self.callers[thread] = dispatched_by_this_thread()
            self.thread = thread

    def run_of(self, token: Any) -> Dispatched | None:
        """Return the run of a call's program that has this token; None where that is not known."""
        # The first that has it: later calls that have dispatched nothing have the same.
        return next((run for run in list(self.dispatched) if any(token is buffer for buffer in run.buffers)), None)

    def tokens_pending(self) -> bool:
        """Return whether a program that communicates goes on beside the threads that call."""
        return any(is_pending(buffer, True) for tokens in list(self.callers.values()) for buffer in tokens())

    @contextmanager
    def call(self, name: str, log: CallLog | None = None) -> Iterator[None]:
        """Record that a checked function is called; calls inside it are part of it.

        `log`: that of the world in which the function is known to communicate.
        """
        thread = threading.get_ident()
        counted = [other.log for other in list(self._open.values()) if other.log is not None]
        if thread in self._open or any(log is other for other in counted):
            yield  # a part of it; or beside one that counts in the same world, in another thread: one needs nobody
            return
        self.is_called_here()
        self.home = thread if log is not None else self.home
        programs = self.callers[thread]
        call = Call(name, log)
        # In this order: who sees the call in the list sees that the worker is in it, or that it has been.
        self._open[thread] = call
        self.calls.append((self.calls[-1][0] + 1, name))
        self._is_mixed(programs())
        if log is not None:
            log.begin(name)
        completed, agreements, tokens = False, self._agreements, programs()
        try:
            yield
            completed = True
        finally:
            shared = completed or self._agreements != agreements or list(map(id, tokens)) != list(map(id, programs()))
            self._end_call(call, completed, shared, programs())
            del self._open[thread]

    def _is_mixed(self, tokens: list[Any]) -> None:
        """Record whether this thread has run something since its last call."""
        last = self._here.before
        self.mixed = self.mixed or any(all(token is not other for other in last) for token in tokens)

    def _end_call(self, call: Call, completed: bool, shared: bool, tokens: list[Any]) -> None:
        if call.log is None:  # others may have skipped it
            self._is_mixed(tokens)
        self._here.before = tokens
        self.dispatched.append(Dispatched(tokens, call.log, call.log.number if call.log else 0, call.name))
        if call.log is not None:
            if shared:
                call.log.end(completed)
            else:
                call.log.undo()

    def agreed_on(self, log: CallLog, number: int, name: str) -> None:
        """Record that all workers of a world have agreed on the plan of this thread's call."""
        if (call := self._open.get(threading.get_ident())) is not None:
            log.agree(number, name)
            if call.log is not None and call.log is not log:
                call.log.cannot_compare()
            call.log = log

    def cannot_run(self, why: str) -> None:
        """Record that the program of this thread's call will never run, though all have agreed on its plan."""
        if (call := self._open.get(threading.get_ident())) is not None and call.log is not None:
            call.log.cannot_run(why)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Record that this thread traces the function that it calls; where it calls none, nothing follows."""
        call = self._open.get(threading.get_ident()) or Call("", None)
        call.tracing = True
        here = self._here
        outer, here.traces = here.traces, True
        if call.log is not None:
            call.log.tracing = True
        try:
            yield
        finally:
            here.traces, call.tracing = outer, False
            if call.log is not None:
                call.log.tracing = False


def is_pending(token: Any, unknown: bool) -> bool:
    """Return whether the program that gives this token goes on, and `unknown` where JAX can't say.

    To ask opens a file now and then (jaxlib's random numbers), and a worker may have no descriptor left.
    """
    try:
        return not token.is_deleted() and not token.is_ready()
    except Exception:
        return unknown


_of_process = WorkerStatus()
_acting: ContextVar[WorkerStatus] = ContextVar("worker_status", default=_of_process)


def worker_status() -> WorkerStatus:
    """Return the status of the worker that this thread acts for; outside `acting_as`, the process's own."""
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
