"""What distdl_jax does to the process: all of it is here, and described in docs/settings.md."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

from distdl_jax.huge_pages import prefer_huge_pages
from distdl_jax.settings import settings_at_import
from distdl_jax.watchdog.exit_hooks import (
    end_the_job_on_sigterm,
    end_the_job_on_uncaught_exceptions,
    record_exit_status,
)
from distdl_jax.watchdog.status import worker_status


def prepare_process() -> None:
    """Set the process up for a job of many workers; `DISTDL_JAX_PROCESS=0` leaves it alone.

    Called by the import, since the first partition may be what the others wait at; and again when a world is opened,
    for programs that start MPI in between.
    """
    if not settings_at_import().process:
        return
    prefer_huge_pages(settings_at_import().huge_pages)  # malloc; before MPI, whose threads would get heaps of their own
    _start_mpi()
    if worker_status().size > 1:
        end_the_job_on_uncaught_exceptions()  # sys.excepthook
        record_exit_status()  # sys.exit
        end_the_job_on_sigterm()  # the handler of SIGTERM, and the descriptor that wakes up for signals


def _start_mpi() -> None:
    """Start MPI, as importing mpi4py does, where it is installed."""
    with suppress(ImportError, RuntimeError):
        import_module("mpi4py.MPI")
