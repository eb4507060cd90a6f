"""Steps under JAX's profiler: when each instruction of a compiled program ran on this worker."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from distdl_jax.errors import SetupError

if TYPE_CHECKING:
    from mpi4py import MPI

_STEP = "distdl_jax.profile step"

WARM_UP = 2
"""How many steps run before: the first one compiles."""

QUESTIONS = 50
"""How often the time is asked for; the answer that took least counts."""


class Event(NamedTuple):
    """An instruction that ran: its program's name and number, when it began and ended, in ns of this host's clock."""

    instruction: str
    program: str
    number: int
    start: int
    end: int


@dataclass(frozen=True)
class Recording:
    """What was recorded: the time of each step, and what ran, in the order in which it began."""

    steps: tuple[tuple[int, int], ...]
    events: tuple[Event, ...]


def record_steps(step: Callable[..., Any], args: tuple[Any, ...], steps: int, comm: Any) -> Recording:
    """Run the steps, and return what was recorded of those that count."""
    saved = jax.tree.map(_copy, args)
    given = args
    for _ in range(WARM_UP):
        jax.block_until_ready(step(*given))
        donated = [_is_gone(leaf) for leaf in jax.tree.leaves(given)]
        given = _renewed(given, saved)
    if not any(donated):
        saved = given

    def run(scope: Callable[[], Any]) -> None:
        nonlocal given
        comm.Barrier()
        for number in range(steps + 1):
            if number == 0:  # it takes up what workers differ by at the start
                jax.block_until_ready(step(*given))
            else:
                with scope():
                    jax.block_until_ready(step(*given))
            given = jax.block_until_ready(_renewed(given, saved))
        comm.Barrier()

    return record(run)


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


def _is_gone(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _renewed(given: Any, saved: Any) -> Any:
    """Return the arguments, with copies in place of those that were donated."""
    return jax.tree.map(lambda leaf, first: _copy(first) if _is_gone(leaf) else leaf, given, saved)


def record(run: Callable[[Callable[[], object]], None]) -> Recording:
    """Run under the profiler, and return what it saw; `run` gets a function that makes the scope of one step."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            run(lambda: jax.profiler.TraceAnnotation(_STEP))
        finally:
            jax.profiler.stop_trace()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(files[-1]))
    return _read(data)


def _read(data: jax.profiler.ProfileData) -> Recording:
    began, steps, events = 0, [], []
    for plane in data.planes:
        for name, value in plane.stats:
            began = int(value) if name == "profile_start_time" else began
        for line in plane.lines:
            for event in line.events:
                start, end = int(event.start_ns), int(event.start_ns + event.duration_ns)
                if event.name == _STEP:
                    steps.append((start, end))
                    continue
                stats = dict(event.stats)
                if stats.get("hlo_op") == event.name:
                    number = int(stats.get("program_id", 0))
                    events.append(Event(event.name, str(stats.get("hlo_module", "")), number, start, end))
    if not began:
        raise SetupError("This JAX's profiler doesn't say when it began, so workers can't be compared by its times.")
    return Recording(
        tuple((began + start, began + end) for start, end in sorted(steps)),
        tuple(
            sorted(
                (event._replace(start=began + event.start, end=began + event.end) for event in events),
                key=lambda event: (event.start, event.end),
            )
        ),
    )


def clock_offset(comm: MPI.Intracomm) -> int:
    """Return the ns to add to this host's clock for that of worker 0; collective in `comm`.

    Workers of one host have one clock.
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
    """Return the ns to add to `clock` for the one that `ask` reads, half of the time after it is called."""
    best, offset = None, 0
    for _ in range(QUESTIONS):
        asked = clock()
        there = ask()
        answered = clock()
        if best is None or answered - asked < best:
            best, offset = answered - asked, there - (asked + answered) // 2
    return offset


def on_clock(recording: Recording, before: int, after: int) -> Recording:
    """Return the recording on the clock of worker 0, to which this one's moved evenly from `before` to `after`."""
    if before == after == 0 or not recording.steps:
        return recording
    first, last = recording.steps[0][0], recording.steps[-1][1]

    def there(time: int) -> int:
        return time + before + round((after - before) * (time - first) / max(last - first, 1))

    return Recording(
        tuple((there(start), there(end)) for start, end in recording.steps),
        tuple(event._replace(start=there(event.start), end=there(event.end)) for event in recording.events),
    )
