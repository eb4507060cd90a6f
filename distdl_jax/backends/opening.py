"""The one place that opens a world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdl_jax.backends.base import World
from distdl_jax.errors import SetupError

if TYPE_CHECKING:
    from mpi4py import MPI


def open_world(comm: MPI.Intracomm | None = None) -> World:
    """The world of `comm` (default: COMM_WORLD); the same object each time. The first call is collective in `comm`.

    **Raises:** `SetupError` where mpi4py or mpi4jax, or the MPI library that they need, is missing.
    """
    try:
        from distdl_jax.backends.mpi.world import open_world as open_mpi_world
    except (ImportError, RuntimeError) as error:
        raise SetupError(
            f"A partition needs MPI, through mpi4py and mpi4jax, but one of them can't be loaded here ({error}). "
            "docs/install.md says how to install them."
        ) from error
    return open_mpi_world(comm)


def first_world() -> World:
    """The world that was opened first; that of COMM_WORLD where there is none yet."""
    from distdl_jax.backends.mpi.world import opened

    return opened[0] if opened else open_world()
