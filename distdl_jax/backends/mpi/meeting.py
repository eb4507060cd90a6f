"""Meetings: how workers exchange what they must agree on while they trace, without ever waiting in silence.

A meeting has a subject and a team. Every worker of the team sends its contribution to the team's first worker, which
replies to all. Between two workers messages keep their order, so in a correct program the next message of a partner is
about the same subject; where it isn't, the two run different programs, and all workers get to know it. Nothing blocks:
a worker that waits looks for messages, and for word from its watch (`watch`), in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from distdl_jax.backends.mpi.board import board, user_line
from distdl_jax.backends.mpi.log import log
from distdl_jax.plans.standstill import ONE_PROGRAM

if TYPE_CHECKING:
    from distdl_jax.backends.mpi.communicators import World

Contributions = dict[int, Any]

SPINS = 200
"""How often a waiting worker looks at once before it begins to sleep in between."""

LONGEST_SLEEP = 1e-3
"""Seconds between two looks of a worker that has waited for some time."""


class Envelope(NamedTuple):
    """What travels: `epoch` counts the failed meetings before it, so that what these left behind is recognised."""

    epoch: int
    subject: str
    team: tuple[int, ...]
    where: str
    data: Any

    def in_words(self) -> str:
        return f"{self.subject} ({self.where})"


class MeetingRoom:
    """The meetings of one worker in one world, over a communicator that nothing else uses."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._sent: list[MPI.Request] = []
        self._early: dict[int, list[Envelope]] = {}
        self.epoch = 0

    def meet(
        self,
        world: World,
        team: tuple[int, ...],
        subject: str,
        contribution: Any,
        decide: Callable[[Contributions], Any],
    ) -> Any:
        """The decision of the team's first worker on all contributions, by world rank; collective in `team`.

        **Raises:** `PlanError`, on all workers of the world, where some worker of the team is about to do something
        else, or has left.
        """
        if len(team) == 1:
            return decide({world.rank: contribution})
        where = user_line()
        hub, others = team[0], team[1:]
        log.debug("meeting of %s about %s, at %s", team, subject, where)
        world.watch.raise_if_failed()
        mine = Envelope(self.epoch, subject, team, where, contribution)
        with board.meeting(self, subject, where, others if world.rank == hub else (hub,)):
            if world.rank != hub:
                self._send(mine, hub)
                return self._receive(world, hub, mine).data
            contributions = {hub: contribution}
            for place, worker in enumerate(others):
                board.still_waits_for(others[place:])
                contributions[worker] = self._receive(world, worker, mine).data
            decision = decide(contributions)
            for worker in others:
                self._send(mine._replace(data=decision), worker)
            return decision

    def _send(self, envelope: Envelope, to: int) -> None:
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self._comm.isend(envelope, to))

    def _receive(self, world: World, source: int, mine: Envelope) -> Envelope:
        """The next message of `source`, which must be about the same as `mine`."""
        theirs = self._next(world, source)
        if (theirs.subject, theirs.team) != (mine.subject, mine.team):
            world.watch.fail(
                f"The workers' programs differ: worker {world.rank} is about to run {mine.in_words()}, but worker "
                f"{source} {theirs.in_words()}. {ONE_PROGRAM}"
            )
        return theirs

    def _next(self, world: World, source: int) -> Envelope:
        if (early := self._early.get(source)) and early[0].epoch == self.epoch:
            return early.pop(0)
        looks = 0
        while True:
            if self._comm.iprobe(source):
                envelope: Envelope = self._comm.recv(source=source)
                if envelope.epoch == self.epoch:
                    return envelope
                if envelope.epoch > self.epoch:
                    # The sender already knows that this meeting has failed.
                    self._early.setdefault(source, []).append(envelope)
                continue
            world.watch.raise_if_failed()
            looks += 1
            time.sleep(0 if looks < SPINS else min(LONGEST_SLEEP, 1e-5 * (looks - SPINS)))
