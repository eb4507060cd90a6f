"""What launchers tell a process before MPI is up, in its environment."""

from __future__ import annotations

import os

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
