"""A job in virtual time, with the real agents and coordinator: only programs and the network are played.

Any delay is possible; a watch, a worker or the whole job may stand still for a while, or for ever. By MPI's rules the
n-th collective of a team meets the n-th of every other member, messages between two workers keep their order, and a
send may wait for its receive.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, NamedTuple

from virtual_watch import FOREVER, Watch, World
from virtual_worker import Steps, Worker

from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.watch.thread import WatchdogThread


class Ended(NamedTuple):
    """How the job was ended by its watch."""

    at: float
    text: str
    about: tuple[int, ...]


@dataclass
class Network:
    """How long a message takes: `delay()`; and whether sends wait for their receives."""

    delay: Callable[[], float]
    buffers: bool = True


class Job:
    """The workers of one job, and the events to come; `worlds`: whose communicators they have, everybody's first."""

    def __init__(
        self, size: int, limits: TimeLimits, network: Network, random: Random, worlds: Sequence[tuple[int, ...]]
    ) -> None:
        self.size, self.limits, self.network, self.random = size, limits, network, random
        self.now = self.progress = 0.0
        self.ended: Ended | None = None
        self.said: list[tuple[float, str]] = []
        self.workers = [Worker(self, rank) for rank in range(size)]
        self.worlds = [World(self, members) for members in worlds]
        for worker in self.workers:
            thread = WatchdogThread()
            for world in self.worlds:
                if worker.rank in world.members:
                    worker.watches[world] = world.watches[world.members.index(worker.rank)]
                    thread.add(worker.watches[world])
        self._events: list[tuple[float, int, bool, Callable[[], None]]] = []
        self._to_come = 0  # events that are not the watch's own
        self._stands_since = 0.0
        self._order = count()
        self._last: dict[Any, float] = {}
        self._met: dict[Any, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._sent: dict[Any, list[int]] = defaultdict(lambda: [0, 0])

    # --- events ---

    def at(self, time: float, event: Callable[[], None], watch: bool = False) -> None:
        if time < FOREVER:
            self._to_come += not watch
            heapq.heappush(self._events, (time, next(self._order), watch, event))

    def run(self, most: int = 20_000_000) -> Ended | None:
        """Run until the watch ends the job, all programs have ended, or nothing can happen any more.

        `most`: how many events that may take. With a limit of a year, of which every hour has its lines and questions,
        it takes millions.
        """
        while self._events and self.ended is None and not all(worker.left is not None for worker in self.workers):
            self.now, _, watch, event = heapq.heappop(self._events)
            self._to_come -= not watch
            # Now and then: it takes longer than an event.
            if watch and not self._to_come and not most % 16 and (self._nobody_waits() or self._has_waited_long()):
                break
            self._stands_since = self._stands_since if watch else self.now
            event()
            most -= 1
            assert most, "the job goes on for ever"
        return self.ended

    def _nobody_waits(self) -> bool:
        return all(
            worker.left is not None
            or worker.is_at_work()
            or worker.dead_at <= self.now
            or worker.whole.until(self.now) == FOREVER
            for worker in self.workers
        )

    def _has_waited_long(self) -> bool:
        """Return whether a wait is longer than a watch may need to let programs go on."""
        spans = (span for worker in self.workers for still in (worker.watch, worker.whole) for span in still.spans)
        still = sum(end - begin for begin, end in spans if end < FOREVER)
        return bool(self.limits.waiting) and self.now > self._stands_since + 3 * self.limits.program + 200 + still

    def start(self, worker: Worker, steps: Steps) -> None:
        self.at(self.now, lambda: self._advance(worker, steps))

    def end(self, text: str, about: tuple[int, ...]) -> None:
        """End the job by a watch; the first word counts."""
        self.ended = self.ended or Ended(self.now, text, about)

    def _advance(self, worker: Worker, steps: Steps) -> None:
        time = max(self.now, worker.whole.until(self.now))
        if self.now >= worker.dead_at:
            return
        if time > self.now:
            self.at(time, lambda: self._advance(worker, steps))
            return
        self.progress = self.now
        for what in steps:
            if callable(what):
                if what():
                    continue
                worker.blocked.append((what, steps))
                return
            if what > 0:
                self.at(self.now + what, lambda: self._advance(worker, steps))
                return

    def poke(self, worker: Worker, watch: bool = False) -> None:
        """Wake a worker: something has changed that it may wait for."""
        if worker.blocked:
            self.at(self.now, lambda: self._look_again(worker), watch)

    def _look_again(self, worker: Worker) -> None:
        if (time := worker.whole.until(self.now)) > self.now:
            self.at(time, lambda: self._look_again(worker))
            return
        if self.now >= worker.dead_at:
            return
        waiting, worker.blocked = worker.blocked, []
        for condition, steps in waiting:
            if condition():
                self._advance(worker, steps)
            else:
                worker.blocked.append((condition, steps))

    def arrives(self, key: Any) -> float:
        """Return when a message that is sent now arrives: those of one pair keep their order."""
        time = max(self.now + self.network.delay(), self._last.get(key, 0.0))
        self._last[key] = time
        return time

    # --- programs ---

    def join(self, watch: Watch, team: tuple[int, ...]) -> Callable[[], bool]:
        met = self._met[watch.world, team]
        met[watch.rank] += 1
        mine = met[watch.rank]
        if all(met[rank] >= mine for rank in team):
            for rank in team:
                self.poke(watch.world.watches[rank].worker)
        return lambda: all(met[rank] >= mine for rank in team)

    def meet(self, worker: Worker, team: tuple[int, ...]) -> Callable[[], bool]:
        """Let workers of the job make a communicator that no world knows of yet; return whether all have come."""
        met = self._met["communicator", team]
        met[worker.rank] += 1
        mine = met[worker.rank]
        for rank in team:
            self.poke(self.workers[rank])
        return lambda: all(met[rank] >= mine for rank in team)

    def send(self, watch: Watch, dest: int) -> Callable[[], bool]:
        pair = self._sent[watch.world, watch.rank, dest]
        pair[0] += 1
        mine = pair[0]
        self.poke(watch.world.watches[dest].worker)
        return lambda: self.network.buffers or pair[1] >= mine

    def receive(self, watch: Watch, source: int) -> Callable[[], bool]:
        pair = self._sent[watch.world, source, watch.rank]
        pair[1] += 1
        mine = pair[1]
        self.poke(watch.world.watches[source].worker)
        return lambda: pair[0] >= mine
