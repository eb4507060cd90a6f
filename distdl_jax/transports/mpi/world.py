"""Worlds of MPI workers: opened once for each communicator, with the related checks.

JAX runs asynchronously, so mpi4py's messages while tracing (the control channel, the watchdog) and mpi4jax's while
running never share a communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from mpi4py import MPI

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, SetupError
from distdl_jax.settings import current_settings
from distdl_jax.source_lines import user_line
from distdl_jax.transports.mpi.compat import comm_handle
from distdl_jax.transports.mpi.control import ControlChannel, MPIMailbox
from distdl_jax.transports.mpi.launch_checks import check_devices, check_launch, check_workers_agree
from distdl_jax.transports.mpi.transport import Communicators, MPITransport
from distdl_jax.transports.nan_check import refuse_to_run_again
from distdl_jax.transports.world import Workers
from distdl_jax.watchdog.programs.ir import Program
from distdl_jax.watchdog.watch.agent import Agent
from distdl_jax.watchdog.watch.call_log import CallLog
from distdl_jax.watchdog.watch.log import log
from distdl_jax.watchdog.watch.status import worker_status
from distdl_jax.watchdog.watch.thread import watchdog_thread


class MPIWorld:
    """The workers of one MPI communicator. Its construction is collective in the communicator.

    - `size`, `rank`: of the communicator; a worker's *world rank* is its rank here. `members`: all workers, by their
      ranks in COMM_WORLD.
    - `communicators`: for the movement of data.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.may_measure = True
        self.records = False
        self.is_closed = False
        self.members = _members(comm)
        self.communicators = Communicators(comm)
        self.transport = MPITransport(self.communicators)
        self._agent = Agent(MPIMailbox(comm.Dup()), self.rank, self.members, current_settings().timeout)
        self._control = self._agent.channel = ControlChannel(MPIMailbox(comm.Dup()), self.rank, self._agent)
        if self.size > 1:
            watchdog_thread.add(self._agent)

    @property
    def calls(self) -> CallLog:
        return self._agent.calls

    def agree(
        self, team: Workers, label: str, contribution: Any, decide: Callable[[dict[int, Any]], Any] = dict
    ) -> Any:
        if self.is_closed:
            raise SetupError("This partition was made before dj.close(), which has closed its world. Make a new one.")
        worker_status().uses(self)
        if len(team) == 1:
            return decide({self.rank: contribution})
        refuse_to_run_again(self.rank)
        return self._control.agree(team, label, contribution, decide)

    def remember(self, name: str, programs: Mapping[int, Program]) -> None:
        self._agent.remember(name, programs)

    def check_devices(self) -> None:
        check_devices()


def _members(comm: MPI.Intracomm) -> Workers:
    """Return the workers of a communicator, by their ranks in COMM_WORLD."""
    return tuple(MPI.Group.Translate_ranks(comm.Get_group(), None, MPI.COMM_WORLD.Get_group()))


opened: list[MPIWorld] = []
"""The worlds of this process, in the order in which they were opened."""


def known_teams() -> dict[int, Workers]:
    """Return the workers of each communicator for data, by its handle: by their ranks in COMM_WORLD."""
    return {
        comm_handle(comm): tuple(world.members[rank] for rank in team)
        for world in opened
        for team, comm in world.communicators.all_of_them
    }


def close_worlds() -> None:
    """Close all of them; collective in each."""
    watchdog_thread.close()
    for world in opened:
        world.is_closed = True
    opened.clear()


@cache
def _world_attribute() -> int:
    """The key under which a communicator stores its world. MPI drops it when the communicator is freed, so that a new
    one with the same handle does not inherit it."""
    return MPI.Comm.Create_keyval()


@cache
def _leave_before_mpi_ends() -> None:
    """Stop the watchdog if a program calls MPI.Finalize itself; MPI first drops the attributes of COMM_SELF."""
    key = MPI.Comm.Create_keyval(delete_fn=lambda comm, key, value: watchdog_thread.leave())
    MPI.COMM_SELF.Set_attr(key, None)


def open_world(comm: MPI.Intracomm | None = None) -> MPIWorld:
    """Return the world of `comm` (default: COMM_WORLD), the same object each time; the first call is collective in
    `comm`.
    """
    if comm == MPI.COMM_NULL:
        raise InvalidArgumentError("`comm` is MPI.COMM_NULL; a partition needs a communicator with workers in it.")
    if comm is not None and not isinstance(comm, MPI.Intracomm):
        raise InvalidTypeError(f"`comm` (={comm!r}) must be an mpi4py intracommunicator, or None for COMM_WORLD.")
    comm = MPI.COMM_WORLD if comm is None else comm
    known = comm.Get_attr(_world_attribute())
    if isinstance(known, MPIWorld) and not known.is_closed:
        return known
    # In this order: a wrong launch is told before anyone waits, and the clock runs before the first agreement.
    check_launch()
    limits = current_settings().timeout
    if comm.Get_size() > 1:
        watchdog_thread.begin(limits.waiting)
        _leave_before_mpi_ends()
    others = tuple(worker for worker in _members(comm) if worker != MPI.COMM_WORLD.Get_rank())
    with worker_status().agreeing(None, "the first partition of a communicator", user_line(), others):
        check_workers_agree(comm)
        world = MPIWorld(comm)
    comm.Set_attr(_world_attribute(), world)
    opened.append(world)
    log.info("a world of %d workers is open; the clock ends the job after %g s of waiting", world.size, limits.waiting)
    return world
