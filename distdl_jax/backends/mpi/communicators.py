"""Communicators that data moves over: made when first needed, cached by team, never freed.

Compiled programs hold the handle of the communicator that they use, so none is ever freed.
"""

from __future__ import annotations

from mpi4py import MPI

from distdl_jax.backends.base import Workers
from distdl_jax.errors import SetupError
from distdl_jax.watchdog.exit_hooks import reporting_errors
from distdl_jax.watchdog.log import log


class Communicators:
    """The communicators of the teams of one world, as one worker has made them. Made by all workers of `comm`."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        # One of its own, since the user's may be freed.
        self._comm = comm.Dup()
        self.rank = comm.Get_rank()
        self._everyone = tuple(range(comm.Get_size()))
        # Messages between two workers use it whatever the operation, so all workers make it now, at one place.
        self._of_team: dict[Workers, MPI.Intracomm] = {self._everyone: reporting_errors(self._comm.Dup())}

    @property
    def messages(self) -> MPI.Intracomm:
        """That of the whole world, in which every worker's rank is its world rank."""
        return self._of_team[self._everyone]

    def of_team(self, team: Workers) -> MPI.Intracomm:
        """That of `team` (in the order of its ranks); its first use is collective in it."""
        if team not in self._of_team:
            if self.rank not in team:
                raise SetupError(f"Worker {self.rank} is not in the team {team}, so it has no communicator of it.")
            group = self._comm.Get_group().Incl(team)
            log.info("a communicator of the team %s is made", team)
            self._of_team[team] = reporting_errors(self._comm.Create_group(group))
            group.Free()
        return self._of_team[team]

    def team_of(self, comm: MPI.Comm) -> Workers:
        """The world ranks of a communicator's workers, in the order of its ranks."""
        for team, known in self._of_team.items():
            if known == comm:
                return team
        return tuple(MPI.Group.Translate_ranks(comm.Get_group(), None, self._comm.Get_group()))

    def __len__(self) -> int:
        """How many have been made."""
        return len(self._of_team)
