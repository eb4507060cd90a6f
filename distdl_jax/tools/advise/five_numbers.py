"""A machine as five numbers, of which an estimate of seconds is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.machine.machine import Machine

_UNITS: Final = {
    "latency": ("seconds", 1e-9, 0.1, "2.4e-6 for 2.4 us"),
    "bandwidth": ("bytes per second", 1e6, 1e14, "25e9 for 25 GB/s"),
    "flops": ("flop per second", 1e7, 1e17, "80e9 for 80 Gflop/s"),
    "memory_bandwidth": ("bytes per second", 1e7, 1e16, "20e9 for 20 GB/s"),
    "memory": ("bytes", 1e5, 1e16, "4e9 for 4 GB"),
}
"""The unit of each number, the least and the most that a machine can have, and an example."""


@dataclass(frozen=True, kw_only=True)
class FiveNumbers:
    """A machine: five numbers of each worker, in SI units, while all workers of a host are busy.

    - `latency`: seconds of a message without bytes.
    - `bandwidth`: bytes per second of a worker's messages.
    - `flops`: multiplications and additions per second that a worker reaches.
    - `memory_bandwidth`: bytes per second that a worker reads and writes in memory.
    - `memory`: bytes that a worker may fill.
    - `source`: where the numbers come from, as a text.

    Raises `InvalidTypeError` for what is no number, and `InvalidArgumentError` for a number that no machine has, which
    is most often one in another unit.

    >>> machine = FiveNumbers(latency=2.4e-6, bandwidth=5e9, flops=80e9, memory_bandwidth=20e9, memory=4e9)
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
            raise InvalidTypeError(f"`source` (={self.source!r}) must be a text.")

    @classmethod
    def of(cls, machine: Machine) -> FiveNumbers:
        """Return the numbers of a machine, for large messages between its workers that are farthest apart."""
        level, large = list(machine.levels)[-1], 2.0**26
        latency = machine.message_seconds(0, level) + machine.operation_seconds
        return cls(
            latency=latency,
            bandwidth=large / (machine.message_seconds(large, level) - machine.message_seconds(0, level)),
            flops=machine.compute.float32,
            memory_bandwidth=min(machine.host.worker_bandwidth, machine.host.memory_bandwidth / machine.host.workers),
            memory=machine.host.memory / machine.host.workers,
            source=machine.name,
        )

    def seconds(self, messages: Any, bytes: Any, flops: Any, memory_traffic: Any) -> Any:
        """Estimate seconds: latency x messages + bytes / bandwidth + flops / speed + memory traffic / its bandwidth.

        Measured steps took a third more or less, so the sum is not for ranking partitions.

        **Arguments:**

        - `messages`, `bytes`: that a worker sends.
        - `flops`: that it computes.
        - `memory_traffic`: bytes that it reads and writes in memory.

        Each is a number, or an array with an entry for each worker.

        **Returns:** a number, or an array where one of the arguments is one.
        """
        counts = (messages, bytes, flops, memory_traffic)
        prices = (self.latency, 1 / self.bandwidth, 1 / self.flops, 1 / self.memory_bandwidth)
        total = sum(np.asarray(count, float) * price for count, price in zip(counts, prices, strict=True))
        return total if np.ndim(total) else float(total)

    def __str__(self) -> str:
        numbers = ", ".join(
            f"{each.name}={getattr(self, each.name):.4g}" for each in fields(self) if each.name in _UNITS
        )
        return f"FiveNumbers({numbers}), {self.source}"


def _check_number(name: str, value: object) -> None:
    """Refuse a value that is no number, or one that no machine has in this unit."""
    unit, least, most, example = _UNITS[name]
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        raise InvalidTypeError(f"`{name}` (={value!r}) must be a number of {unit}: {example}.")
    if not least <= value <= most:
        raise InvalidArgumentError(
            f"`{name}` (={value!r}) must be a number of {unit}, from {least:g} to {most:g}: {example}."
        )
