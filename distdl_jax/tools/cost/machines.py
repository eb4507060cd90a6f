"""A machine as five numbers, from which `dj.cost` estimates seconds: published, measured, or your own.

>>> import distdl_jax as dj
>>> dj.machine.names()
('infiniband-hdr', 'omni-path', 'perlmutter-cpu', 'workstation')
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.shape_dtype import ShapeDtype

__all__ = ["Machine", "load", "measure", "names"]

_UNITS: Final = {
    "latency": ("seconds", 1e-9, 0.1, "2.4e-6 for 2.4 us"),
    "bandwidth": ("bytes per second", 1e6, 1e14, "25e9 for 25 GB/s"),
    "flops": ("flop per second", 1e7, 1e17, "80e9 for 80 Gflop/s"),
    "memory_bandwidth": ("bytes per second", 1e7, 1e16, "20e9 for 20 GB/s"),
    "memory": ("bytes", 1e5, 1e16, "4e9 for 4 GB"),
}
"""The unit of each number, its range for real machines, and an example."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine: five numbers of each worker, in SI units, while all workers of a host are busy.

    - `latency`: seconds of an empty message.
    - `bandwidth`: bytes per second of a worker's messages.
    - `flops`: float32 multiplications and additions per second that a worker reaches.
    - `memory_bandwidth`: bytes per second that a worker reads and writes in memory.
    - `memory`: bytes available to a worker.
    - `source`: where the numbers come from, as text.

    Raises `InvalidTypeError` for a value that is not a number, and `InvalidArgumentError` for an implausible one,
    usually in another unit.

    >>> machine = Machine(latency=2.4e-6, bandwidth=5e9, flops=80e9, memory_bandwidth=20e9, memory=4e9)
    >>> f"{1e3 * machine.seconds(messages=10, bytes=5e6, flops=8e8, memory_traffic=2e7):.2f} ms"
    '12.02 ms'
    """

    latency: float
    bandwidth: float
    flops: float
    memory_bandwidth: float
    memory: float
    source: str = "given by hand"

    def __post_init__(self) -> None:
        for name in _UNITS:
            _check_number(name, getattr(self, name))
        if not isinstance(self.source, str):
            raise InvalidTypeError(f"`source` (={self.source!r}) must be a string.")

    def seconds(self, messages: Any, bytes: Any, flops: Any, memory_traffic: Any) -> Any:
        """Estimate seconds: latency x messages + bytes / bandwidth + flops / speed + memory traffic / its bandwidth.

        Measured steps took about a third more or less, so the sum is not suited for ranking partitions.

        **Arguments:**

        - `messages`, `bytes`: sent by a worker.
        - `flops`: computed by it.
        - `memory_traffic`: bytes read and written by it in memory.

        Each is a number, or an array with an entry for each worker.

        **Returns:** a number, or an array if one of the arguments is one.
        """
        counts = (messages, bytes, flops, memory_traffic)
        prices = (self.latency, 1 / self.bandwidth, 1 / self.flops, 1 / self.memory_bandwidth)
        total = sum(np.asarray(count, float) * price for count, price in zip(counts, prices, strict=True))
        return total if np.ndim(total) else float(total)


def _check_number(name: str, value: object) -> None:
    """Reject a value that is not a number, or is implausible in this unit."""
    unit, least, most, example = _UNITS[name]
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        raise InvalidTypeError(f"`{name}` (={value!r}) must be a number of {unit}: {example}.")
    if not least <= value <= most:
        raise InvalidArgumentError(
            f"`{name}` (={value!r}) must be a number of {unit}, from {least:g} to {most:g}: {example}."
        )


_KNOWN: Final = {
    "infiniband-hdr": Machine(
        latency=2.6e-6,
        bandwidth=23.9e9,
        flops=96e9,
        memory_bandwidth=8.8e9,
        memory=8e9,
        source="cores of 2 x 16 EPYC 7302. Messages: OSU micro-benchmarks 7.2 on HDR InfiniBand (Azure HB, HPC-X), one "
        "pair. Memory: OLCF's guide to Andes. The rest by clock and channels",
    ),
    "omni-path": Machine(
        latency=2.5e-6,
        bandwidth=12.3e9,
        flops=121e9,
        memory_bandwidth=5.6e9,
        memory=6.4e9,
        source="cores of 2 x 16 Xeon Gold 6130. Bandwidth: published for Omni-Path above 63 KB, one pair. The rest by "
        "clock and channels",
    ),
    "perlmutter-cpu": Machine(
        latency=3.7e-6,
        bandwidth=23.3e9,
        flops=78.4e9,
        memory_bandwidth=3.2e9,
        memory=4e9,
        source="cores of 2 x 64 EPYC 7763. Messages: OSU tables for Slingshot-11, one pair. Flops and memory: NERSC's "
        "documentation",
    ),
    "workstation": Machine(
        latency=2.1e-6,
        bandwidth=14.9e9,
        flops=92e9,
        memory_bandwidth=14.4e9,
        memory=12.6e9,
        source="2 cores of a virtual AMD EPYC. Arithmetic and memory: measured. Messages: by other machines",
    ),
}


def names() -> tuple[str, ...]:
    """Return the names of the machines that `load` knows.

    **Returns:** a tuple of strings.

    >>> names()
    ('infiniband-hdr', 'omni-path', 'perlmutter-cpu', 'workstation')
    """
    return tuple(_KNOWN)


def load(name: str) -> Machine:
    """Return a machine by its name.

    **Arguments:**

    - `name`: one of `names()`.

    **Returns:** the `Machine`; its `source` tells where the numbers come from.

    **Raises:** `InvalidArgumentError` if there is none with this name.

    >>> load("infiniband-hdr").latency
    2.6e-06
    """
    if not isinstance(name, str) or name not in _KNOWN:
        raise InvalidArgumentError(
            f"`machine` (={name!r}) must be one of {', '.join(_KNOWN)}, or a dj.Machine(latency=..., bandwidth=..., "
            "flops=..., memory_bandwidth=..., memory=...)."
        )
    return _KNOWN[name]


def given_machine(machine: object) -> Machine:
    """Return the machine that a user gives: as such, or by name."""
    return machine if isinstance(machine, Machine) else load(machine)  # type: ignore[arg-type]


ROUNDS, ENOUGH, MOST = 9, 0.02, 2.0
"""The number of timings of each loop, the seconds of each, and the maximum total.

