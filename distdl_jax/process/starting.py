"""Around the start of a worker by `python -m distdl_jax`: whatever fails in it ends the whole job."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from distdl_jax.process.launcher import told_rank, told_size


def is_run_as_program() -> bool:
    """Whether this process was started by `python -m distdl_jax`, asked while that imports the package."""
    # Python's own mark for "the name after -m is being looked up"; that name is as many places from the end.
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("distdl_jax", "-mdistdl_jax")


@contextmanager
def starting() -> Iterator[None]:
    """Inside, the library is imported and MPI started.

    Some launchers (MPICH's) let the others wait for ever for a process that ends before it has started MPI, whatever
    its exit status; all of them end the job where it is ended by a signal.
    """
    try:
        yield
    except Exception:
        if not is_run_as_program() or told_size() == 1 or mpi_is_up():
            raise
        text = f"{this_worker()} failed before MPI was up; the job ends.\n{traceback.format_exc()}"
        os.write(2, text.encode(errors="replace"))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def this_worker() -> str:
    """This worker, in words, also before MPI is up."""
    rank, size = told_rank(), told_size()
    return f"Process {os.getpid()}" if rank is None else f"Worker {rank} of {size} (process {os.getpid()})"


def mpi_is_up() -> bool:
    """Whether MPI has been started in this process."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized())
