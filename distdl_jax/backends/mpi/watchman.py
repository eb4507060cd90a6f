"""The thread that runs the watches of all worlds of this process, and what happens when the program ends."""

from __future__ import annotations

import atexit
import logging
import threading
from typing import TYPE_CHECKING

import jax

from distdl_jax.backends.mpi.board import board
from distdl_jax.backends.mpi.ending import turn_lock
from distdl_jax.backends.mpi.faults import heed_signals
from distdl_jax.backends.mpi.sampling import Sampler

if TYPE_CHECKING:
    from distdl_jax.backends.mpi.watch import Watch

PAUSE = 0.05
"""Seconds between two looks."""


class Watchman:
    """Goes from watch to watch."""

    def __init__(self) -> None:
        self._watches: list[Watch] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        """Look after one more watch, from now on until the program ends."""
        self._watches = [*self._watches, watch]
        if self._thread is None:
            self._thread = threading.Thread(target=self._walk, args=(Sampler(),), name="distdl_jax watch", daemon=True)
            self._thread.start()
            # After everything that others register later, before MPI is finalised.
            atexit.register(self._leave)

    def _walk(self, sampler: Sampler) -> None:
        while not self._stop.wait(PAUSE):
            heed_signals()
            sample = sampler.look()
            with turn_lock:
                for watch in self._watches:
                    try:
                        watch.turn(sample)
                    except Exception:
                        logging.getLogger("distdl_jax").exception("The watch failed; the program goes on without it.")
                        return

    def _leave(self) -> None:
        jax.effects_barrier()  # what is still under way may need the others
        for watch in self._watches:
            watch.leave(board.exit_status)
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


watchman = Watchman()