A message takes a thousand times as long while other programs use the cores, so a loop has few of them.
"""

SHORT, LONG = 8, 2**22
"""Bytes of the messages, short and long."""

SIDE, ENTRIES = 512, 2**24
"""Rows and columns of the matrices whose product is timed, and the length of the array that is read and written."""


def measure() -> Machine:
    """Measure the machine of this job, in about ten seconds, with all its workers, all of which must call it.

    Every worker sends to the next one, multiplies matrices, and reads and writes an array, all at the same time, in
    loops of compiled programs. It uses the median over rounds, and the slowest worker. The memory of a host is divided
    by the workers on it.

    **Returns:** the `Machine`, the same on every worker. Printed, it is a call that makes it again.

    **Raises:** `InvalidArgumentError` in a world of one worker, or whose workers are not processes.

    >>> import distdl_jax as dj
    >>> def worker():
    ...     machine = dj.machine.measure()
    ...     print(machine)  # dj.Machine(latency=1.1e-06, bandwidth=7.9e+09, ...)
    """
    P = Partition()
    if P.size == 1 or not P.world.may_measure:
        raise InvalidArgumentError(
            "A machine is measured by two or more workers, each a separate process: mpiexec -n 4 python ..."
        )
    hosts = _gathered(P, os.uname().nodename)
    latency, long = (_seconds(P, _sends(P, size)) for size in (SHORT, LONG))
    product = _seconds(P, _loop(lambda x: x @ jnp.eye(SIDE, dtype=x.dtype), jnp.ones((SIDE, SIDE), jnp.float32)))
    passed = _seconds(P, _loop(lambda x: x + 1, jnp.zeros(ENTRIES, jnp.float32)))
    return Machine(
        latency=latency,
        bandwidth=LONG / max(long - latency, 1e-9),
        flops=2 * SIDE**3 / product,
        memory_bandwidth=2 * 4 * ENTRIES / passed,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / max(map(hosts.count, hosts)),
        source=f"measured by {P.size} workers on {len(set(hosts))} host{'s' * (len(set(hosts)) > 1)}",
    )


Loop = Callable[[int], float]
"""Repeats something a number of times, and returns the seconds taken."""


def _loop(body: Callable[[Array], Array], x: Array) -> Loop:
    """Compile a loop, so that the repetitions are part of one program, as in a step."""

    def program(times: Array, x: Array) -> Array:
        return lax.fori_loop(0, times, lambda _, x: body(x), x)

    compiled = jax.jit(program).lower(np.int32(0), x).compile()

    def seconds(times: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(compiled(np.int32(times), x))
        return time.perf_counter() - start

    return seconds


def _sends(P: Partition, size: int) -> Loop:
    """Return the loop in which every worker sends `size` bytes to the next one."""
    transport, rank, like = P.world.transport, P.world.rank, ShapeDtype((size // 4,), np.dtype(np.float32))
    ahead, behind = (rank + 1) % P.size, (rank - 1) % P.size
    return _loop(lambda x: transport.sendrecv(x, ahead, like, behind, 1), jnp.zeros(like.shape, like.dtype))


def _seconds(P: Partition, loop: Loop) -> float:
    """Return the seconds of one repetition: of the slowest worker, the median over rounds."""

    def slowest(times: int) -> float:
        _gathered(P, None)  # all start together
        return float(max(_gathered(P, loop(times))))

    often = 1
    slowest(1)  # touches the memory
    while (took := slowest(often)) < ENOUGH / 4:
        often *= 4
    often = max(1, round(often * ENOUGH / took))
    found: list[float] = []
    while len(found) < ROUNDS and sum(found) < MOST:
        found.append(slowest(often))
    return float(np.median(found)) / often


def _gathered(P: Partition, value: Any) -> list[Any]:
    """Return the values of all workers."""
    found = P.allgather_data(value)
    assert found is not None  # all of them are included
    return found
