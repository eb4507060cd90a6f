"""The control channel: how workers agree on something while they trace, without ever waiting silently.

An agreement has a label and a team. Every worker of the team sends its contribution to the team's first worker, which
replies to all; in a large team, both are relayed along a tree. Messages between two workers keep their order, so in a
correct program the next message of a partner has the same label; if not, the two run different programs, which is
reported to all workers. Nothing blocks: a waiting worker alternately looks for messages, and for failures known to its
monitor.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Container
from typing import Any, NamedTuple, NoReturn, Protocol

import jax
from mpi4py import MPI

from distdl_jax.errors import one_program, shown_label
from distdl_jax.plans.trees import gathered
from distdl_jax.source_lines import user_line
from distdl_jax.transports.world import Workers
from distdl_jax.watchdog.watch.call_log import CallLog, Calls
from distdl_jax.watchdog.watch.log import log
from distdl_jax.watchdog.watch.status import worker_status


class MPIMailbox:
    """One worker's mailbox. Nothing blocks; between two workers messages keep their order."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._sent: list[MPI.Request] = []
        self._everyone = MPI.REQUEST_NULL

    def post(self, message: Any, to: int) -> None:
        """Send to a worker."""
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self._comm.isend(message, to))

    def has_message(self) -> bool:
        """Return whether there is a message."""
        return self._comm.iprobe()

    def next(self) -> tuple[int, Any] | None:
        """Return the oldest message, after its sender; None if there is none."""
        if not self.has_message():
            return None
        origin = MPI.Status()
        message = self._comm.recv(status=origin)
        return origin.source, message

    def begin_barrier(self) -> None:
        """Tell all workers that this one has arrived."""
        self._everyone = self._comm.Ibarrier()

    def has_met(self) -> bool:
        """Return whether all workers have started the barrier."""
        return self._everyone.Test()


Contributions = dict[int, Any]

SPINS = 200
"""The number of consecutive looks of a waiting worker before it starts to sleep in between."""

LONGEST_SLEEP = 1e-3
"""Seconds between two looks of a worker that has waited for some time."""


class Monitor(Protocol):
    """Knowledge of other workers: `epoch` counts failed agreements so far, `calls` has this worker's calls."""

    epoch: int
    calls: CallLog

    def raise_if_failed(self) -> None:
        """Raise the common error of all workers, if one of them has failed to agree."""

    def fail(self, text: str, about: Workers = ()) -> NoReturn:
        """Make all workers raise `text`, which concerns the given workers."""


class Envelope(NamedTuple):
    """A message: `epoch` counts the failures before it, to recognise leftovers of these; and the sender's `calls`
    reveal messages of a call that the receiver has passed."""

    epoch: int
    label: str
    team: Workers
    where: str
    data: Any
    calls: Calls

    def describe(self, other: Envelope) -> str:
        return f"{shown_label(self.label, other.label)} ({self.where})"


def _by_worker(team: Workers, contributions: dict[bytes, Workers]) -> Contributions:
    """Return each worker's contribution; equal ones are the same object."""
    values: Contributions = {}
    for data, workers in contributions.items():
        values.update(dict.fromkeys(workers, pickle.loads(data)))
    return {worker: values[worker] for worker in team}


class ControlChannel:
    """The agreements of one worker in one world, over a mailbox that nothing else uses.

    - `sent`, `received`: the number of messages to, and from, each other worker: proof for the watchdog that none is
      pending.
    """

    def __init__(self, mailbox: MPIMailbox, rank: int, monitor: Monitor) -> None:
        self._mailbox = mailbox
        self._rank = rank
        self.monitor = monitor
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self._unread: list[tuple[int, Envelope]] = []

    def agree(self, team: Workers, label: str, contribution: Any, decide: Callable[[Contributions], Any] = dict) -> Any:
        """Return the decision of the team's first worker on all contributions, by world rank; collective in `team`.

        **Raises:** `PlanError`, on all workers of the world, if some worker of the team is about to do something else,
        or has left.
        """
        if len(team) == 1:
            return decide({self._rank: contribution})
        where = user_line() + ("; jax_disable_jit" if jax.config.jax_disable_jit else "")  # type: ignore[attr-defined, unused-ignore]
        parent, children = gathered(team, self._rank)
        log.debug("the team %s agrees on %s, at %s", team, label, where)
        self.monitor.raise_if_failed()
        own = Envelope(self.monitor.epoch, label, team, where, None, self.monitor.calls.summary())
        # By contribution: equal contributions are sent, and read, once.
        contributions: dict[bytes, Workers] = {pickle.dumps(contribution): (self._rank,)}
        with worker_status().agreeing(self, label, where, children if parent is None else children or (parent,)):
            silent = dict.fromkeys(children)
            while silent:
                worker_status().still_waits_for(tuple(silent))
                worker, received = self._receive(silent, own)
                del silent[worker]
                for data, workers in received.items():
                    contributions[data] = contributions.get(data, ()) + workers
            if parent is None:
                worker_status().still_waits_for(())  # a decision may take a while
                decision = decide(_by_worker(team, contributions))
                packed = pickle.dumps(decision)
            else:
                self._post(own._replace(data=contributions), parent)
                worker_status().still_waits_for((parent,))
                packed = self._receive({parent}, own)[1]
            for worker in children:
                self._post(own._replace(data=packed), worker)
            return decision if parent is None else pickle.loads(packed)

    def _post(self, envelope: Envelope, to: int) -> None:
        self.sent[to] += 1  # before it is sent: at worst one too many seems to be on its way
        self._mailbox.post(envelope, to)

    def _receive(self, sources: Container[int], own: Envelope) -> tuple[int, Any]:
        """Return the next of `sources` to send, which must have the same label as `own`, and its contribution."""
        source, received = self._next(sources)
        if (received.label, received.team) != (own.label, own.team):
            self.monitor.fail(
                f"The workers' programs differ: worker {self._rank} is about to run {own.describe(received)}, but "
                f"worker {source} {received.describe(own)}. {one_program((own.label, received.label))}",
                (self._rank, source),
            )
        return source, received.data

    def _next(self, sources: Container[int]) -> tuple[int, Envelope]:
        """Return the oldest message of any of `sources`, after its sender; keep other messages."""
        looks = 0
        while True:
            # Messages of earlier epochs are leftovers of failed agreements; those of a later one come from a worker
            # that knows of a failure not yet known here.
            epoch = self.monitor.epoch
            self._unread = [(source, envelope) for source, envelope in self._unread if envelope.epoch >= epoch]
            if self._unread:
                calls = self.monitor.calls.summary()
                # Messages on which the sender agrees alone, in a call that this worker has passed; and messages to keep
                # until this worker has finished a call that their sender has passed.
                self._unread = [unread for unread in self._unread if not calls.has_passed(unread[1].calls)]
                waits = {source for source, envelope in self._unread if envelope.calls.has_passed(calls)}
            for place, (source, envelope) in enumerate(self._unread):
                if source in sources and source not in waits and envelope.epoch == epoch:
                    del self._unread[place]
                    return source, envelope
            if (received := self._mailbox.next()) is not None:
                self._unread.append(received)
                self.received[received[0]] += 1
                continue
            self.monitor.raise_if_failed()
            looks += 1
            time.sleep(0 if looks < SPINS else min(LONGEST_SLEEP, 1e-5 * (looks - SPINS)))
