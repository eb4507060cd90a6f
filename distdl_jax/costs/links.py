"""The seconds of messages, collectives and arithmetic of one job on a machine: what a play asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from distdl_jax.costs.step_program import Direction
from distdl_jax.machine.machine import Machine
from distdl_jax.machine.tables import Level
from distdl_jax.plans.work import Work
from distdl_jax.programs.ir import Operation


@dataclass(frozen=True)
class MachineLinks:
    """A machine with the workers 0 to `workers` - 1 on it, which fill one host after the other.

    - `dtype`: the name of the one that workers compute in.
    - `used`: the levels of the messages that were asked for.
    """

    machine: Machine
    workers: int
    dtype: str
    used: set[str] = field(default_factory=set, compare=False)
    _known: dict[tuple[Work, Direction, int], float] = field(default_factory=dict, repr=False, compare=False)

    def message_seconds(self, sender: np.ndarray, receiver: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Return the seconds of messages that are sent at the same time: those of one host share its bandwidth."""
        seconds = np.zeros(len(nbytes))
        for level, chosen in self._levels(sender, receiver):
            hosts = [ranks[chosen] // self.machine.workers_per_host for ranks in (sender, receiver)]
            pairs = np.maximum(*(np.bincount(host)[host] for host in hosts))
            seconds[chosen] = self.machine.message_seconds(nbytes[chosen], level, pairs)
        return seconds

    def eager(self, sender: np.ndarray, receiver: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Return which messages are so short that the sender doesn't wait: all but those of the last segment."""
        found = np.zeros(len(nbytes), bool)
        for level, chosen in self._levels(sender, receiver):
            found[chosen] = nbytes[chosen] <= _eager_limit(self.machine.levels[level])
        return found

    def hidden_seconds(self, nbytes: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Return how much of messages' seconds arithmetic could hide."""
        return np.asarray(seconds * self.machine.hidden(nbytes))

    def collective_seconds(self, kind: str, team: np.ndarray, nbytes: int) -> float:
        """Return the seconds of a collective, of so many bytes on each worker."""
        hosts = len(np.unique(team // self.machine.workers_per_host))
        whole = nbytes * len(team) if kind == "allgather" else nbytes
        return float(self.machine.collective_seconds(kind, len(team), whole, hosts))

    def work_seconds(self, works: Sequence[Iterable[Work]], direction: Direction) -> np.ndarray:
        """Return the seconds of each worker's arithmetic in one direction, while others of its host have some, too."""
        lists = [tuple(several) for several in works]
        host = self._hosts
        busy = np.bincount(host, weights=[bool(several) for several in lists])[host].astype(int)
        return np.array(
            [
                sum(self._work_seconds(work, direction, int(others)) for work in several)
                for several, others in zip(lists, busy, strict=True)
            ],
            float,
        )

    def _work_seconds(self, work: Work, direction: Direction, busy: int) -> float:
        key = work, direction, busy
        if key not in self._known:
            self._known[key] = self.machine.work_seconds(work, direction, self.dtype, busy)
        return self._known[key]

    def packing_seconds(self, operations: Sequence[Sequence[Operation]]) -> np.ndarray:
        """Return the seconds in which each worker starts its operations and copies what they send and receive."""
        counts = np.array([len(several) for several in operations])
        copied = np.array([sum(map(_bytes_copied, several)) for several in operations])
        return np.asarray(counts * self.machine.operation_seconds + self.machine.copy_seconds(copied))

    def update_seconds(self, parameters: np.ndarray, arrays: np.ndarray, passes: int) -> np.ndarray:
        """Return the seconds of an optimiser.

        - `parameters`, `arrays`: the bytes of each worker's parameters, and how many arrays they are.
        - `passes`: how many arrays of that size are read or written in all.
        """
        host, shared = self._hosts, self.machine.host
        busy = np.maximum(np.bincount(host, weights=parameters > 0)[host], 1)
        bandwidth = np.minimum(shared.worker_bandwidth, shared.memory_bandwidth / busy)
        return np.asarray(arrays * self.machine.calls.kernel + passes * parameters / bandwidth)

    @property
    def _hosts(self) -> np.ndarray:
        """The number of each worker's host."""
        return np.arange(self.workers) // self.machine.workers_per_host

    def _levels(self, sender: np.ndarray, receiver: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the levels of messages, each with the places of its messages."""
        host = self.machine.host
        apart = sender // host.workers != receiver // host.workers
        caches = [ranks % host.workers // host.workers_per_cache for ranks in (sender, receiver)]
        near = ~apart & (caches[0] == caches[1]) & ("shared cache" in self.machine.levels)
        for level, chosen in (("shared cache", near), ("host", ~apart & ~near), ("network", apart)):
            if chosen.any():
                self.used.add(level)
                yield level, np.flatnonzero(chosen)


def _eager_limit(level: Level) -> float:
    """Return the size up to which a sender does not wait: that of all segments but the last."""
    return level.segments[-2].up_to if len(level.segments) > 1 else -1.0


def _bytes_copied(operation: Operation) -> int:
    if not operation.is_message:
        return 0
    received = operation.received * operation.itemsize if operation.source is not None else 0
    return operation.bytes_sent + received
