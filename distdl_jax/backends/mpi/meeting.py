"""Meetings: how workers exchange what they must agree on while they trace, without ever waiting in silence.

A meeting has a subject and a team. Every worker of the team sends its contribution to the team's first worker, which
replies to all. Between two workers messages keep their order, so in a correct program the next message of a partner is
about the same subject; where it isn't, the two run different programs, and all workers get to know it. Nothing blocks:
a worker that waits looks for messages, and for word from its watch (`watch`), in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
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
        self._unread: list[tuple[int, Envelope]] = []
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
                return self._receive(world, {hub}, mine)[1]
            contributions, silent = {hub: contribution}, dict.fromkeys(others)
            while silent:
                board.still_waits_for(tuple(silent))
                worker, data = self._receive(world, silent, mine)
                del silent[worker]
                contributions[worker] = data
            decision = decide(contributions)
            for worker in others:
                self._send(mine._replace(data=decision), worker)
            return decision

    def _send(self, envelope: Envelope, to: int) -> None:
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self._comm.isend(envelope, to))

    def has_mail(self) -> bool:
        """Whether there is a message that the worker has not looked at."""
        return self._comm.iprobe()

    def _receive(self, world: World, sources: Container[int], mine: Envelope) -> tuple[int, Any]:
        """Who of `sources` is the next to say something, which must be about the same as `mine`, and what."""
        source, theirs = self._next(world, sources)
        if (theirs.subject, theirs.team) != (mine.subject, mine.team):
            world.watch.fail(
                f"The workers' programs differ: worker {world.rank} is about to run {mine.in_words()}, but worker "
                f"{source} {theirs.in_words()}. {ONE_PROGRAM}"
            )
        return source, theirs.data

    def _next(self, world: World, sources: Container[int]) -> tuple[int, Envelope]:
        """The oldest message of any of `sources`, and whose it is; other messages are kept."""
        looks, status = 0, MPI.Status()
        while True:
            # Of an earlier epoch is what failed meetings left; of a later one what comes from who knows of a failure
            # that this worker has yet to hear of.
            self._unread = [letter for letter in self._unread if letter[1].epoch >= self.epoch]
            for place, (source, envelope) in enumerate(self._unread):
                if source in sources and envelope.epoch == self.epoch:
                    del self._unread[place]
                    return source, envelope
            if self.has_mail():
                envelope = self._comm.recv(status=status)
                self._unread.append((status.source, envelope))
                continue
            world.watch.raise_if_failed()
            looks += 1
            time.sleep(0 if looks < SPINS else min(LONGEST_SLEEP, 1e-5 * (looks - SPINS)))
