"""The activity of a worker, written by the threads that run its program and read by its watchdog.

Each thread has one record. A training step pays next to nothing for it: each field is written in one step.

| what the thread does                        | call  | log                  | traces | waiting | counts            |
|---------------------------------------------|-------|----------------------|--------|---------|-------------------|
| calls a checked function                    | name  | None, if not known   | no     | None    | begins in the log |
| traces it                                   | name  | as before            | yes    | None    |                   |
| agrees with others on something             | any   | as before            | any    | set     |                   |
| has agreed with all on the function's plan  | name  | of the plan's world  | yes    | None    | passed in the log |
| returns                                     | ""    | None                 | no     | None    | ends in the log   |
| raises, before it has told others anything  | ""    | None                 | no     | None    | undone in the log |

A nested call is part of the outer one.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from distdl_jax.jax_compat import dispatched_by_this_thread
from distdl_jax.watchdog.watch.call_log import REMEMBERED, CallLog

MOST_OF_AN_ERROR = 2000
"""The number of characters of an error that are sent to the other workers."""

RUNS_REMEMBERED = 8
"""The number of dispatched programs whose calls are stored."""


class AgreementChannel(Protocol):
    """Where a waiting worker looks for messages, its watchdog, and the numbers of sent and received messages."""

    monitor: Any

    @property
    def sent(self) -> Mapping[int, int]:
        """To each other worker."""

    @property
    def received(self) -> Mapping[int, int]:
        """From each other worker."""


@dataclass(frozen=True)
class Waiting:
    """An agreement in which the worker takes part: its number, its channel (None before there is one), its label, the
    source line, the workers for which it still waits (by rank in COMM_WORLD, if there is no channel yet), and the
    thread."""

    number: int
    channel: AgreementChannel | None
    label: str
    where: str
    waits_for: tuple[int, ...]
    thread: int


class Dispatched(NamedTuple):
    """The tokens of a call's programs; the call, by its number in a world (None: not counted); the function's name."""

    buffers: list[Any]
    log: CallLog | None
    number: int
    name: str


@dataclass(eq=False)
class ThreadRecord:
    """The activity of one thread.

    - `thread`: its number. `programs`: tokens of the programs that it has dispatched.
    - `call`: the current checked function, "" outside. `log`: where the call counts; None if not known.
    - `traces`: whether it is tracing the function. `failure`: why a trace of it failed; empty if none has in the call.
    - `waiting`: its current agreement.
    - `worlds`: the worlds whose partitions it has used; None if not requested.
    - `before`: the tokens of its programs when its last call started, or ended.
    """

    thread: int
    programs: Callable[[], list[Any]]
    call: str = ""
    log: CallLog | None = None
    traces: bool = False
    failure: str = ""
    waiting: Waiting | None = None
    worlds: list[Any] | None = None
    before: list[Any] = field(default_factory=list)


class WorkerStatus:
    """The state of one worker.

    - `rank`, `size`: its number among the workers that were launched together, and their total. If not given, MPI's for
      COMM_WORLD, once MPI has started.
    - `threads`: the records of the threads that have made calls: agreements, or checked functions.
    - `calls`: the last calls of checked functions that it has started, as number and name.
    - `home`: the thread that last agreed with others, or made a call that counts. `shown`: the thread whose stack is
      reported.
    - `mixed`: whether it has run communicating programs outside calls that count.
    - `dispatched`: the programs of the last completed calls, which may still run.
    """

    def __init__(self, rank: int | None = None, size: int | None = None) -> None:
        self._rank = rank
        self._size = size
        self._local = threading.local()
        self.threads: dict[int, ThreadRecord] = {}
        self.calls: deque[tuple[int, str]] = deque([(0, "")], maxlen=REMEMBERED)
        self.home = self.shown = 0
        self.mixed = False
        self.dispatched: deque[Dispatched] = deque(maxlen=RUNS_REMEMBERED)
        self._agreements = 0

    @property
    def rank(self) -> int:
        """This worker's number."""
        return _mpi_rank_and_size()[0] if self._rank is None else self._rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return _mpi_rank_and_size()[1] if self._size is None else self._size

    @property
    def here(self) -> ThreadRecord:
        """The record of this thread."""
        if (record := getattr(self._local, "record", None)) is None:
            record = self._local.record = ThreadRecord(threading.get_ident(), dispatched_by_this_thread())
        return record

    @property
    def in_call(self) -> bool:
        """Whether a thread is in a call of a checked function."""
        return any(record.call for record in list(self.threads.values()))

    @property
    def tracing(self) -> bool:
        """Whether a thread is tracing a checked function that it calls."""
        return any(record.call and record.traces for record in list(self.threads.values()))

    @property
    def waiting(self) -> Waiting | None:
        """The current agreement of the worker, None outside: in several threads, the first one."""
        waits = (record.waiting for record in list(self.threads.values()))
        return min((wait for wait in waits if wait is not None), key=lambda wait: wait.number, default=None)

    @property
    def is_beside_the_program(self) -> bool:
        """Whether this thread is not the program's main one, in a process of one worker."""
        return self is _of_process and threading.current_thread() is not threading.main_thread()

    def is_called_here(self) -> ThreadRecord:
        """Record that this thread makes calls, so that it is sampled from now on; return its record."""
        record = self.here
        if self.threads.get(record.thread) is not record:
            self.threads[record.thread] = record
        return record

    def uses(self, world: Any) -> None:
        """Record that the worker's activity concerns partitions of this world."""
        if (worlds := self.here.worlds) is not None:
            worlds.append(world)

    def run_of(self, token: Any) -> Dispatched | None:
        """Return the run of a call's program with this token; None if that is not known."""
        # The first that has it: later calls that have dispatched nothing have the same.
        return next((run for run in list(self.dispatched) if any(token is buffer for buffer in run.buffers)), None)

    def tokens_pending(self) -> bool:
        """Return whether a communicating program runs concurrently with the threads that make calls."""
        records = list(self.threads.values())
        return any(is_pending(buffer, True) for record in records for buffer in record.programs())

    # --- transitions ---

    @contextmanager
    def agreeing(
        self, channel: AgreementChannel | None, label: str, where: str, waits_for: tuple[int, ...]
    ) -> Iterator[None]:
        """Record that the worker waits for others to agree on something."""
        here = self.is_called_here()
        self.home = here.thread
        self._agreements += 1
        outer, here.waiting = here.waiting, Waiting(self._agreements, channel, label, where, waits_for, here.thread)
        try:
            yield
        finally:
            here.waiting = outer

    def still_waits_for(self, workers: tuple[int, ...]) -> None:
        """Record the workers for which it still waits."""
        if (waiting := self.here.waiting) is not None:
            self.here.waiting = replace(waiting, waits_for=workers)

    @contextmanager
    def call(self, name: str, log: CallLog | None = None) -> Iterator[None]:
        """Record the call of a checked function; nested calls are part of it.

        `log`: of the world in which the function is known to communicate.
        """
        others = [record.log for record in list(self.threads.values())]
        # Of two concurrent calls that count in one world, in two threads, one is enough.
        if self.here.call or (log is not None and any(log is other for other in others)):
            yield
            return
        here, agreements = self._begin_call(name, log), self._agreements
        try:
            yield
        except BaseException:
            self._end_call(here, completed=False, has_told=self._agreements != agreements)
            raise
        self._end_call(here, completed=True, has_told=True)

    def _begin_call(self, name: str, log: CallLog | None) -> ThreadRecord:
        here = self.is_called_here()
        self._note_programs(here)
        here.log = log  # before anything tells that the worker is in it, or has been
        here.call, here.failure = name, ""
        self.calls.append((self.calls[-1][0] + 1, name))
        if log is not None:
            self.home = here.thread
            log.begin(name)
        return here

    def _end_call(self, here: ThreadRecord, completed: bool, has_told: bool) -> None:
        log, before = here.log, here.before
        number = 0 if log is None else log.number
        self._note_programs(here, are_counted=log is not None)  # of an uncounted call, which others may have skipped
        self.dispatched.append(Dispatched(here.before, log, number, here.call))
        if log is not None:
            if has_told or list(map(id, before)) != list(map(id, here.before)):
                if here.failure and not completed:  # the caller may catch it, but others may run what they compiled
                    log.cannot_run(here.failure)
                log.end(completed)
            else:
                log.undo()
        here.call, here.log = "", None

    def _note_programs(self, here: ThreadRecord, are_counted: bool = False) -> None:
        """Record the programs that this thread has dispatched; whether there are new ones, unless they are counted."""
        last, here.before = here.before, here.programs()
        new = any(all(token is not other for other in last) for token in here.before)
        self.mixed = self.mixed or (new and not are_counted)

    def agreed_on(self, log: CallLog, number: int, name: str) -> None:
        """Record that all workers of a world have agreed on the plan of this thread's call."""
        here = self.here
        if here.call:
            log.agree(number, name)
            if here.log is not None and here.log is not log:
                here.log.cannot_compare()
            here.log = log

    def cannot_run(self, error: Exception) -> None:
        """Record that the program of this thread's call will never run, although all have agreed on its plan."""
        if (log := self.here.log) is not None:
            log.cannot_run(error_text(error))

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Record that this thread is tracing the function that it calls; without effect if it calls none."""
        here = self.here
        outer, here.traces = here.traces, True
        if here.log is not None:
            here.log.tracing = True
        try:
            yield
        except Exception as error:
            here.failure = error_text(error)
            raise
        finally:
            here.traces = outer
            if here.log is not None:
                here.log.tracing = False


def error_text(error: Exception) -> str:
    """Return the class of an error and its text, shortened for messages."""
    return f"{type(error).__name__}: {error}"[:MOST_OF_AN_ERROR]


def is_pending(token: Any, unknown: bool) -> bool:
    """Return whether the program with this token is running, and `unknown` if JAX can't tell.

    The query occasionally opens a file (jaxlib's random numbers), and a worker may have no descriptor left.
    """
    try:
        return not token.is_deleted() and not token.is_ready()
    except Exception:
        return unknown


_of_process = WorkerStatus()
_acting: ContextVar[WorkerStatus] = ContextVar("worker_status", default=_of_process)


def worker_status() -> WorkerStatus:
    """Return the status of the worker for which this thread acts; outside `acting_as`, the process's own."""
    return _acting.get()


@contextmanager
def acting_as(status: WorkerStatus) -> Iterator[None]:
    """Inside, this thread is a separate worker, one of several in this process."""
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
