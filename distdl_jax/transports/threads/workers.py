"""The threads of a simulated world: started, watched and ended together."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import jax

from distdl_jax.transports.threads.current_world import one_more_runs, simulated_world
from distdl_jax.transports.threads.devices import give_back, take_devices, threads_of_each
from distdl_jax.transports.threads.parsing import one_parses_at_a_time
from distdl_jax.transports.threads.rendezvous import Rendezvous, WorkerStopped
from distdl_jax.transports.threads.world import InProcessWorld
from distdl_jax.watchdog.status import acting_as

TURN = 0.2
"""Seconds between two looks for an interrupt."""

GRACE = 0.5
"""Seconds in which a worker that is to stop may come to an operation, and end there, before Python interrupts it."""

PATIENCE = 5.0
"""Seconds after which a worker that is to stop, but is in a long call outside Python, is left behind; it ends then."""

STACK = 64 * 2**20
"""Bytes of a worker's stack. JAX and XLA recurse deeply, and some systems give threads much less than the main one."""


class Workers:
    """The workers of one world. They run programs, one after the other, until one fails; `close` in the end."""

    def __init__(self, size: int) -> None:
        self._rendezvous = Rendezvous(size)
        self._worlds = [InProcessWorld(rank, self._rendezvous) for rank in range(size)]
        self._cores = threads_of_each(size)
        self._devices = take_devices(size, self._cores)
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._running: dict[int, threading.Thread] = {}
        self._results: list[Any] = []
        self._error: BaseException | None = None
        self._others_fault = False  # whether that error says no more than that workers can't go on

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `program(*args)` on each worker and return the results; raise the first error of any, when all have
        ended.
        """
        with one_parses_at_a_time(), one_more_runs():
            return self._run(program, args)

    def _run(self, program: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        self._results = [None] * len(self._worlds)
        self._rendezvous.begin()
        try:
            self._start(program, args)
            with self._changed:
                # In turns: a signal that another thread takes, or none but Python has heard of, does not end a wait.
                while not self._changed.wait_for(lambda: not self._running or self._error is not None, TURN):
                    pass
        except BaseException:
            self._stop("the run was interrupted")
            raise
        if self._error is not None:
            self._stop("another worker has failed")
            self._join()
            raise self._error
        self._join()
        return self._results

    def close(self) -> None:
        """Let others use the devices."""
        if not self._running:
            give_back(self._devices, self._cores)
            self._devices = []

    def _start(self, program: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._threads = []
        before = threading.stack_size(STACK)
        try:
            with self._changed:
                for rank, world in enumerate(self._worlds):
                    name = f"worker {rank} of {world.size}"
                    thread = threading.Thread(target=self._work, args=(rank, program, args), name=name, daemon=True)
                    self._running[rank] = thread
                    self._threads.append(thread)
                    thread.start()
        finally:
            threading.stack_size(before)

    def _work(self, rank: int, program: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Run one worker's thread."""
        party = self._rendezvous.parties[rank]
        party.thread = threading.get_ident()
        error: BaseException | None = None
        try:
            with (
                acting_as(party.status),
                simulated_world(self._worlds[rank]),
                jax.default_device(self._devices[rank]),
            ):
                self._results[rank] = _result_or_exit(program, args)
                # What waits for data of another device runs later, in another thread: it is part of the program, too.
                jax.effects_barrier()
            self._rendezvous.leave(rank)
        except BaseException as raised:
            error = party.raised if _is_caused_by(raised, party.raised) else raised
        with self._changed:
            del self._running[rank]
            # What a worker raises by itself says more than that the others can't go on, which they may know before it.
            is_first = self._error is None or (self._others_fault and error is not party.raised)
            if error is not None and is_first and not isinstance(error, WorkerStopped):
                error.add_note(f"Raised on worker {rank} of {len(self._worlds)}, in dj.simulate.")
                self._error, self._others_fault = error, error is party.raised
            self._changed.notify_all()

    def _stop(self, reason: str) -> None:
        """End all workers: those that wait at once, the others where they next communicate, or where Python is."""
        self._rendezvous.stop(reason)
        if self._ended_within(GRACE):
            return
        start = monotonic()
        while not self._ended_within(GRACE) and monotonic() - start < PATIENCE:
            with self._changed:
                for thread in self._running.values():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(WorkerStopped)
                    )

    def _join(self) -> None:
        """Wait for those that have ended: a thread that is on its last lines when Python ends can end it badly."""
        with self._changed:
            ended = [thread for thread in self._threads if thread not in self._running.values()]
        for thread in ended:
            thread.join()

    def _ended_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout=seconds)


def _result_or_exit(program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return what `program(*args)` returns; None where it exits with success, which ends a worker as a return does."""
    try:
        return program(*args)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        return None


def _is_caused_by(error: BaseException, raised: BaseException | None) -> bool:
    """Return whether an error of a compiled program (of C++, a ValueError) is what its operation raised."""
    return (
        raised is not None and isinstance(error, jax.errors.JaxRuntimeError | ValueError) and str(raised) in str(error)
    )
