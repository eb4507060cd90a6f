"""The tables of a machine file: which entries each has, in which unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SOURCES = ("measured", "published", "guess")
"""How the source of a table's numbers begins."""


def _quantity(quantity: str, **more: Any) -> Any:
    return field(metadata={"quantity": quantity}, **more)


def _count() -> Any:
    return field(metadata={"quantity": "count"})


def _rows(of: type) -> Any:
    return field(metadata={"rows": of}, default=())


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of numbers.

    - `source`: where they are from: "measured", "published: ...", or "guess".
    - `guesses`: the names of entries that are guesses although the others are not.
    """

    source: str
    guesses: tuple[str, ...] = ()


@dataclass(frozen=True)
class BandwidthPoint:
    """What one worker reads and writes in a second, of arrays of so many bytes together, while all of its host do."""

    bytes: float = _quantity("bytes")
    bandwidth: float = _quantity("bytes per second")


@dataclass(frozen=True, kw_only=True)
class Host(Table):
    """One host, on which all workers compute at once.

    - `workers`: how many workers there are on a host. - `workers_per_cache`: so many in turn share their last cache.
    - `memory`: bytes.
    - `memory_bandwidth`: of all workers of a host together; `worker_bandwidth`: of one of them that is alone.
    - `copy_bandwidth`: bytes that one worker copies in a second.
    - `alone`: how many times faster a worker computes while the others of its host rest; 100 % for no difference.
    - `points`: arrays that caches may hold; without, all are the memory's.
    """

    workers: int = _count()
    workers_per_cache: int = _count()
    memory: float = _quantity("bytes")
    memory_bandwidth: float = _quantity("bytes per second")
    worker_bandwidth: float = _quantity("bytes per second")
    copy_bandwidth: float = _quantity("bytes per second")
    alone: float = _quantity("share")
    points: tuple[BandwidthPoint, ...] = _rows(BandwidthPoint)


@dataclass(frozen=True)
class Segment:
    """Messages of a range of sizes: latency + bytes / bandwidth.

    - `bandwidth`: infinite where the size makes no difference. - `up_to`: the largest size, infinite of the last one.
    """

    latency: float = _quantity("seconds")
    bandwidth: float = _quantity("bytes per second", default=float("inf"))
    up_to: float = _quantity("bytes", default=float("inf"))


@dataclass(frozen=True, kw_only=True)
class Level(Table):
    """Messages between two workers that are so far from each other.

    - `host_bandwidth`: bytes that the workers of one host together send in a second.
    - `segments`: by size, ascending: short, eager and rendezvous messages. The last one has no `up_to`.
    """

    host_bandwidth: float = _quantity("bytes per second")
    segments: tuple[Segment, ...] = _rows(Segment)


@dataclass(frozen=True, kw_only=True)
class Calls(Table):
    """Times that nothing useful is done in.

    - `call`: of a jitted function from Python. - `array`: more for each array that it takes and returns. - `kernel`: of
      one kernel of XLA's. - `operation`: of an operation of MPI's inside a program, with no other worker.
    """

    call: float = _quantity("seconds")
    array: float = _quantity("seconds", default=0.0)
    kernel: float = _quantity("seconds")
    operation: float = _quantity("seconds")


@dataclass(frozen=True)
class CollectivePoint:
    """The time of a collective operation of so many workers.

    - `kind`: "allreduce", "bcast", "reduce", "allgather", "reduce_scatter".
    - `bytes`: of the array of each; of an all-gather's result, and of a reduce-scatter's argument.
    """

    kind: str = field(metadata={"quantity": "text"})
    workers: int = _count()
    hosts: int = _count()
    bytes: float = _quantity("bytes")
    seconds: float = _quantity("seconds")


@dataclass(frozen=True, kw_only=True)
class Collectives(Table):
    """Measured collective operations; where there are none, MPICH's algorithms are taken."""

    points: tuple[CollectivePoint, ...] = _rows(CollectivePoint)


@dataclass(frozen=True)
class RatePoint:
    """How fast one worker computes a shape while all workers of its host do.

    - `kind`: "matrix product", "convolution", "fft", "pooling", "normalisation".
    - `direction`: "forward", "input gradient", "parameter gradient".
    - `shape`: (m, k, n) of a matrix product; of a convolution channels in and out, of a group, the extent of its
      output and the number of taps; of an fft its length; of a pooling the taps; of a normalisation the
      channels and the entries of each.
    """

    kind: str = field(metadata={"quantity": "text"})
    dtype: str = field(metadata={"quantity": "text"})
    direction: str = field(metadata={"quantity": "text"})
    shape: tuple[int, ...] = field(metadata={"quantity": "counts"})
    rate: float = _quantity("flops per second")


@dataclass(frozen=True, kw_only=True)
class Compute(Table):
    """Arithmetic of one worker.

    - `float32`, `float64`: the most that its core can do.
    - `points`: shapes that were measured.
    """

    float32: float = _quantity("flops per second")
    float64: float = _quantity("flops per second")
    points: tuple[RatePoint, ...] = _rows(RatePoint)


@dataclass(frozen=True)
class HiddenPoint:
    """The share of a message of so many bytes that takes no time of its own behind arithmetic."""

    bytes: float = _quantity("bytes")
    hidden: float = _quantity("share")


@dataclass(frozen=True, kw_only=True)
class Overlap(Table):
    """How much of a message is hidden behind arithmetic, by size."""

    points: tuple[HiddenPoint, ...] = _rows(HiddenPoint)


@dataclass(frozen=True, kw_only=True)
class Quality(Table):
    """How far the numbers can be trusted.

    - `noise`: the relative spread of a time.
    - `rounds_differ`: by how much rounds of the measurement differ from their median, at most, in half of the numbers.
    - `fit_error`: how far messages are from their segments, at most.
    """

    noise: float = _quantity("share")
    rounds_differ: float = _quantity("share", default=0.0)
    fit_error: float = _quantity("share", default=0.0)


TABLES: dict[str, type[Table]] = {
    "host": Host,
    "calls": Calls,
    "compute": Compute,
    "collectives": Collectives,
    "overlap": Overlap,
    "quality": Quality,
}
"""The tables of a file by name, beside `levels`, a table of `Level` by name."""

LEVELS = ("shared cache", "host", "network")
"""The names of levels, from near to far."""
