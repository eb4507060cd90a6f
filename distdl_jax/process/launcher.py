"""What launchers tell a process before MPI is up, in its environment, and what one tells them when it leaves."""

from __future__ import annotations

import contextlib
import os
import select

MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""The number of processes, as the launchers of MPICH and its relatives, Open MPI and MVAPICH set it."""

_SIZES = (*MPI_SIZES, "SLURM_STEP_NUM_TASKS")
_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


def told_size(names: tuple[str, ...] = _SIZES) -> int:
    """How many processes were started together, as far as is told; 1 where nothing is."""
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), 1)


def told_rank() -> int | None:
    """This process's number among them; None where nothing is told."""
    return next((int(os.environ[name]) for name in _RANKS if os.environ.get(name, "").isdigit()), None)


def tell_launcher_of_the_end() -> None:
    """Tell MPICH's launcher that this process is done with MPI, before it ends by `os._exit`.

    MPICH does so in a handler of C's `exit`, which `os._exit` skips; its launcher then ends all others. By the protocol
    PMI 1, which they talk unless told otherwise.
    """
    if "HYDI_CONTROL_FD" not in os.environ or os.environ.get("MPIR_CVAR_PMI_VERSION", "1") != "1":
        return
    with contextlib.suppress(KeyError, ValueError, OSError):
        connection = int(os.environ["PMI_FD"])
        os.write(connection, b"cmd=finalize\n")
        select.select([connection], [], [], _LONGEST_ANSWER)


_LONGEST_ANSWER = 10.0
"""Seconds that a launcher is given to hear of it."""
