"""The threads of a simulated world, each with its own CPU device: started, watched and ended together."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from time import monotonic
from typing import Any

import jax

from distdl_jax.jax_compat import settings_of_this_thread
from distdl_jax.transports.threads.current_world import one_more_runs, simulated_world
from distdl_jax.transports.threads.rendezvous import Rendezvous, WorkerStopped
from distdl_jax.transports.threads.world import ThreadWorld
from distdl_jax.transports.world import World
from distdl_jax.watchdog.error_text import comparable, error_text, show_own_lines
from distdl_jax.watchdog.launch.said_once import same_text
from distdl_jax.watchdog.watch.abort import say
from distdl_jax.watchdog.watch.status import acting_as

TURN = 0.2
"""Seconds between two checks for an interrupt."""

GRACE = 0.5
"""Seconds in which a worker that is to stop may arrive at an operation, and end there, before Python interrupts it."""

PATIENCE = 5.0
"""Seconds after which a worker that is to stop, but is in a long call outside Python, is abandoned; it ends later."""

STACK = 64 * 2**20
"""Bytes of a worker's stack. JAX and XLA recurse deeply, and some systems give threads little."""

OLD_PYTHON = "Python before 3.11.8 can't parse Python in several threads at once, as np.load does: use a newer one."


class Workers:
    """The workers of one world. They run programs, one after another, until one fails; call `close` at the end.

    - `stands_for`: the world that they represent to trace programs with its partitions, without devices.
    - `each_turn`: called a few times a second while they run.
    """

    def __init__(self, size: int, stands_for: World | None = None, each_turn: Callable[[], None] | None = None) -> None:
        self._each_turn = each_turn or (lambda: None)
        self._rendezvous = Rendezvous(size)
        self._worlds = [ThreadWorld(rank, self._rendezvous, stands_for) for rank in range(size)]
        self._cores = threads_of_each(size)
        self._devices = take_devices(size, self._cores) if stands_for is None else []
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._running: dict[int, threading.Thread] = {}
        self._results: list[Any] = []
        self._errors: dict[int, BaseException] = {}  # by worker, the first one's first

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `program(*args)` on each worker and return the results; raise the first error of any, when all have
        ended.
        """
        with one_more_runs():
            return self._run(program, args)

    def _run(self, program: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        self._results = [None] * len(self._worlds)
        self._rendezvous.begin()
        try:
            self._start(program, args)
            # In short intervals: a signal taken by another thread, or known only to Python, does not end a wait.
            while not self._has_come(lambda: not self._running or bool(self._errors), TURN):
                self._each_turn()
                if line := self._rendezvous.line_about_a_wait():
                    say(line)
        except BaseException:
            self._stop("the run was interrupted", TURN)
            self._join()
            raise
        if self._errors:
            self._stop("another worker has failed", GRACE)
            self._join()
            raise self._one_error()
        self._join()
        return self._results

    def close(self) -> None:
        """Release the devices."""
        if not self._running:
            give_back(self._devices, self._cores)
            self._devices = []

    def _start(self, program: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._threads = []
        settings = settings_of_this_thread()
        before = threading.stack_size(STACK)
        try:
            with self._changed:
                for rank, world in enumerate(self._worlds):
                    name = f"worker {rank} of {world.size}"
                    work = (self._work, rank, program, args, settings)
                    thread = threading.Thread(target=copy_context().run, args=work, name=name, daemon=True)
                    self._running[rank] = thread
                    self._threads.append(thread)
                    thread.start()
        finally:
            threading.stack_size(before)

    def _work(
        self,
        rank: int,
        program: Callable[..., Any],
        args: tuple[Any, ...],
        settings: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Run one worker's thread, with the settings of the thread that starts it."""
        worker = self._rendezvous.workers[rank]
        worker.thread = threading.get_ident()
        error: BaseException | None = None
        try:
            with (
                acting_as(worker.status),
                settings(),
                simulated_world(self._worlds[rank]),
                jax.default_device(self._devices[rank]) if self._devices else nullcontext(),
            ):
                self._results[rank] = _result_or_exit(program, args)
                # Computations on another device's data run later, in another thread: part of the program, too.
                jax.effects_barrier()
            self._rendezvous.leave(rank)
        except BaseException as raised:
            error = worker.raised if _is_caused_by(raised, worker.raised) else raised
        with self._changed:
            del self._running[rank]
            if error is not None and not isinstance(error, WorkerStopped):
                self._errors[rank] = error
            self._changed.notify_all()

    def _one_error(self) -> BaseException:
        """Return the first error, with notes of the workers that have raised it, and of the other errors."""
        with self._changed:
            errors = dict(self._errors)
        # A worker's own error is more informative than the others' that they can't continue, which may come first.
        raised = {rank: worker.raised for rank, worker in enumerate(self._rendezvous.workers)}
        own = {rank: error for rank, error in errors.items() if error is not raised[rank]} or errors
        for error in own.values():
            show_own_lines(error)
        texts = {rank: error_text(error) for rank, error in own.items()}
        by_text: dict[str, list[int]] = {}
        for rank, text in texts.items():
            by_text.setdefault(comparable(text), []).append(rank)
        (first, *same), *different = map(sorted, by_text.values())
        error = own[first]
        error.add_note(f"Raised on worker {first} of {len(self._worlds)}, in dj.simulate. {same_text(same)}".rstrip())
        if isinstance(error, SystemError) and sys.version_info < (3, 11, 8):
            error.add_note(OLD_PYTHON)
        for other, *same in different:
            error.add_note(f"Worker {other} raised another error:\n{texts[other]}{same_text(same)}".rstrip())
        return error

    def _stop(self, reason: str, grace: float) -> None:
        """End all workers: waiting ones immediately, others where they next communicate, or after `grace` seconds
        between two lines of Python.
        """
        end = monotonic() + grace + PATIENCE
        with interrupts_ignored():
            self._rendezvous.stop(reason)
            while not self._ended_within(grace) and monotonic() < end:
                grace = GRACE
                with self._changed:
                    for thread in self._running.values():
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(WorkerStopped)
                        )

    def _join(self) -> None:
        """Wait for those that have ended: a thread in its last lines when Python ends can crash it."""
        with self._changed:
            ended = [thread for thread in self._threads if thread not in self._running.values()]
        for thread in ended:
            thread.join()

    def _ended_within(self, seconds: float) -> bool:
        return self._has_come(lambda: not self._running, seconds)

    def _has_come(self, event: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(event, timeout=seconds)


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Inside, pressing Ctrl-C again has no effect, so that nothing is left half ended."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _result_or_exit(program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the result of `program(*args)`; None if it exits with success, which ends a worker like a return."""
    try:
        return program(*args)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        return None


def _is_caused_by(error: BaseException, raised: BaseException | None) -> bool:
    """Return whether an error of a compiled program (from C++, a ValueError) was raised by its operation."""
    return (
        raised is not None and isinstance(error, jax.errors.JaxRuntimeError | ValueError) and str(raised) in str(error)
    )


def on_stand_ins(world: World, program: Callable[[int], Any]) -> list[Any]:
    """Return the result of `program(rank)` for each worker of `world`, in a thread that represents that worker.

    There the partitions of `world` are that worker's, so layers made outside can be traced as on it. The workers agree
    as in a job; nothing may run.
    """

    def on_worker() -> Any:
        return program(simulated_world.value.rank)

    workers = Workers(world.size, stands_for=world)
    try:
        return workers.run(on_worker)
    finally:
        workers.close()


# --- devices --- Each worker has its own client, which runs programs in the calling thread. On a shared client,
# programs of one worker could occupy resources that others need to continue: a place in the queue, or a thread of the
# pool.

FEWEST = 2
"""The minimum number of threads of a client. A program with inputs copied from elsewhere runs in one of them, and waits
there for other workers; those may in turn wait for a copy that the client has to make."""

_lock = threading.Lock()
_free: dict[int, list[Any]] = defaultdict(list)


def threads_of_each(workers: int) -> int:
    """Return the number of threads with which a worker computes: NPROC, as over MPI, or its share of the cores."""
    return int(os.environ.get("NPROC") or max(1, (os.cpu_count() or 1) // workers))


def take_devices(count: int, threads: int) -> list[Any]:
    """Take `count` free devices, each with `threads`."""
    with _lock:
        free = _free[threads]
        return [free.pop() if free else new_cpu_device(max(threads, FEWEST)) for _ in range(count)]


def new_cpu_device(threads: int) -> jax.Device:
    """Return a CPU device on its own client, which runs programs in the calling thread.

    Private: `jaxlib.xla_client.make_cpu_client`, and that it sizes its pool by NPROC. Replaced by: a public way to make
    a client, or to have a device dispatch synchronously.
    """
    from jaxlib import xla_client

    before = os.environ.get("NPROC")
    os.environ["NPROC"] = str(threads)
    try:
        client: Any = xla_client.make_cpu_client(asynchronous=False)
        device: jax.Device = client.devices()[0]
        return device
    finally:
        if before is None:
            del os.environ["NPROC"]
        else:
            os.environ["NPROC"] = before


def give_back(devices: list[Any], threads: int) -> None:
    """Release them: making a client takes some milliseconds, and it is never freed."""
    with _lock:
        _free[threads].extend(devices)
