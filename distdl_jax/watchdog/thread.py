"""The thread that runs the watches of all worlds of this process, and what happens when the program ends."""

from __future__ import annotations

import atexit
import sys
import threading
from time import monotonic
from typing import TYPE_CHECKING

import jax
from mpi4py import MPI

from distdl_jax.errors import ONE_PROGRAM
from distdl_jax.watchdog.abort import end_the_job, turn_lock
from distdl_jax.watchdog.exit_hooks import handle_pending_signals
from distdl_jax.watchdog.log import log
from distdl_jax.watchdog.main_thread import Sampler
from distdl_jax.watchdog.status import worker_status

if TYPE_CHECKING:
    from distdl_jax.watchdog.reporter import Watch

PAUSE = 0.05
"""Seconds between two looks."""


class Watchman:
    """Goes from watch to watch."""

    def __init__(self) -> None:
        self._watches: list[Watch] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._limit = 0.0

    def add(self, watch: Watch) -> None:
        """Look after one more watch, from now on until the program ends."""
        self._watches = [*self._watches, watch]

    def begin(self, limit: float) -> None:
        """Begin to look; `limit` is the clock's, in seconds, as long as there is no watch that keeps it."""
        self._limit = limit
        if self._thread is None:
            self._thread = threading.Thread(target=self._walk, args=(Sampler(),), name="distdl_jax watch", daemon=True)
            self._thread.start()
            # After everything that others register later, before MPI is finalised.
            atexit.register(self._leave)

    def _walk(self, sampler: Sampler) -> None:
        while not self._stop.wait(PAUSE):
            handle_pending_signals()
            if MPI.Is_finalized():
                return
            sample = sampler.look()
            if not self._watches:
                self._look_at_the_clock()
            with turn_lock:
                for watch in self._watches:
                    try:
                        watch.turn(sample)
                    except Exception:
                        log.exception("The watch failed; the program goes on without it.")
                        return

    def _look_at_the_clock(self) -> None:
        waiting = worker_status.waiting
        if self._limit and waiting is not None and monotonic() - waiting.since > self._limit:
            end_the_job(
                f"A worker has waited for {self._limit:.0f} s (DISTDL_JAX_TIMEOUT, in seconds; 0 turns it off), at "
                f"{waiting.where}, for others to come to {waiting.purpose}. {ONE_PROGRAM}\n"
            )

    def _leave(self) -> None:
        if MPI.Is_finalized():
            return
        try:
            jax.effects_barrier()  # what is still under way may need the others
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        for watch in self._watches:
            watch.leave(worker_status.exit_status)
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


watchman = Watchman()
