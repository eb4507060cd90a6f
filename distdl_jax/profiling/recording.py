"""Steps under JAX's profiler: when each instruction of a compiled program ran on this worker."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax

from distdl_jax.errors import SetupError

_STEP = "distdl_jax.profile step"


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
