"""The thread that gives every reporter of this process its turns, and what happens when the program ends."""

from __future__ import annotations

import atexit
import sys
import threading
from time import monotonic

import jax

from distdl_jax.errors import ONE_PROGRAM
from distdl_jax.watchdog.abort import end_the_job, is_forked, mpi_has_ended, mpi_lock
from distdl_jax.watchdog.exit_hooks import handle_pending_signals
from distdl_jax.watchdog.log import log
from distdl_jax.watchdog.main_thread import Sampler
from distdl_jax.watchdog.reporter import Reporter
from distdl_jax.watchdog.status import WorkerStatus, worker_status

PAUSE = 0.05
"""Seconds between two turns."""


class WatchdogThread:
    """Watches the program of one worker, from the first world that is opened to the end."""

    def __init__(self) -> None:
        self._reporters: list[Reporter] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._limit = 0.0

    def add(self, reporter: Reporter) -> None:
        """Give one more reporter its turns, from now on."""
        self._reporters = [*self._reporters, reporter]

    def begin(self, limit: float) -> None:
        """Begin; `limit` is the clock's, in seconds, as long as there is no reporter that keeps it."""
        self._limit = limit
        if self._thread is None:
            status = worker_status()
            self._thread = threading.Thread(
                target=self._run, args=(Sampler(), status), name="distdl_jax watchdog", daemon=True
            )
            self._thread.start()
            # After everything that others register later, before MPI is finalised.
            atexit.register(self._leave, status)

    def _run(self, sampler: Sampler, status: WorkerStatus) -> None:
        while not self._stop.wait(PAUSE):
            handle_pending_signals()
            if mpi_has_ended():
                return
            sample = sampler.look()
            if not self._reporters:
                self._look_at_the_clock(status)
            with mpi_lock:
                for reporter in self._reporters:
                    try:
                        reporter.turn(sample)
                    except Exception:
                        log.exception("The watchdog failed; the program goes on without it.")
                        return

    def _look_at_the_clock(self, status: WorkerStatus) -> None:
        waiting = status.waiting
        if self._limit and waiting is not None and monotonic() - waiting.since > self._limit:
            end_the_job(
                f"A worker has waited for {self._limit:.0f} s (DISTDL_JAX_TIMEOUT, in seconds; 0 turns it off), at "
                f"{waiting.where}, for others to come to {waiting.purpose}. {ONE_PROGRAM}\n"
            )

    def _leave(self, status: WorkerStatus) -> None:
        if is_forked() or mpi_has_ended():
            return
        try:
            jax.effects_barrier()  # what is still under way may need the others
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        for reporter in self._reporters:
            reporter.leave(status.exit_status)
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


watchdog_thread = WatchdogThread()
"""That of this process."""
