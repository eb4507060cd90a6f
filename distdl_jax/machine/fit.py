"""The tables of a machine file from measured times: a pure function of the samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from distdl_jax.errors import SetupError
from distdl_jax.machine.places import Places
from distdl_jax.machine.samples import (
    ARRAYS,
    Arithmetic,
    Collective,
    Copied,
    Exchange,
    Message,
    Overhead,
    Overlapped,
    Samples,
    Streamed,
    Subject,
)
from distdl_jax.machine.segments import SHORTEST, fit_segments
from distdl_jax.machine.tables import (
    LEVELS,
    BandwidthPoint,
    Calls,
    CollectivePoint,
    Collectives,
    Compute,
    HiddenPoint,
    Host,
    Level,
    Overlap,
    Quality,
    RatePoint,
    Segment,
)

MOST_DIFFERENCE = 0.2
"""By how much rounds may differ from their median, relative to it."""


def fit_machine(samples: Samples, places: Places, memory: float) -> dict[str, Any]:
    """Return the tables of a machine by name, and its levels.

    - `memory`: bytes of a host.

    **Raises:** `SetupError` where the rounds of what a prediction rests on differ too much.
    """
    check_rounds(samples)
    host = _host(samples, places, memory)
    levels, errors = _levels(samples, host.copy_bandwidth)
    rounds = max(map(len, samples.rounds.values()))
    quality = Quality(
        source=_source(samples, samples.rounds) if rounds > 1 else "guess: of one round only",
        noise=float(np.median([samples.spread(subject) for subject in samples.all_of(Arithmetic)])),
        rounds_differ=float(np.median([samples.difference(subject) for subject in samples.rounds])),
        fit_error=max(errors, default=0.0),
    )
    tables = {
        "host": host,
        "calls": _calls(samples),
        "compute": _compute(samples),
        "collectives": _collectives(samples),
        "overlap": _overlap(samples),
        "quality": quality,
    }
    return {
        **{name: _rounded(table) for name, table in tables.items()},
        "levels": {name: _rounded(level) for name, level in levels.items()},
    }


def _rounded(table: Any) -> Any:
    """Return a table, or a row, whose numbers have four digits: more than are known."""

    def of(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(_rounded(each) if is_dataclass(each) else each for each in value)
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return replace(table, **{each.name: of(getattr(table, each.name)) for each in fields(table)})


def check_rounds(samples: Samples) -> None:
    """Refuse samples whose rounds say different things: of half of the numbers, or more, of one kind.

    Single numbers that differ are named in the source of their table.

    **Raises:** `SetupError`, with what differs, and what to do.
    """
    kinds: dict[str, Sequence[Subject]] = {
        "messages": samples.all_of(Message),
        "matrix products and convolutions": samples.all_of(Arithmetic),
        "arrays in memory": samples.all_of(Streamed),
    }
    differ = {name: np.median([samples.difference(each) for each in kind]) for name, kind in kinds.items() if kind}
    wrong = [f"{name} by {100 * share:.0f} %" for name, share in differ.items() if share > MOST_DIFFERENCE]
    if wrong:
        raise SetupError(
            f"The machine can't be measured now: the rounds of the measurement differ in {', in '.join(wrong)} (in the "
            f"median over sizes; {100 * MOST_DIFFERENCE:.0f} % at most). Most often other programs run on the same "
            "cores: measure when nothing else runs, with as many workers as there are cores or fewer, each bound to a "
            "core (mpiexec -bind-to core); or load a machine from a file."
        )


def _source(samples: Samples, subjects: Iterable[Subject]) -> str:
    """Return the source of a table: which share of its numbers can't be trusted."""
    differences = [samples.difference(subject) for subject in subjects]
    far = [difference for difference in differences if difference > MOST_DIFFERENCE]
    if not far:
        return "measured"
    share = f"{len(far)} of {len(differences)} numbers, by {100 * max(far):.0f} % at most"
    return f"measured; rounds differ by over {100 * MOST_DIFFERENCE:.0f} % in {share}"


def _operation(samples: Samples) -> float:
    return max(samples.seconds(Overhead("operation")), SHORTEST)


def _kernel(samples: Samples) -> float:
    return max(samples.seconds(Overhead("kernel")), SHORTEST)


def _array(samples: Samples) -> float:
    more = samples.seconds(Overhead("arrays")) - samples.seconds(Overhead("call"))
    return max(more / (ARRAYS - 1) - _kernel(samples), 0.0)


def _calls(samples: Samples) -> Calls:
    return Calls(
        source=_source(samples, samples.all_of(Overhead)),
        call=max(samples.seconds(Overhead("call")), SHORTEST),
        array=_array(samples),
        kernel=_kernel(samples),
        operation=_operation(samples),
    )


