"""The only place that opens and closes worlds."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from distdl_jax.errors import InvalidArgumentError, SetupError
from distdl_jax.jax_patches import install_jax_patches, remove_jax_patches
from distdl_jax.transports.threads.current_world import simulated_world, simulations_run
from distdl_jax.transports.threads.world import ThreadWorld
from distdl_jax.transports.world import World
from distdl_jax.watchdog.launch import supervised
from distdl_jax.watchdog.watch.status import worker_status

if TYPE_CHECKING:
    from mpi4py import MPI


def open_world(comm: MPI.Intracomm | None = None) -> World:
    """Return the world of `comm` (default: COMM_WORLD), the same object each time; the first call is collective in
    `comm`.

    In a worker of `dj.simulate`, it is that worker's world.

    **Raises:** `SetupError` if mpi4py or mpi4jax, or the MPI library that they need, is missing;
    `InvalidArgumentError` for a communicator in `dj.simulate`.
    """
    install_jax_patches()
    if (world := _simulated()) is not None:
        if comm is not None:
            raise InvalidArgumentError(
                f"`comm` (={comm!r}) is an MPI communicator, but this worker is a thread of dj.simulate: make its "
                "partitions from dj.Partition()."
            )
        _refuse_shared_modules()
        return world
    try:
        with _starting_mpi():
            from distdl_jax.transports.mpi.world import open_world as open_mpi_world
    except (ImportError, RuntimeError) as error:
        raise SetupError(
            f"A partition needs MPI, through mpi4py and mpi4jax, but one of them can't be loaded here ({error}). With "
            "an MPI whose mpicc is on PATH (`python -m pip install mpich` provides one): `python -m pip install "
            "--no-cache-dir mpi4py mpi4jax`; the page Installing of the documentation has every other way. Without "
            "them, dj.simulate(n, program) runs a program on n workers in one process. `python -m distdl_jax doctor` "
            "looks for the reason."
        ) from error
    return open_mpi_world(comm)


def _refuse_shared_modules() -> None:
    """Refuse to open a simulated worker's world during an import: all workers would share that partition."""
    name = ""
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code.co_name == "<module>":
            name = frame.f_globals.get("__name__", "")
        elif frame.f_code.co_filename.startswith("<frozen importlib") and name:
            raise SetupError(
                f"The module {name} makes a partition while it is imported, but in dj.simulate, and with --simulate, "
                "all workers share imported modules: make partitions in the program, or in functions that it calls. "
                "Under mpiexec each worker has its own modules."
            )


def close() -> None:
    """Close all worlds of this process, and undo the effects of opening them.

    Collective: all workers call it, as at the end of their programs; each waits until the others have called it.
    Afterwards `sys.excepthook`, the methods and rules of JAX and the handlers of `atexit` are as before the first
    partition, the watchdog's thread has ended, and the next `dj.Partition()` opens a new world, for instance in a
    notebook. MPI is not finalised, since it can't be started twice in one process.

    Existing partitions can't be used any more; they raise `SetupError`. It has no effect in `dj.simulate`, whose worlds
    end with its programs.

    >>> import distdl_jax as dj
    >>> P = dj.Partition()
    >>> dj.close()
    >>> dj.Partition() == P
    False
    """
    if _simulated() is not None:
        return
    if "distdl_jax.transports.mpi.world" in sys.modules:
        from distdl_jax.transports.mpi.world import close_worlds

        close_worlds()
    if not simulations_run():
        remove_jax_patches()


@contextmanager
def _starting_mpi() -> Iterator[None]:
    """Inside, MPI is started, if needed; a supervisor keeps the clock, since no Python thread can run."""
    mpi_is_up = "mpi4py.MPI" in sys.modules
    if not mpi_is_up:
        supervised.tell(supervised.STARTS_MPI)
    try:
        yield
    finally:
        if not mpi_is_up:
            supervised.tell(supervised.HAS_MPI)


@contextmanager
def worlds_used() -> Iterator[list[World]]:
    """Collect the worlds whose partitions this worker uses inside."""
    here = worker_status().here
    used: list[World] = []
    outer, here.worlds = here.worlds, used
    try:
        yield used
    finally:
        here.worlds = outer
        if outer is not None:
            outer.extend(used)


def world_of(used: Iterable[World]) -> World | None:
    """Return the world of a program that uses these.

    It is the smallest world with all their workers, one of `used` if possible; None if there is none. A program that
    uses no world belongs to the only open one, or the largest; to COMM_WORLD's if none is open. In `dj.simulate` it is
    the worker's.
    """
    if (world := _simulated()) is not None:
        return world
    from distdl_jax.transports.mpi.world import opened

    used = list(used)
    members = set[int]().union(*(world.members for world in opened if any(world is other for other in used)))
    if not members:
        return max(opened, key=lambda world: world.size) if opened else open_world()
    containing = [world for world in opened if members.issubset(world.members)]
    own = [world for world in containing if any(world is other for other in used)]
    return min(own + containing, key=lambda world: world.size, default=None)


def _simulated() -> ThreadWorld | None:
    world: ThreadWorld | None = simulated_world.value
    if world is None and simulations_run() and threading.current_thread() is not threading.main_thread():
        raise SetupError(
            f"The thread {threading.current_thread().name!r} is not a worker: while dj.simulate runs, make partitions, "
            "and call communicating functions, only in the threads of its workers, not in threads that these start."
        )
    return world
