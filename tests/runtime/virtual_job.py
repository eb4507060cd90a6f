"""A job in virtual time, with the real reporters and the real coordinator: only programs and the network are played.

Any delay is possible; a watch, a worker or the whole job may stand still for a while, or for ever. By MPI's rules the
n-th collective of a team meets the n-th of every other member, messages between two workers keep their order, and a
send may wait for its receive.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, NamedTuple

from virtual_worker import FOREVER, Function, Steps, Worker

from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.calls import Calls
from distdl_jax.watchdog.coordinator import Coordinator
from distdl_jax.watchdog.messages import EndJob, Fail
from distdl_jax.watchdog.needs import takes_all

TURN = 0.05  # seconds between two turns of a watch


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
    """The workers of one job, and the events to come."""

    def __init__(self, size: int, limit: float, network: Network, random: Random) -> None:
        self.size, self.network, self.random = size, network, random
        self.limits = TimeLimits(limit, limit)
        self.now = self.progress = 0.0
        self.ended: Ended | None = None
        self.coordinator = Coordinator(size, self.limits)
        self.plans: set[str] = set()
        self.workers = [Worker(self, rank) for rank in range(size)]
        self._events: list[tuple[float, int, bool, Callable[[], None]]] = []
        self._to_come = 0  # events that are not the watch's own
        self._stands_since = 0.0
        self._order = count()
        self._last: dict[Any, float] = {}
        self._met: dict[Any, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._sent: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
        self.agreed = 0
        self._tick_at = FOREVER

    # --- events ---

    def at(self, time: float, event: Callable[[], None], watch: bool = False) -> None:
        if time < FOREVER:
            self._to_come += not watch
            heapq.heappush(self._events, (time, next(self._order), watch, event))

    def run(self, most: int = 100_000) -> Ended | None:
        """Until the watch ends the job, all programs have ended, or nothing can happen any more."""
        while self._events and self.ended is None and not all(worker.left is not None for worker in self.workers):
            self.now, _, watch, event = heapq.heappop(self._events)
            self._to_come -= not watch
            if watch and not self._to_come and self.limits.waiting and self.now > self._stands_since + self._patience():
                break
            self._stands_since = self._stands_since if watch else self.now
            event()
            most -= 1
            assert most, "the job goes on for ever"
        return self.ended

    def _patience(self) -> float:
        """For how long a watch may have something to do that lets programs go on."""
        spans = (span for worker in self.workers for still in (worker.watch, worker.whole) for span in still.spans)
        return 3 * self.limits.waiting + 200 + sum(end - begin for begin, end in spans if end < FOREVER)

    def start(self, worker: Worker, steps: Steps) -> None:
        self.at(self.now, lambda: self._advance(worker, steps))

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
        """Something has changed that it may wait for."""
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

    def _arrives(self, key: Any) -> float:
        """When a message that is sent now arrives: those of one pair keep their order."""
        time = max(self.now + self.network.delay(), self._last.get(key, 0.0))
        self._last[key] = time
        return time

    # --- programs ---

    def join(self, worker: Worker, team: tuple[int, ...]) -> Callable[[], bool]:
        met = self._met[team]
        met[worker.rank] += 1
        mine = met[worker.rank]
        if all(met[rank] >= mine for rank in team):
            for rank in team:
                self.poke(self.workers[rank])
        return lambda: all(met[rank] >= mine for rank in team)

    def send(self, worker: Worker, dest: int) -> Callable[[], bool]:
        pair = self._sent[worker.rank, dest]
        pair[0] += 1
        mine = pair[0]
        self.poke(self.workers[dest])
        return lambda: self.network.buffers or pair[1] >= mine

    def receive(self, worker: Worker, source: int) -> Callable[[], bool]:
        pair = self._sent[source, worker.rank]
        pair[1] += 1
        mine = pair[1]
        self.poke(self.workers[source])
        return lambda: pair[0] >= mine

    def deliver_agreement(self, source: int, dest: int, message: tuple[str, Calls]) -> None:
        worker = self.workers[dest]

        def arrive() -> None:
            worker.arrived.append((source, *message))
            self.poke(worker)

        self.at(self._arrives(("agreement", source, dest)), arrive)

    def agreed_number(self, worker: Worker, function: Function) -> int:
        """The number of the call on whose plan all have agreed, by the first worker; 0 where it doesn't count."""
        if worker.rank == 0:
            programs = function.programs()
            self.coordinator = self.coordinator.remember(function.name, programs)
            self.agreed = 0
            if takes_all(programs):
                self.agreed = 1 + max(w.log.number - w.log.inside for w in self.workers)
                self.plans.add(function.name)
        return self.agreed

    # --- the watch ---

    def look_soon(self, worker: Worker, within: float = TURN) -> None:
        self._look_at(worker, self.now + within * self.random.random())

    def _look_at(self, worker: Worker, time: float) -> None:
        if time < worker.turn_at:
            worker.turn_at = time
            self.at(time, lambda: self._turn(worker) if worker.turn_at == time else None, watch=True)

    def _can_watch(self, worker: Worker, again: Callable[[], None]) -> bool:
        if self.now >= worker.dead_at:
            return False
        time = max(worker.watch.until(self.now), worker.whole.until(self.now))
        if time > self.now:
            self.at(time, again, watch=True)
            return False
        return True

    def _awake(self, worker: Worker) -> float:
        return worker.watch.awake(self.now) + worker.whole.awake(self.now) - self.now

    def _turn(self, worker: Worker) -> None:
        worker.turn_at = FOREVER
        if not self._can_watch(worker, lambda: self._look_at(worker, self.now)):
            return
        now = self._awake(worker)
        worker.reporter, posts, orders = worker.reporter.look(worker.facts(), now, worker.detail)
        for message in posts:
            self.to_coordinator(worker, message)
        if orders.finish is not None:
            self.ended = self.ended or Ended(self.now, orders.finish, (0,))
        if (wakes := worker.reporter.wakes_at(now)) < FOREVER:
            self._look_at(worker, self.now + max(wakes - now, 0.0) + TURN * self.random.random())

    def to_coordinator(self, worker: Worker, message: Any) -> None:
        self.at(self._arrives(("watch", worker.rank, 0)), lambda: self._hear(message), watch=True)

    def _hear(self, message: Any) -> None:
        first = self.workers[0]
        if not self._can_watch(first, lambda: self._hear(message)):
            return
        self.coordinator, posts = self.coordinator.hear(message, self._awake(first))
        self._post(posts)
        self._tick()

    def _tick(self) -> None:
        first = self.workers[0]
        if not self._can_watch(first, self._tick):
            return
        now = self._awake(first)
        self.coordinator, posts = self.coordinator.tick(now)
        self._post(posts)
        wakes = self.now + self.coordinator.wakes_at() - now
        if wakes < FOREVER and not self.now < self._tick_at <= wakes:
            self._tick_at = time = max(wakes, self.now + 1e-3)
            self.at(time, lambda: self._tick() if self._tick_at == time else None, watch=True)

    def _post(self, posts: Any) -> None:
        for rank, message in posts:
            if isinstance(message, EndJob | Fail):
                self.ended = self.ended or Ended(self.now, message.text, message.about)
            arrives = self._arrives(("watch", 0, rank))
            self.at(arrives, lambda rank=rank, message=message: self._told(rank, message), watch=True)

    def _told(self, rank: int, message: Any) -> None:
        worker = self.workers[rank]
        if not self._can_watch(worker, lambda: self._told(rank, message)):
            return
        worker.reporter, _ = worker.reporter.hear(message, self._awake(worker))
        self.poke(worker, watch=True)  # it may be told to go on
        self.look_soon(worker)