def _host(samples: Samples, places: Places, memory: float) -> Host:
    streams = sorted(samples.all_of(Streamed), key=lambda s: s.bytes)
    together = {s.bytes: s.bytes / samples.seconds(s) for s in streams if not s.alone}
    (alone,) = (s for s in streams if s.alone)
    (copied,) = samples.all_of(Copied)
    largest = max(together)
    workers = places.workers_per_host
    return Host(
        source=_source(samples, [*streams, copied]),
        workers=workers,
        workers_per_cache=places.workers_per_cache,
        memory=memory,
        memory_bandwidth=workers * together[largest],
        worker_bandwidth=alone.bytes / samples.seconds(alone),
        copy_bandwidth=copied.bytes / samples.seconds(copied),
        alone=_alone(samples),
        points=tuple(BandwidthPoint(size, rate) for size, rate in together.items()),
    )


def _alone(samples: Samples) -> float:
    """Return how many times faster a worker computes while the others rest."""
    alone = [s for s in samples.all_of(Arithmetic) if s.alone]
    return float(np.median([samples.seconds(replace(s, alone=False)) / samples.seconds(s) for s in alone]))


def _levels(samples: Samples, copy_bandwidth: float) -> tuple[dict[str, Level], list[float]]:
    """Return the levels, and how far messages are from their segments."""
    levels, errors = {}, []
    messages = samples.all_of(Message)
    for name in LEVELS:
        mine = sorted((s for s in messages if s.level == name), key=lambda s: s.bytes)
        if mine:
            seconds = [samples.seconds(s) - _operation(samples) for s in mine]
            segments, error = fit_segments([s.bytes for s in mine], seconds)
            exchanges = [s for s in samples.all_of(Exchange) if s.level == name]
            bandwidth = _host_bandwidth(samples, exchanges, segments)
            source = _source(samples, [*mine, *exchanges])
            levels[name] = Level(source=source, host_bandwidth=bandwidth, segments=segments)
            errors.append(error)
    if "host" not in levels:
        levels["host"] = Level(
            source="guess: no two workers of this job were so far apart",
            host_bandwidth=copy_bandwidth,
            segments=(Segment(1e-6, copy_bandwidth / 2),),
        )
    return levels, errors


def _host_bandwidth(samples: Samples, exchanges: Sequence[Exchange], segments: Sequence[Segment]) -> float:
    """Return the most bytes a second that workers of a host sent together; no less than one of them can."""
    rates: dict[int, list[float]] = {}
    for each in exchanges:
        latency = next(segment.latency for segment in segments if each.bytes <= segment.up_to)
        left = samples.seconds(each) - _operation(samples) - latency
        if left > 0:
            rates.setdefault(each.senders, []).append(each.senders * each.bytes / left)
    together = [float(np.median(several)) for several in rates.values()]
    return max([*together, *(segment.bandwidth for segment in segments if math.isfinite(segment.bandwidth))])


def _collectives(samples: Samples) -> Collectives:
    points, subjects = [], samples.all_of(Collective)
    for each in subjects:
        seconds = samples.seconds(each) - _operation(samples)
        if each.synced:
            sums = [s for s in subjects if (s.kind, s.workers, s.hosts) == ("allreduce", each.workers, each.hosts)]
            seconds -= samples.seconds(min(sums, key=lambda s: s.bytes))
        points.append(CollectivePoint(each.kind, each.workers, each.hosts, each.bytes, max(seconds, SHORTEST)))
    if not points:
        return Collectives(source="guess: one worker was measured")
    return Collectives(source=_source(samples, subjects), points=tuple(sorted(points, key=_order)))


def _order(point: CollectivePoint) -> tuple[str, int, int, float]:
    return point.kind, point.workers, point.hosts, point.bytes


def _compute(samples: Samples) -> Compute:
    points, subjects = [], [s for s in samples.all_of(Arithmetic) if not s.alone]
    for each in subjects:
        seconds = max(samples.seconds(each) - _kernel(samples), SHORTEST)
        points.append(RatePoint(each.kind, each.dtype, each.direction, each.shape, each.flops / seconds))
    most = {dtype: max((p.rate for p in points if p.dtype == dtype), default=0.0) for dtype in ("float32", "float64")}
    points.sort(key=lambda point: (point.kind, point.dtype, point.direction, point.shape))
    return Compute(
        source=_source(samples, subjects),
        guesses=() if most["float64"] else ("float64",),
        float32=most["float32"],
        float64=most["float64"] or most["float32"] / 2,
        points=tuple(points),
    )


def _overlap(samples: Samples) -> Overlap:
    subjects = samples.all_of(Overlapped)
    points = []
    for size in sorted({s.bytes for s in subjects}):
        message, arithmetic, both = (
            samples.seconds(Overlapped(size, does)) for does in ("message", "arithmetic", "both")
        )
        hidden = (message + arithmetic - both) / max(min(message, arithmetic), SHORTEST)
        points.append(HiddenPoint(size, min(max(hidden, 0.0), 1.0)))
    if not points:
        return Overlap(source="guess: one worker was measured, and nothing is hidden")
    return Overlap(source=_source(samples, subjects), points=tuple(points))
