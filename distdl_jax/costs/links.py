"""The seconds of messages, collectives and arithmetic of one job on a machine: what a play asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from distdl_jax.costs.step_program import Direction
from distdl_jax.machine.machine import Machine
from distdl_jax.machine.tables import Level
from distdl_jax.plans.work import Work


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
            seconds[chosen] = self.machine.message_seconds(nbytes[chosen], level, pairs) + self._start(level)
        return seconds

    def _start(self, level: str) -> float:
        """Return the seconds of an operation around a message, which measured messages include, and published don't."""
        measured = self.machine.levels[level].source.startswith("measured")
        return 0.0 if measured else self.machine.operation_seconds

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

    def work_seconds(self, works: Sequence[Sequence[Work]], direction: Direction) -> np.ndarray:
        """Return the seconds of each worker's arithmetic in one direction, while others of its host have some, too."""
        host = self._hosts
        busy = np.bincount(host, weights=[bool(several) for several in works])[host].astype(int)
        return np.array(
            [
                sum(self._work_seconds(work, direction, int(others)) for work in several)
                for several, others in zip(works, busy, strict=True)
            ],
            float,
        )

    def _work_seconds(self, work: Work, direction: Direction, busy: int) -> float:
        key = work, direction, busy
        if key not in self._known:
            work = work if direction == "forward" else _with_cotangents(work)
            self._known[key] = self.machine.work_seconds(work, direction, self.dtype, busy)
        return self._known[key]

    def copy_seconds(self, nbytes: np.ndarray) -> np.ndarray:
        """Return the seconds in which each worker copies so many bytes, in one kernel."""
        return np.where(nbytes > 0, self.machine.calls.kernel + self.machine.copy_seconds(nbytes), 0.0)

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


def _with_cotangents(work: Work) -> Work:
    """Return the backward pass of arithmetic: it reads the cotangent of y and what was stored, and writes that of x."""
    stored = work.read * work.saves_x + work.written * work.saves_y + (work.saved or 0)
    return replace(work, read=work.written + stored, written=work.read)
