"""Communicators that data moves over: made when first needed, cached by team, never freed.

Compiled programs hold the handle of the communicator that they use, so none is ever freed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache

from mpi4py import MPI

from distdl_jax.errors import SetupError
from distdl_jax.tracing.world import Workers
from distdl_jax.watchdog.watch.abort import end_the_job
from distdl_jax.watchdog.watch.log import log
from distdl_jax.watchdog.watch.thread_sampler import main_line

BEFORE_ABORT = 2.0
"""Seconds that the watchdog is given when MPI fails: it compares what was called, and may find out more."""


class Communicators:
    """The communicators of the teams of one world, as one worker has made them. Made by all workers of `comm`."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        # One of its own, since the user's may be freed.
        self._comm = comm.Dup()
        self.rank = comm.Get_rank()
        self._everyone = tuple(range(comm.Get_size()))
        # Messages between two workers use it whatever the operation, so all workers make it now, at one place.
        self._of_team: dict[Workers, MPI.Intracomm] = {self._everyone: _reporting_errors(self._comm.Dup())}

    @property
    def messages(self) -> MPI.Intracomm:
        """That of the whole world, in which every worker's rank is its world rank."""
        return self._of_team[self._everyone]

    def of_team(self, team: Workers) -> MPI.Intracomm:
        """Return the communicator of `team` (in the order of its ranks); its first use is collective in it."""
        if team not in self._of_team:
            if self.rank not in team:
                raise SetupError(f"Worker {self.rank} is not in the team {team}, so it has no communicator of it.")
            group = self._comm.Get_group().Incl(team)
            log.info("a communicator of the team %s is made", team)
            self._of_team[team] = _reporting_errors(self._comm.Create_group(group))
            group.Free()
        return self._of_team[team]

    def team_of(self, comm: MPI.Comm) -> Workers:
        """Return the world ranks of a communicator's workers, in the order of its ranks."""
        for team, known in self._of_team.items():
            if known == comm:
                return team
        return tuple(MPI.Group.Translate_ranks(comm.Get_group(), None, self._comm.Get_group()))

    @property
    def all_of_them(self) -> Iterable[tuple[Workers, MPI.Intracomm]]:
        """Those that have been made, with their teams."""
        return self._of_team.items()

    def __len__(self) -> int:
        """Return how many have been made."""
        return len(self._of_team)


def _reporting_errors(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return `comm`, with an error handler that explains a failed operation before MPI's own words."""
    comm.Set_errhandler(_failed_operation())
    return comm


@cache
def _failed_operation() -> MPI.Errhandler:
    def end(comm: MPI.Comm, code: int) -> None:
        time.sleep(BEFORE_ABORT)
        end_the_job(
            f"Worker {MPI.COMM_WORLD.Get_rank()}: MPI failed in a compiled program, at {main_line()}. Most "
            "often a message came in that is of another operation, or of another length or dtype: the workers run "
            f"different programs. dj.jit compares them before they run. MPI says: {MPI.Get_error_string(code)}\n"
        )

    return MPI.Comm.Create_errhandler(end)
