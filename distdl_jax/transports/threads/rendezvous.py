"""The rendezvous of the workers of one process: every operation waits here for its partners, and errors are detected.

Nothing is buffered: a send waits for its receive, and a collective for its team, as in the simulation of
`programs.matching`. So a worker is blocked exactly while its operation waits here, for known partners. If they wait for
each other in a cycle, or for one that has ended its program, none of them can ever continue: then all workers raise,
immediately.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np

from distdl_jax.errors import PlanError, SetupError
from distdl_jax.transports.threads.one_reader import others_may_read
from distdl_jax.transports.threads.participant import (
    AGREEMENT,
    Participant,
    amounts_text,
    deadlock_text,
    wait_text,
)
from distdl_jax.transports.world import Workers
from distdl_jax.watchdog.programs.ir import Operation
from distdl_jax.watchdog.programs.matching import collective, expected, find_cycle, fit, sent
from distdl_jax.watchdog.watch.clock import LINES, last_line


class WorkerStopped(BaseException):
    """Ends a worker whose run has ended: another failed, or the user interrupted it. Not an `Exception`."""


class Rendezvous:
    """The rendezvous of the workers of one world."""

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self.workers = tuple(Participant(rank, size, self._lock) for rank in range(size))
        self._failures = 0
        self._failure = ""
        self._stopped = ""
        self._said = frozenset[tuple[float, str]]()

    def begin(self) -> None:
        """Start the next program; failures of the previous one are forgotten."""
        with self._lock:
            for worker in self.workers:
                worker.ended = False
                worker.failures_seen = self._failures

    def perform(self, rank: int, operation: Operation, given: Any) -> Any:
        """Carry out one operation of a worker, wait until it is complete, and return the worker's result.

        **Raises:** `PlanError`, on all workers, if some of them can never continue; `WorkerStopped` after `stop`.
        """
        me = self.workers[rank]
        with others_may_read(), self._lock:
            self._raise_if_failed(me)
            if me.operation is not None:
                raise SetupError(
                    f"Worker {rank} is about to run {operation}, while its {me.operation} runs in another thread. A "
                    "worker of dj.simulate communicates in its own thread, on its own device: don't put arrays on a "
                    "device by hand (`jax.device_put(x, device)`)."
                )
            me.begin(operation, given)
            try:
                # The last to arrive completes the operation; whoever makes it impossible for all to go on says so at
                # once. So no clock is needed: a job of threads can't hang.
                if (problem := self._match(me)) is not None:
                    self._fail(problem)
                elif stuck := self._stuck(me):
                    self._fail(deadlock_text(stuck))
                while me.waits:
                    me.wake.wait()
                if me.gave_up:
                    self._raise_if_failed(me)
                return me.end()
            finally:
                me.operation = None

    def tell(self, team: Workers, decision: Any) -> None:
        """Give the other workers of `team` the decision of the first of them."""
        with self._lock:
            for worker in (self.workers[rank] for rank in team[1:]):
                if worker.listens and worker.operation is not None and worker.operation.team == team:
                    worker.result = decision
                    worker.release()

    def leave(self, rank: int) -> None:
        """Record that a worker's program has ended, so that workers stop waiting for it."""
        with self._lock:
            me = self.workers[rank]
            me.ended = True
            for worker in self.workers:
                if stuck := self._stuck(worker):
                    self._fail(deadlock_text(stuck))

    def stop(self, reason: str) -> None:
        """End every worker that is here, or arrives from now on."""
        with self._lock:
            self._stopped = self._stopped or reason
            for worker in self.workers:
                worker.give_up()

    def line_about_a_wait(self) -> str:
        """Return a line about all waiting workers, where and for whom, if due: once for each place."""
        with self._lock:
            waiting = [worker for worker in self.workers if worker.waits]
            first = min(waiting, key=lambda worker: worker.since, default=None)
            if first is None or (seconds := monotonic() - first.since) < LINES[0]:
                return ""
            if (last_line(LINES, seconds), first.place()) in self._said:
                return ""
            places = [worker.place() for worker in waiting]
            self._said = self._said.union((line, place) for line in LINES if line <= seconds for place in places)
            others = tuple(worker.rank for worker in waiting if worker is not first)
            awaited = dict.fromkeys(rank for ranks in self._waits(first).values() for rank in ranks)
            running = [self.workers[rank] for rank in awaited if not self.workers[rank].waits]
            return wait_text(first, seconds, running, others)

    def _fail(self, text: str) -> None:
        self._failures += 1
        self._failure = text
        for worker in self.workers:
            worker.give_up()

    def _raise_if_failed(self, me: Participant) -> None:
        # Even if all are being stopped for it: a worker may know the reason of the failure.
        if me.failures_seen < self._failures and not me.ended:
            me.failures_seen = self._failures
            me.raised = PlanError(self._failure)
            raise me.raised
        if self._stopped:
            me.raised = WorkerStopped(self._stopped)
            raise me.raised

    def _match(self, me: Participant) -> str | None:
        """Match a worker's new operation as far as possible; return a sentence if partners disagree."""
        operation = me.operation
        assert operation is not None
        if not me.meets:
            for sender, receiver in ((me, operation.dest), (operation.source, me)):
                if (problem := self._pass_on(self._worker(sender), self._worker(receiver), me)) is not None:
                    return problem
            return None
        team = [self.workers[rank] for rank in operation.team]
        for other in team:
            if other.is_at(operation.team) and collective(other.operation) != collective(operation):
                return amounts_text(other, me)
        if all(other.is_at(operation.team) for other in team):
            _complete(operation, team)
            for other in team:
                other.meets = False
                if other is not me and not other.waits:
                    other.wake.notify()
        return None

    def _worker(self, who: Participant | int | None) -> Participant | None:
        return self.workers[who] if isinstance(who, int) else who

    def _pass_on(self, sender: Participant | None, receiver: Participant | None, me: Participant) -> str | None:
        """Pass the message from one worker to the other, if their operations match."""
        if sender is None or receiver is None or not fit(sender, receiver):
            return None
        if sent(sender) != expected(receiver):
            return amounts_text(receiver if sender is me else sender, me)
        # Data from a compiled program is a copy already, which nothing else refers to.
        receiver.result = sender.given
        sender.sends = receiver.receives = False
        other = receiver if sender is me else sender
        if other is not me and not other.waits:
            other.wake.notify()
        return None

    def _awaited(self, rank: int) -> list[int]:
        """Return the workers without which this one can't continue."""
        worker, operation = self.workers[rank], self.workers[rank].operation
        if operation is None or not worker.waits:
            return []
        if worker.listens:
            return [operation.team[0]]
        if worker.meets:
            return [other for other in operation.team if not self.workers[other].is_at(operation.team)]
        halves = [operation.dest if worker.sends else None, operation.source if worker.receives else None]
        return [other for other in halves if other is not None]

    def _waits(self, start: Participant) -> dict[int, list[int]]:
        """Return the workers that `start` waits for, those that these wait for if they wait, and so on, by rank."""
        waits: dict[int, list[int]] = {}
        ranks = [start.rank]
        for rank in ranks:
            if rank not in waits:
                waits[rank] = self._awaited(rank)
                ranks.extend(other for other in waits[rank] if self.workers[other].waits)
        return waits

    def _stuck(self, start: Participant) -> list[Participant]:
        """Return workers that can never continue, each waiting for the next: a pair of which the second has ended its
        program, or the shortest cycle through `start`; none if `start` waits for running workers.
        """
        waits = self._waits(start)
        for rank, others in waits.items():
            if ended := [self.workers[other] for other in others if self.workers[other].ended]:
                return [self.workers[rank], ended[0]]
        if not any(start.rank in others for others in waits.values()):
            return []
        return [self.workers[rank] for rank in find_cycle(start.rank, lambda rank: waits.get(rank, ()))]


def _complete(operation: Operation, team: list[Participant]) -> None:
    """Return each worker's result of a collective at which all have arrived."""
    first = team[0]
    match operation.kind:
        case kind if kind == AGREEMENT:
            first.result = {worker.rank: worker.given for worker in team}
            for worker in team[1:]:
                worker.listens = True
        case "bcast":
            for worker in team[1:]:
                worker.result = first.given
        case _:
            total = _reduced(operation.op, [worker.given for worker in team])
            for worker in team if operation.kind == "allreduce" else team[:1]:
                worker.result = total


_REDUCTIONS: dict[str, Callable[..., Any]] = {"SUM": np.add, "MAX": np.maximum}


def _reduced(op: str, blocks: list[Any]) -> Any:
    """Reduce in the order of the team, independent of arrival; without warnings about infinities, as MPI does."""
    total = np.array(blocks[0])
    with np.errstate(all="ignore"):
        for block in blocks[1:]:
            _REDUCTIONS[op](total, block, out=total)
    return total
