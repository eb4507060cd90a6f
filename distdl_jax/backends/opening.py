"""The one place that opens a world."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from distdl_jax.backends.base import World
from distdl_jax.backends.inprocess.current import simulated_world, simulations_run
from distdl_jax.backends.inprocess.world import InProcessWorld
from distdl_jax.errors import InvalidArgumentError, SetupError
from distdl_jax.watchdog.status import worker_status

if TYPE_CHECKING:
    from mpi4py import MPI


def open_world(comm: MPI.Intracomm | None = None) -> World:
    """The world of `comm` (default: COMM_WORLD); the same object each time. The first call is collective in `comm`.

    In a worker of `dj.simulate`: its world.

    **Raises:** `SetupError` where mpi4py or mpi4jax, or the MPI library that they need, is missing;
    `InvalidArgumentError` for a communicator in `dj.simulate`.
    """
    if (world := _simulated()) is not None:
        if comm is not None:
            raise InvalidArgumentError(
                f"`comm` (={comm!r}) is a communicator of MPI, but this worker is a thread of dj.simulate: make its "
                "partitions from dj.Partition()."
            )
        return world
    try:
        from distdl_jax.backends.mpi.world import open_world as open_mpi_world
    except (ImportError, RuntimeError) as error:
        raise SetupError(
            f"A partition needs MPI, through mpi4py and mpi4jax, but one of them can't be loaded here ({error}). "
            "docs/install.md says how to install them. Without them, dj.simulate(n, program) runs a program on n "
            "workers in one process."
        ) from error
    return open_mpi_world(comm)


@contextmanager
def worlds_used() -> Iterator[list[World]]:
    """The worlds whose partitions this worker uses inside."""
    status = worker_status()
    used: list[World] = []
    outer, status.worlds = status.worlds, used
    try:
        yield used
    finally:
        status.worlds = outer
        if outer is not None:
            outer.extend(used)


def world_of(used: Iterable[World]) -> World | None:
    """The world that a program belongs to which uses these: the smallest that has all their workers, one of these if
    it can be; None where there is none. Of a program that uses none: the only one that is open, or the largest; that of
    COMM_WORLD where there is none yet. In `dj.simulate`: the worker's."""
    if (world := _simulated()) is not None:
        return world
    from distdl_jax.backends.mpi.world import opened

    used = list(used)
    members = set[int]().union(*(world.members for world in opened if any(world is other for other in used)))
    if not members:
        return max(opened, key=lambda world: world.size) if opened else open_world()
    containing = [world for world in opened if members.issubset(world.members)]
    own = [world for world in containing if any(world is other for other in used)]
    return min(own + containing, key=lambda world: world.size, default=None)


def _simulated() -> InProcessWorld | None:
    world: InProcessWorld | None = simulated_world.value
    if world is None and simulations_run() and threading.current_thread() is not threading.main_thread():
        raise SetupError(
            f"The thread {threading.current_thread().name!r} is no worker: while dj.simulate runs, partitions are "
            "made, and what communicates is called, in the threads of its workers, and in no others that these start."
        )
    return world
