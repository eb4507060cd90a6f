"""Communicators: made when first needed, cached by team, never freed; and the checks when a world is opened.

Compiled programs hold the handle of the communicator that they use, so none is ever freed. JAX runs asynchronously,
so what mpi4py does while tracing (meetings, the watch) and what mpi4jax does while running never share a communicator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from mpi4py import MPI

from distdl_jax.backends.mpi.board import board, user_line
from distdl_jax.backends.mpi.faults import end_the_job_with_this_worker, reporting_errors
from distdl_jax.backends.mpi.log import log
from distdl_jax.backends.mpi.meeting import Contributions, MeetingRoom
from distdl_jax.backends.mpi.startup import check_launch, check_workers_agree, time_limits
from distdl_jax.backends.mpi.watch import Watch
from distdl_jax.backends.mpi.watchman import watchman
from distdl_jax.errors import SetupError

_FOR_PLANNING = "This world was made for planning, without a communicator: no data can move in it."


class World:
    """The workers of one MPI communicator: what every partition made from it refers to.

    - `size`, `rank`: of the communicator; a worker's *world rank* is its rank here.

    Without a communicator (`World(None, rank, size)`) it plans, but cannot move data: that is how one process can
    work out the partitions of thousands of workers. With one, making it is collective in the communicator.
    """

    def __init__(self, comm: MPI.Intracomm | None, rank: int, size: int) -> None:
        # A communicator of its own, since the user's may be freed.
        self._comm = None if comm is None else comm.Dup()
        self.rank = rank
        self.size = size
        self._cache: dict[tuple[int, ...], MPI.Intracomm] = {}
        if self._comm is not None:
            # Messages between two workers use it whatever the operation, so all workers make it now, at one place.
            self._cache[tuple(range(size))] = reporting_errors(self._comm.Dup())
            self.room = MeetingRoom(self._comm.Dup())
            self.watch = Watch(self, self._comm.Dup(), time_limits())
            if size > 1:
                watchman.add(self.watch)

    def meet(
        self, team: tuple[int, ...], subject: str, contribution: Any, decide: Callable[[Contributions], Any] = dict
    ) -> Any:
        """What the first worker of `team` decides on all contributions (by world rank); see `meeting`."""
        if self._comm is None:
            raise SetupError(_FOR_PLANNING)
        return self.room.meet(self, team, subject, contribution, decide)

    @property
    def messages(self) -> MPI.Intracomm:
        """The data communicator of the whole world, in which every worker's rank is its world rank."""
        return self.communicator(tuple(range(self.size)))

    def communicator(self, team: tuple[int, ...]) -> MPI.Intracomm:
        """The communicator of `team` (world ranks, in the order of its ranks); its first use is collective in it."""
        if team not in self._cache:
            if self._comm is None:
                raise SetupError(_FOR_PLANNING)
            if self.rank not in team:
                raise SetupError(f"Worker {self.rank} is not in the team {team}, so it has no communicator of it.")
            group = self._comm.Get_group().Incl(team)
            log.info("a communicator of the team %s is made", team)
            self._cache[team] = reporting_errors(self._comm.Create_group(group))
            group.Free()
        return self._cache[team]

    def team_of(self, comm: MPI.Comm) -> tuple[int, ...]:
        """The world ranks of a communicator's workers, in the order of its ranks."""
        for team, known in self._cache.items():
            if known == comm:
                return team
        assert self._comm is not None  # who has a communicator has opened the world with one
        return tuple(MPI.Group.Translate_ranks(comm.Get_group(), None, self._comm.Get_group()))

    def communicator_count(self) -> int:
        """How many communicators that data move over this worker has made."""
        return len(self._cache)


_opened: list[World] = []


@cache
def _world_attribute() -> int:
    """Under which key a communicator carries its world. MPI drops it when the communicator is freed, so that a new one
    that happens to get the same handle does not inherit it."""
    return MPI.Comm.Create_keyval()


def open_world(comm: MPI.Intracomm | None = None) -> World:
    """The world of `comm` (default: COMM_WORLD); the same object each time. The first call is collective in `comm`."""
    comm = MPI.COMM_WORLD if comm is None else comm
    known = comm.Get_attr(_world_attribute())
    if isinstance(known, World):
        return known
    check_launch()
    if comm.Get_size() > 1:
        end_the_job_with_this_worker()
        watchman.begin(time_limits().waiting)
    everyone = tuple(range(comm.Get_size()))
    with board.meeting(None, "the first partition of a communicator", user_line(), everyone):
        check_workers_agree(comm)
        world = World(comm, comm.Get_rank(), comm.Get_size())
    comm.Set_attr(_world_attribute(), world)
    _opened.append(world)
    log.info(
        "a world of %d workers is open; the clock ends the job after %g s of waiting", world.size, time_limits().waiting
    )
    return world


if MPI.Is_initialized() and MPI.COMM_WORLD.Get_size() > 1:
    end_the_job_with_this_worker()  # from the import on: the first partition may be what the others wait at


def first_world() -> World:
    """The world that was opened first; that of COMM_WORLD where there is none yet."""
    return _opened[0] if _opened else open_world()
