"""Communicators: made when first needed, cached by team, never freed; and the checks when a world is opened.

Compiled programs hold the handle of the communicator that they use, so none is ever freed. JAX runs asynchronously,
so what mpi4py does while tracing (control) and what mpi4jax does while running (data) never share a communicator.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Literal

from mpi4py import MPI

from distdl_jax.backends.mpi.memory import prefer_huge_pages
from distdl_jax.errors import SetupError

Purpose = Literal["control", "data"]


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
        self._cache: dict[tuple[Purpose, tuple[int, ...]], MPI.Intracomm] = {}
        if self._comm is not None:
            # Messages between two workers use it whatever the operation, so all workers make it now, at one place.
            self._cache["data", tuple(range(size))] = self._comm.Dup()

    @property
    def messages(self) -> MPI.Intracomm:
        """The data communicator of the whole world, in which every worker's rank is its world rank."""
        return self.communicator("data", tuple(range(self.size)))

    def communicator(self, purpose: Purpose, team: tuple[int, ...]) -> MPI.Intracomm:
        """The communicator of `team` (world ranks, in the order of its ranks); its first use is collective in it."""
        key = (purpose, team)
        if key not in self._cache:
            if self._comm is None:
                raise SetupError("This world was made for planning, without a communicator: no data can move in it.")
            if self.rank not in team:
                raise SetupError(f"Worker {self.rank} is not in the team {team}, so it has no communicator of it.")
            group = self._comm.Get_group().Incl(team)
            self._cache[key] = self._comm.Create_group(group, tag=0 if purpose == "control" else 1)
            group.Free()
        return self._cache[key]

    def communicator_count(self) -> dict[str, int]:
        """How many communicators this worker has made, by purpose."""
        purposes = [purpose for purpose, _ in self._cache]
        return {purpose: purposes.count(purpose) for purpose in ("control", "data")}


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
    _check_thread_support()
    if comm.Get_size() > 1:
        _abort_on_uncaught_exceptions()
    prefer_huge_pages()
    world = World(comm, comm.Get_rank(), comm.Get_size())
    comm.Set_attr(_world_attribute(), world)
    return world


def _check_thread_support() -> None:
    names = {
        MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
        MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
        MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    }
    if (provided := MPI.Query_thread()) < MPI.THREAD_MULTIPLE:
        raise SetupError(
            f"MPI was started with {names[provided]}, but JAX calls MPI from its own threads, which takes "
            "MPI_THREAD_MULTIPLE. Import mpi4py (or distdl_jax) before anything else starts MPI, leave "
            "mpi4py.rc.thread_level as it is, and use an MPI library built with thread support."
        )


_ExceptionHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _abort_on_uncaught_exceptions() -> None:
    """Make an exception that nobody catches on one worker end the whole job: the others would wait for it for ever."""
    if getattr(sys.excepthook, "ends_mpi_job", False):
        return
    previous: _ExceptionHook = sys.excepthook

    def end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        rank = MPI.COMM_WORLD.Get_rank()
        try:
            if previous is sys.__excepthook__:
                print(f"Worker {rank} of {MPI.COMM_WORLD.Get_size()} raised; the job ends.", file=sys.stderr)
                traceback.print_exception(kind, error, trace)
            else:
                previous(kind, error, trace)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            MPI.COMM_WORLD.Abort(1)

    end_job.ends_mpi_job = True  # type: ignore[attr-defined]
    sys.excepthook = end_job
