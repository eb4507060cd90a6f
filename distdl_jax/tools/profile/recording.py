"""Steps under JAX's profiler: when each instruction of a compiled program ran on this worker, by worker 0's clock."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from distdl_jax.errors import SetupError

if TYPE_CHECKING:
    from mpi4py import MPI

_STEP = "distdl_jax.profile step"

WARM_UP = 2
"""The number of preceding steps: the first one compiles."""

QUESTIONS = 50
"""The number of times that the clock is read; the fastest reading is used."""


class Execution(NamedTuple):
    """An executed instruction: its program's name and number, its start and end, in ns."""

    instruction: str
    program: str
    number: int
    start: int
    end: int


class Recording(NamedTuple):
    """The times of all steps, and the executed instructions, ordered by start."""

    steps: tuple[tuple[int, int], ...]
    events: tuple[Execution, ...]

    def moved(self, clock: Callable[[int], int]) -> Recording:
        """Return the recording by another clock."""
        events = (event._replace(start=clock(event.start), end=clock(event.end)) for event in self.events)
        return Recording(tuple((clock(start), clock(end)) for start, end in self.steps), tuple(events))


def record(step: Callable[..., Any], args: tuple[Any, ...], steps: int, comm: MPI.Intracomm) -> Recording:
    """Run steps, and return the recording of the relevant ones; collective in `comm`."""
    before = clock_offset(comm)
    saved, given = jax.tree.map(_copy, args), args
    for _ in range(WARM_UP):
        jax.block_until_ready(step(*given))
        donates = any(map(_is_gone, jax.tree.leaves(given)))
        given = _renewed(given, saved)
    if not donates:
        saved = given
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            comm.Barrier()
            for number in range(steps + 1):
                # The first one absorbs differences between workers at the start.
                with jax.profiler.TraceAnnotation(_STEP) if number else nullcontext():
                    jax.block_until_ready(step(*given))
                given = jax.block_until_ready(_renewed(given, saved))
            comm.Barrier()
        finally:
            jax.profiler.stop_trace()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        recording = _read(jax.profiler.ProfileData.from_file(str(files[-1])))
    after = clock_offset(comm)
    if before == after == 0 or not recording.steps:
        return recording
    first, last = recording.steps[0][0], recording.steps[-1][1]
    # In between, the clocks drift evenly.
    return recording.moved(lambda t: t + before + round((after - before) * (t - first) / max(last - first, 1)))


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


def _is_gone(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _renewed(given: Any, saved: Any) -> Any:
    """Return the arguments, with copies in place of donated ones."""
    return jax.tree.map(lambda leaf, first: _copy(first) if _is_gone(leaf) else leaf, given, saved)


def _read(data: jax.profiler.ProfileData) -> Recording:
    began, steps, events = 0, [], []
    for plane in data.planes:
        began = next((int(value) for name, value in plane.stats if name == "profile_start_time"), began)
        for event in (event for line in plane.lines for event in line.events):
            start, end = int(event.start_ns), int(event.start_ns + event.duration_ns)
            if event.name == _STEP:
                steps.append((start, end))
            elif (stats := dict(event.stats)).get("hlo_op") == event.name:
                program, number = str(stats.get("hlo_module", "")), int(stats.get("program_id", 0))
                events.append(Execution(event.name, program, number, start, end))
    if not began:
        raise SetupError(
            "This JAX's profiler doesn't report its start time, so workers can't be compared by its times."
        )
    events.sort(key=lambda event: (event.start, event.end))
    return Recording(tuple(sorted(steps)), tuple(events)).moved(lambda time: began + time)


def clock_offset(comm: MPI.Intracomm) -> int:
    """Return the ns to add to this host's clock to get worker 0's; collective in `comm`.

    Workers of one host share a clock.
    """
    from mpi4py import MPI

    hosts = comm.allgather(socket.gethostname())
    others = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
    offset = 0
    for rank in others:
        if comm.rank == 0:
            for _ in range(QUESTIONS):
                comm.recv(source=rank)
                comm.send(time.time_ns(), rank)
        elif comm.rank == rank:
            offset = offset_by(lambda: comm.sendrecv(None, 0, source=0, recvtag=MPI.ANY_TAG))
    comm.Barrier()
    return offset


def offset_by(ask: Callable[[], int], clock: Callable[[], int] = time.time_ns) -> int:
    """Return the ns to add to `clock` for the one that `ask` reads, assumed halfway through the call."""
    best, offset = None, 0
    for _ in range(QUESTIONS):
        asked = clock()
        there = ask()
        answered = clock()
        if best is None or answered - asked < best:
            best, offset = answered - asked, there - (asked + answered) // 2
    return offset
