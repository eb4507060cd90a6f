"""Times ways to compute the same, on this machine, now."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np

from distdl_jax.kernels.processor import threads
from distdl_jax.watchdog.log import log

FEWEST_ROUNDS, MOST_ROUNDS = 3, 10
"""How often each way is timed, after the first time."""

HOPELESS = 4.0, 0.1
"""A way that takes so many times as long as another one, and so many seconds, is timed once."""

LONG_ENOUGH = 0.02
"""Seconds for which it is timed if the fewest rounds take less."""

_OF_A_THREAD = 0b110
"""In Linux's numbers of clocks: the last bits of that of a thread's processor time (CPUCLOCK_PERTHREAD, _SCHED)."""


class Measurement(NamedTuple):
    """The least of the times of one way, and how many bytes it needs beside arguments and result."""

    seconds: float
    temporaries: int


class Budget:
    """Processor time that may be spent on measuring; what is begun is brought to an end."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.process_time() + seconds

    @property
    def is_spent(self) -> bool:
        """Whether nothing else is to begin."""
        return time.process_time() >= self._ends


def processor_time(work: Callable[[], object]) -> float:
    """The seconds of processor time, of all threads of this process, that `work()` takes.

    On Linux thread by thread: of a thread that is running `time.process_time` knows no more than at the system's last
    tick, so that 1 ms of work in XLA's thread may seem to be nothing.
    """
    before = _of_threads()
    work()
    after = _of_threads()
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items())


def _of_threads() -> dict[str, float]:
    """The processor time of each thread so far; under one name where the system does not tell them apart."""
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return {"": time.process_time()}
    found = {}
    for thread in threads:
        with suppress(OSError):  # it has ended meanwhile
            found[thread] = time.clock_gettime(~int(thread) << 3 | _OF_A_THREAD)
    return found


def _passed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(
    ways: Mapping[str, Callable[..., Any]], shapes: Sequence[tuple[int, ...]], dtype: str
) -> dict[str, Measurement]:
    """The measurements of all ways, in turns, on arrays of these shapes; none where they can't be made here.

    It runs in a thread of its own: in this one a function may be being traced, under settings that are its caller's.
    """
    found: dict[str, Measurement] = {}

    def run() -> None:
        try:
            found.update(_measure(ways, shapes, dtype))
        except Exception as error:  # of any kind: the program goes on without
            log.warning("Measuring ways to compute a convolution failed, so none was chosen by it: %s", error)

    thread = threading.Thread(target=run, name="distdl_jax measures", daemon=True)
    thread.start()
    thread.join()
    return found


def _measure(
    ways: Mapping[str, Callable[..., Any]], shapes: Sequence[tuple[int, ...]], dtype: str
) -> dict[str, Measurement]:
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined, unused-ignore]
        return {}
    arguments = [jax.device_put(np.full(shape, 0.5, dtype)) for shape in shapes]
    if any(argument.dtype != dtype for argument in arguments):
        return {}  # float64 in a part of the program only, of which this thread knows nothing
    programs = {name: jax.jit(way).lower(*arguments).compile() for name, way in ways.items()}
    # Other programs' turns on this core do not count, as far as that can be told.
    seconds_of = processor_time if threads() == 1 else _passed

    def timed(program: Callable[..., Any]) -> Callable[[], float]:
        return lambda: seconds_of(lambda: jax.block_until_ready(program(*arguments)))

    times = in_turns({name: timed(program) for name, program in programs.items()})
    return {name: Measurement(min(took), _temporaries(programs[name])) for name, took in times.items()}


def in_turns(ways: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """The seconds that each way took, each time; those that are far behind are not asked again."""
    # The first time buffers are touched, which takes milliseconds more: it counts where a way is far behind anyhow.
    times = {name: [way()] for name, way in ways.items()}
    best = float("inf")
    for turn in range(MOST_ROUNDS):
        for name, took in sorted(times.items(), key=lambda way: min(way[1])):
            hopeless = len(took) == 1 and took[0] >= max(HOPELESS[0] * best, HOPELESS[1])
            if not hopeless and (turn < FEWEST_ROUNDS or (sum(took) < LONG_ENOUGH and min(took) < 2 * best)):
                took.append(ways[name]())
                best = min(best, took[-1])
    return times


def _temporaries(program: Any) -> int:
    told = program.memory_analysis()
    return int(getattr(told, "temp_size_in_bytes", 0) or 0)
