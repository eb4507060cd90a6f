"""Times several ways to do the same work in one run, and reports ratios.

The ways take turns, so that a change in the machine's speed meets all of them; a round's time is that of the slowest
worker, and a result is the median of the rounds. Ratios are those of the rounds: their median, and their quartiles.
Absolute times move from hour to hour: compare within a row.

Each worker is bound to a core, in turn: with more workers than cores the system would move them about, and a round
would take up to twice as long where three workers share a core and the fourth has one alone.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.mpi.compat import import_mpi4jax
from jax import Array, lax
from mpi4py import MPI

_comm = MPI.COMM_WORLD.Dup()

PAUSE = 0.1
"""Seconds of rest before each timing: right after a process that keeps all cores busy, ours took 1.3 times as long."""

if hasattr(os, "sched_setaffinity"):  # before JAX starts its threads
    CORES = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {CORES[_comm.rank % len(CORES)]})


# Else memory that the system has yet to hand out, which takes a virtual machine a while, would be timed as well. malloc
# keeps this gibibyte.
np.ones(2**28, np.float32)


def processor() -> str:
    """Return the processor's name, where the system tells it."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _sleep_until_all_are_here() -> None:
    # A worker that waits in an ordinary barrier spins, and takes a core from those that still work.
    request = _comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0005)


@dataclass(frozen=True)
class Way:
    """One way to do the work: `run()` does it `calls` times; `before()` is not part of it.

    - `communication`: the most that a worker sends, if that is known: messages, team operations, bytes.
    """

    name: str
    run: Callable[[], object]
    calls: int = 1
    before: Callable[[], object] = lambda: None
    communication: tuple[int, int, int] | None = None


@dataclass
class Table:
    """The rows of one benchmark; the first way of each row is what the others are compared with.

    - `width`: of the column of names. - `pause`: seconds of rest before each timing.
    - `lasting`: seconds of a timing at least; what takes less is done again and again.
    """

    name: str
    width: int = 44
    pause: float = PAUSE
    lasting: float = 0.0
    rows: list[dict[str, object]] = field(default_factory=list)

    def row(
        self,
        work: str,
        ways: Sequence[Way],
        rounds: int = 9,
        processor: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """Time the ways in turn and print the row on worker 0; `processor` tells seconds of processor time, by way."""
        for way in ways:
            way.before()
            way.run()  # compiles, and touches the buffers
        ways = [self._repeated(way) for way in ways]
        times: dict[str, list[float]] = {way.name: [] for way in ways}
        for _ in dj.progress(range(rounds), label=work, unit="round"):
            for way in ways:
                way.before()
                time.sleep(self.pause)
                times[way.name].append(_timed(way))
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratios = {name: quartiles(values, times[ways[0].name]) for name, values in times.items()}
        worked, sent = processor(), {way.name: way.communication for way in ways if way.communication}
        self.rows.append(
            {
                "work": work,
                "seconds": medians,
                "ratios": ratios,
                "all_seconds": times,
                "processor_seconds": worked,
                "communication": sent,
            }
        )
        if _comm.rank == 0:
            cells = [f"{name} {1e6 * t:9.1f} us {spread_text(ratios[name])}" for name, t in medians.items()]
            if worked:
                least, *others = worked.values()
                told = ", ".join(f"{1e3 * t:.2f}" for t in worked.values())
                cells.append(f"processor ms {told} ({', '.join(f'{t / least:.2f}x' for t in others)})")
            print("  ".join([f"{work:<{self.width}}", *cells]), flush=True)
            for name, (messages, teams, nbytes) in sent.items():
                print(f"    {name}: {messages} messages, {teams} team operations, {nbytes:,} bytes", flush=True)

    def _repeated(self, way: Way) -> Way:
        if not self.lasting:
            return way
        way.before()
        times = max(1, math.ceil(self.lasting / (_timed(way) * way.calls)))

        def run() -> None:
            for _ in range(times):
                way.run()

        return replace(way, run=run, calls=times * way.calls)

    def write(self) -> None:
        """Write the rows, and what they were measured on, as JSON."""
        if _comm.rank == 0:
            path = Path("out/benchmarks") / f"{self.name}-{_comm.size}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            about = {
                "workers": _comm.size,
                "jax": jax.__version__,
                "mpi": MPI.Get_library_version().split("\n")[0],
                "processor": processor(),
            }
            path.write_text(json.dumps({**about, "rows": self.rows}, indent=1))
            print(f"wrote {path}", flush=True)


def _timed(way: Way) -> float:
    """Seconds of one call on the slowest worker."""
    _comm.Barrier()
    start = time.perf_counter()
    way.run()
    seconds = (time.perf_counter() - start) / way.calls
    _sleep_until_all_are_here()
    return _comm.allreduce(seconds, op=MPI.MAX)


def quartiles(seconds: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles of the ratios to the first way, round by round: changes of the machine's speed cancel."""
    ratios = [a / b for a, b in zip(seconds, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return low, middle, high


def spread_text(ratios: tuple[float, float, float]) -> str:
    """Return the median of ratios, and its quartiles, as text."""
    low, middle, high = ratios
    return f"({middle:5.2f}x, {low:.2f} to {high:.2f})"


def in_one_program(
    name: str, function: Callable[..., Array], args: tuple[Any, ...], calls: int, unrolled: bool = False
) -> Way:
    """`calls` applications of `function` to `args`, one after the other, in one jitted program.

    The result goes into a message to nobody, so that it has to be there in full, and each step's arguments depend on
    the step before, so that no work can leave the loop. Neither copies anything. `unrolled`: without a loop, since
    XLA's convolutions are many times slower inside of one on CPU; for one call only, because XLA sees through the
    barriers in the end and does equal work once.
    """

    def step(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Array]]:
        done = [
            import_mpi4jax().sendrecv(y, tie(jnp.zeros(0), y), source=MPI.PROC_NULL, dest=MPI.PROC_NULL, comm=_comm)
            for y in jax.tree.leaves(function(*args))
        ]
        return jax.tree.map(lambda x: tie(x, *done), args), done

    @jax.jit
    def program(*args: Any) -> Any:
        if not unrolled:
            return lax.scan(lambda args, _: (step(args)[0], None), args, None, length=calls)[0]
        for _ in range(calls):
            args, done = step(args)
        return done  # not the arguments, which would be copied

    return Way(name, lambda: jax.block_until_ready(program(*args)), calls)


def one_call(name: str, function: Callable[..., Array], args: tuple[Any, ...], calls: int) -> Way:
    """`calls` calls of the jitted `function`, each waited for."""
    jitted = jax.jit(function)

    def run() -> None:
        for _ in range(calls):
            jax.block_until_ready(jitted(*args))

    return Way(name, run, calls)


def repeated(name: str, function: Callable[[], object], calls: int) -> Way:
    """`calls` calls of a plain Python function."""

    def run() -> None:
        for _ in range(calls):
            function()

    return Way(name, run, calls)
