"""What importing distdl_jax does to the process."""

from __future__ import annotations

from distdl_jax.backends.opening import load_mpi
from distdl_jax.huge_pages import prefer_huge_pages


def prepare_process() -> None:
    """Set the process up for a job of many workers; called once, by the import."""
    prefer_huge_pages()  # before mpi4py starts MPI, whose threads would get heaps of their own
    load_mpi()  # a worker that fails from here on ends the job: the first partition may be what the others wait at
