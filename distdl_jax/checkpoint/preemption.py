"""Preemption: all workers agree on the step after which to save and stop, when a scheduler announces the job's end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from distdl_jax.errors import InvalidTypeError
from distdl_jax.partitions.partition import Partition, check_workers
from distdl_jax.text import quoted
from distdl_jax.transports.open_world import world_of
from distdl_jax.transports.world import World
from distdl_jax.validation import checked_integer
from distdl_jax.watchdog.watch.abort import is_forked

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Tells all workers in the same step that one of them got a termination signal.

    A scheduler announces a job's end seconds or minutes before it kills it: by SIGTERM, or as configured (Slurm:
    `--signal=USR1@120`). The signal may reach only one worker, or all in different steps. With

        with dj.checkpoint.Manager("run") as manager, dj.checkpoint.Preemption() as preemption:
            for step in range(first, last):
                state = train(state)
                if preemption.stop():
                    manager.save(state, specs, step)
                    break

    all save after the same step, and the program ends, with status 0. Inside, the signals have no other effect;
    afterwards their previous effect is restored.

    **Arguments:**

    - `P`: a partition of the workers that call `stop`. Default: all workers.
    - `signals`: the signals.
    - `every`: the calls of `stop` in which the workers communicate: every call, or every n-th, if steps are so short
      that a message for each would matter.

    Signals reach the main thread, so that thread must enter the `with`. In a worker of `dj.simulate`, and in another
    thread, only `request` works.

    **Raises:** `InvalidTypeError`, `InvalidArgumentError` for invalid arguments.

    >>> import distdl_jax as dj
    >>> with dj.checkpoint.Preemption() as preemption:
    ...     before = preemption.stop()
    ...     preemption.request()  # as a signal does
    ...     before, preemption.stop()
    (False, True)
    """

    def __init__(self, P: Partition | None = None, signals: Sequence[signal.Signals] = SIGNALS, every: int = 1) -> None:
        check_workers("P", P)
        if not all(isinstance(number, signal.Signals) for number in signals):
            raise InvalidTypeError(f"`signals` (={quoted(signals)}) must be members of signal.Signals.")
        self._every = checked_integer("every", every, 1)
        self._P = P
        self._signals = tuple(signals)
        self._before: dict[signal.Signals, Any] = {}
        self._requested = False
        self._stops = False
        self._calls = 0

    def request(self) -> None:
        """Request the end, on this worker, like a signal."""
        self._requested = True

    def stop(self) -> bool:
        """Return whether to stop: whether any worker got a signal before this call. All workers call it, and agree.

        Once it was True it stays so, without an agreement.
        """
        self._calls += 1
        if self._stops or self._calls % self._every:
            return self._stops
        world, team = self._world_and_team()
        requests = world.agree(team, "whether the job is to stop", self._requested)
        self._stops = any(requests.values())
        return self._stops

    def _world_and_team(self) -> tuple[World, tuple[int, ...]]:
        if self._P is not None:
            return self._P.world, self._P.ranks
        world = world_of(())
        assert world is not None
        return world, tuple(range(world.size))

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            with suppress(TypeError):  # one that was not installed by Python
                signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if is_forked():  # e.g. a loader's worker process, which is not a worker of the job
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._requested = True
