"""A machine as a value: how long messages, collective operations and arithmetic take on it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.machine import machine_file, rates
from distdl_jax.machine.collectives import KINDS, Seconds, by_algorithm, by_points, nearest_hosts
from distdl_jax.machine.tables import LEVELS, TABLES, Calls, Collectives, Compute, Host, Level, Overlap, Quality, Table
from distdl_jax.plans.work import Work

Direction = Literal["forward", "input gradient", "parameter gradient"]


@dataclass(frozen=True)
class Machine:
    """A machine: hosts, what messages between workers take, and how fast a worker computes.

    All times are seconds and all sizes bytes; methods take numbers and numpy arrays of them alike. Workers fill one
    host after the other, in the order of their ranks.

    - `name`, `about`, `mpi`, `measured_on`: which machine, what is known of it, its MPI library, the date.
    - `host`, `levels`, `calls`, `compute`, `collectives`, `overlap`, `quality`: the
      tables of its file, as docs/machines.md has them.

    >>> import distdl_jax as dj
    >>> machine = dj.machine.load("infiniband-hdr")
    >>> machine.level_of(0, 1), machine.level_of(0, 1000)
    ('shared cache', 'network')
    >>> f"{1e6 * machine.message_seconds(65536, 'network'):.1f} us"
    '8.9 us'
    """

    name: str
    about: str
    mpi: str
    measured_on: str
    host: Host
    levels: dict[str, Level]
    calls: Calls
    compute: Compute
    collectives: Collectives
    overlap: Overlap
    quality: Quality
    _known_rates: dict[Any, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def workers_per_host(self) -> int:
        """How many workers a host has."""
        return self.host.workers

    @property
    def call_seconds(self) -> float:
        """Seconds of a call of a jitted function."""
        return self.calls.call

    @property
    def operation_seconds(self) -> float:
        """Seconds of an operation of MPI's, in a compiled program, that moves nothing."""
        return self.calls.operation

    @property
    def noise(self) -> float:
        """The spread of a time, relative to it."""
        return self.quality.noise

    @property
    def guesses(self) -> tuple[str, ...]:
        """The names of all numbers that were neither measured nor published: "host.copy_bandwidth"."""
        tables: dict[str, Table] = {name: getattr(self, name) for name in TABLES}
        tables |= {f"levels.{name}": level for name, level in self.levels.items()}
        names = ((name, each.name) for name, table in tables.items() for each in fields(table))
        return tuple(f"{name}.{key}" for name, key in names if _is_guess(tables[name], key))

    def level_of(self, a: int, b: int) -> str:
        """Return how far two workers, by world rank, are apart: "shared cache", "host" or "network"."""
        one, other = (divmod(worker, self.host.workers) for worker in (a, b))
        if one[0] != other[0]:
            return "network"
        near = one[1] // self.host.workers_per_cache == other[1] // self.host.workers_per_cache
        return "shared cache" if near and "shared cache" in self.levels else "host"

    def message_seconds(self, nbytes: Any, level: str, pairs: Any = 1) -> Any:
        """Return the seconds of a message: latency + bytes x max(1 / bandwidth, pairs / bandwidth of the host).

        In a program `operation_seconds` of sender and receiver come before.

        - `level`: as `level_of` says.
        - `pairs`: how many messages go at once from one host to the same other one; or within one host, where two
          workers that exchange messages count twice.

        Source: Gropp, Olson and Samfass, "Modeling MPI communication performance on SMP nodes" (2016).
        """
        segments = self._level(level).segments
        n = np.asarray(nbytes, float)
        place = np.searchsorted([segment.up_to for segment in segments[:-1]], n)
        latency = np.array([segment.latency for segment in segments])[place]
        per_byte = np.array([1 / segment.bandwidth for segment in segments])[place]
        shared = np.maximum(per_byte, pairs / self._level(level).host_bandwidth)
        return _plain(latency + n * np.where(per_byte > 0, shared, 0.0))

    def collective_seconds(self, kind: str, size: int, nbytes: Any, hosts: int = 1) -> Any:
        """Return the seconds of a collective operation of `size` workers on so many hosts.

        Measured times, between and beyond which the algorithms of MPICH give the shape; else these algorithms.

        - `kind`: "allreduce", "bcast", "reduce", "allgather" or "reduce_scatter".
        - `nbytes`: of each worker's array; of an all-gather's result, and of a reduce-scatter's argument.
        """
        if kind not in KINDS:
            raise InvalidArgumentError(f"`kind` (={kind!r}) must be one of {', '.join(KINDS)}.")
        points = [point for point in self.collectives.points if point.kind == kind]
        alike = nearest_hosts(points, hosts)

        def algorithm(team: int) -> Seconds:
            return self._algorithm(kind, team, min(hosts, team))

        return _plain(by_points(alike, size, algorithm)(np.asarray(nbytes, float)))

    def work_seconds(self, work: Work, direction: Direction, dtype: str, busy: int | None = None) -> float:
        """Return the seconds of one worker's arithmetic: the longer of its flops and its bytes, and a kernel's start.

        - `busy`: how many workers of the host compute at the same time; None for all.
        """
        busy = self.host.workers if busy is None else min(max(busy, 1), self.host.workers)
        flops = {"forward": work.flops, "input gradient": work.flops_x, "parameter gradient": work.flops_params}
        if direction not in flops:
            raise InvalidArgumentError(f"`direction` (={direction!r}) must be one of {', '.join(flops)}.")
        in_bytes = (work.read + work.written) / self._bandwidth(work.read + work.written, busy)
        if not flops[direction]:
            return self.calls.kernel + in_bytes if work.read + work.written else 0.0
        return self.calls.kernel + max(flops[direction] / self._rate(work, direction, dtype, busy), in_bytes)

    def copy_seconds(self, nbytes: Any) -> Any:
        """Return the seconds in which one worker copies so many bytes."""
        return nbytes / self.host.copy_bandwidth

    def hidden(self, nbytes: Any) -> Any:
        """Return the share, 0 to 1, of a message's time that hides behind arithmetic."""
        points = sorted(self.overlap.points, key=lambda point: point.bytes)
        sizes, shares = [point.bytes for point in points], [point.hidden for point in points]
        if not points:
            return _plain(np.zeros_like(nbytes, float))
        return _plain(np.interp(np.log1p(nbytes), np.log1p(sizes), shares))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the machine as a TOML file, which `load` reads; numbers to six digits."""
        Path(path).write_text(str(self), encoding="utf-8")

    def __str__(self) -> str:
        """Return the text of its file."""
        return machine_file.written(self)

    def _level(self, name: str) -> Level:
        if name not in LEVELS:
            raise InvalidArgumentError(f"`level` (={name!r}) must be one of {', '.join(LEVELS)}.")
        if name not in self.levels:
            raise InvalidArgumentError(
                f"`level` (={name!r}): machine {self.name!r} has {', '.join(self.levels)} only; its file says "
                f"nothing of more than {self.host.workers} workers."
            )
        return self.levels[name]

    def _algorithm(self, kind: str, size: int, hosts: int) -> Seconds:
        if hosts == 1:
            near = size <= self.host.workers_per_cache and "shared cache" in self.levels
            return by_algorithm(kind, size, self._step("shared cache" if near else "host"), self._add)
        inside = -(-size // hosts)
        if inside == 1 or kind in ("allgather", "reduce_scatter"):
            return by_algorithm(kind, size, self._step("network", inside), self._add)
        # MPICH composes these of operations on each host and one between hosts.
        parts = {"allreduce": ("reduce", "bcast"), "bcast": ("bcast",), "reduce": ("reduce",)}[kind]
        steps = [self._algorithm(part, inside, 1) for part in parts] + [self._algorithm(kind, hosts, hosts)]

        def composed(n: np.ndarray) -> np.ndarray:
            return np.sum([step(n) for step in steps], axis=0)

        return composed

    def _step(self, level: str, pairs: int = 1) -> Seconds:
        def step(n: np.ndarray) -> np.ndarray:
            return np.asarray(self.message_seconds(n, level, pairs))

        return step

    def _add(self, n: np.ndarray) -> np.ndarray:
        """Return the seconds in which two arrays are added: two reads and a write of each byte."""
        return 3 * n / self.host.worker_bandwidth

    def _bandwidth(self, nbytes: float, busy: int) -> float:
        """Return the bytes a second of one worker's arrays: the memory's, or more where caches hold them."""
        memory = min(self.host.worker_bandwidth, self.host.memory_bandwidth / busy)
        points = sorted(self.host.points, key=lambda point: point.bytes)
        if not points:
            return memory
        sizes, bandwidths = [point.bytes for point in points], [point.bandwidth for point in points]
        return max(memory, float(np.interp(np.log1p(nbytes), np.log1p(sizes), bandwidths)))

    def _rate(self, work: Work, direction: str, dtype: str, busy: int) -> float:
        key = (work.kind, work.shape, direction, dtype)
        if key not in self._known_rates:
            self._known_rates[key] = rates.rate(self.compute, work.kind, direction, dtype, rates.shape_of(work))
        resting = (self.host.workers - busy) / max(self.host.workers - 1, 1)
        return self._known_rates[key] * (1 + (self.host.alone - 1) * resting)


def _is_guess(table: Table, key: str) -> bool:
    if key in ("source", "guesses") or getattr(table, key) in ((), 0):  # nothing is said
        return False
    return table.source.startswith("guess") or key in table.guesses


def _plain(number: Any) -> Any:
    """Return an array as it is, and one of no dimensions as a float."""
    return number if np.ndim(number) else float(number)


def _shipped() -> Traversable:
    return files("distdl_jax.machine") / "files"


def names() -> tuple[str, ...]:
    """Return the names of the machines whose files the library has.

    **Returns:** a tuple of names, each good for `load`.

    >>> import distdl_jax as dj
    >>> "perlmutter-cpu" in dj.machine.names()
    True
    """
    return tuple(
        sorted(each.name.removesuffix(".toml") for each in _shipped().iterdir() if each.name.endswith(".toml"))
    )


def load(path_or_name: str | os.PathLike[str]) -> Machine:
    """Return the machine that a file describes.

    **Arguments:**

    - `path_or_name`: the path of a TOML file, or a name: "infiniband-hdr", "omni-path", "perlmutter-cpu" or
      "workstation".

    **Returns:** a `Machine`.

    **Raises:** `InvalidArgumentError` where there is no such file, or it has something missing, unknown or in a wrong
    unit; the sentence names the line. `InvalidTypeError` for what is no path.

    >>> import distdl_jax as dj
    >>> dj.machine.load("perlmutter-cpu").workers_per_host
    128
    """
    if not isinstance(path_or_name, str | os.PathLike):
        raise InvalidTypeError(f"`path_or_name` (={path_or_name!r}) must be a path, or one of {', '.join(names())}.")
    if path_or_name in names():
        text = (_shipped() / f"{path_or_name}.toml").read_text(encoding="utf-8")
        return Machine(**machine_file.read(text, f"{path_or_name}.toml"))
    try:
        text = Path(path_or_name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"`path_or_name` (={os.fspath(path_or_name)!r}) must be a file that can be read, or one of "
            f"{', '.join(names())}: {error}."
        ) from None
    return Machine(**machine_file.read(text, os.fspath(path_or_name)))
