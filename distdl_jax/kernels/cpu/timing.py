"""Times of programs that compute the same, on this machine, now; and the machine's name."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np

log = logging.getLogger("distdl_jax")

FEWEST_ROUNDS, MOST_ROUNDS = 3, 10
"""How often each program is timed, after the first time."""

HOPELESS = 4.0, 0.1
"""A program that takes so many times as long as another one, and so many seconds, is timed once."""

LONG_ENOUGH = 0.02
"""Seconds for which it is timed if the fewest rounds take less."""

_OF_A_THREAD = 0b110
"""In Linux's numbers of clocks: the last bits for a thread's processor time (CPUCLOCK_PERTHREAD, _SCHED)."""


class Measurement(NamedTuple):
    """The least time of one program, and how many bytes it needs beside arguments and result."""

    seconds: float
    temporaries: int


class Budget:
    """Processor time that may be spent on measuring; what has started is finished."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.process_time() + seconds

    @property
    def is_spent(self) -> bool:
        """Whether nothing else is to start."""
        return time.process_time() >= self._ends


@cache
def processor() -> str:
    """Return the processor's name, where the system tells it."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def threads() -> int:
    """Return with how many threads XLA's CPU client computes."""
    count = os.environ.get("NPROC", "")
    if count.isdigit() and int(count) > 0:
        return int(count)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """Return all that a time depends on besides the program: processor, XLA's threads and flags, and jaxlib."""
    flags = " ".join(sorted(set(os.environ.get("XLA_FLAGS", "").split())))
    return f"{processor()}, threads {threads()}, jaxlib {jaxlib.__version__}{f', {flags}' if flags else ''}"


def processor_time(work: Callable[[], object]) -> float:
    """Return the seconds of processor time, in all threads of this process, that `work()` takes.

    On Linux thread by thread: of a thread that is running `time.process_time` knows no more than at the system's last
    tick, so that 1 ms of work in XLA's thread may seem to be nothing.
    """
    before = _thread_times()
    work()
    after = _thread_times()
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items())


def _thread_times() -> dict[str, float]:
    """Return the processor time of each thread so far; under one name where the system does not tell them apart."""
    try:
        tasks = os.listdir("/proc/self/task")
    except OSError:
        return {"": time.process_time()}
    found = {}
    for task in tasks:
        with suppress(OSError):  # it has ended meanwhile
            found[task] = time.clock_gettime(~int(task) << 3 | _OF_A_THREAD)
    return found


def _wall_time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(
    functions: Mapping[str, Callable[..., Any]], shapes: Sequence[tuple[int, ...]], dtype: str
) -> dict[str, Measurement]:
    """Measure all functions, taking turns, on arrays of these shapes; {} where that can't be done here.

    It runs in a thread of its own: in this one a function may be being traced, under settings that are its caller's.
    """
    found: dict[str, Measurement] = {}

    def run() -> None:
        try:
            found.update(_measure(functions, shapes, dtype))
        except Exception as error:  # of any kind: the program goes on without
            log.warning("Measuring ways to compute a convolution failed, so none was chosen by it: %s", error)

    thread = threading.Thread(target=run, name="distdl_jax measures", daemon=True)
    thread.start()
    thread.join()
    return found


def _measure(
    functions: Mapping[str, Callable[..., Any]], shapes: Sequence[tuple[int, ...]], dtype: str
) -> dict[str, Measurement]:
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined, unused-ignore]
        return {}
    arguments = [jax.device_put(np.full(shape, 0.5, dtype)) for shape in shapes]
    if any(argument.dtype != dtype for argument in arguments):
        return {}  # float64 in a part of the program only, of which this thread knows nothing
    programs = {name: jax.jit(function).lower(*arguments).compile() for name, function in functions.items()}
    # Other programs' turns on this core do not count, as far as that can be told.
    seconds_of = processor_time if threads() == 1 else _wall_time

    def timed(program: Callable[..., Any]) -> Callable[[], float]:
        return lambda: seconds_of(lambda: jax.block_until_ready(program(*arguments)))

    times = in_turns({name: timed(program) for name, program in programs.items()})
    return {name: Measurement(min(took), _temporaries(programs[name])) for name, took in times.items()}


def in_turns(timed: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Collect the seconds that each call returns, taking turns; calls that are far behind are not made again."""
    # The first time buffers are touched, which takes milliseconds more: it counts where a program is far behind anyhow.
    times = {name: [call()] for name, call in timed.items()}
    best = float("inf")
    for turn in range(MOST_ROUNDS):
        for name, took in sorted(times.items(), key=lambda item: min(item[1])):
            hopeless = len(took) == 1 and took[0] >= max(HOPELESS[0] * best, HOPELESS[1])
            if not hopeless and (turn < FEWEST_ROUNDS or (sum(took) < LONG_ENOUGH and min(took) < 2 * best)):
                took.append(timed[name]())
                best = min(best, took[-1])
    return times


def _temporaries(program: Any) -> int:
    return int(getattr(program.memory_analysis(), "temp_size_in_bytes", 0) or 0)
