"""What distdl_jax does to the process: all of it is here, and described in docs/settings.md."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing import parent_process

from distdl_jax.compat import count_constants_among_residuals, give_tokens_to_compiled_functions, hand_tokens_back
from distdl_jax.process.huge_pages import prefer_huge_pages
from distdl_jax.process.launcher import told_size
from distdl_jax.process.starting import is_run_as_program, mpi_is_up, this_worker
from distdl_jax.settings import settings_at_import
from distdl_jax.watchdog.exit_hooks import (
    end_the_job_on_uncaught_exceptions,
    record_errors_of_threads,
    record_exit_status,
    watch_main_program,
)
from distdl_jax.watchdog.sigterm import end_the_job_on_sigterm
from distdl_jax.watchdog.start_clock import clock_over_the_start_of_mpi
from distdl_jax.watchdog.status import worker_status


def prepare_process() -> None:
    """Set the process up for a job of many workers; `DISTDL_JAX_PROCESS=0` leaves it alone.

    Called by the import, since the first partition may be what the others wait at; and again when a world is opened,
    for programs that start MPI in between. What `multiprocessing` has started is no worker, though it has a worker's
    environment, in which MPI can't be started again: nothing is done there, unless MPI is up.
    """
    count_constants_among_residuals()  # JAX's second derivatives, which are wrong without; so in any process
    if _is_left_alone():
        return
    hand_tokens_back()  # JAX's dispatch of programs that communicate
    give_tokens_to_compiled_functions()  # and of those that were compiled by hand
    prefer_huge_pages(settings_at_import().huge_pages)  # malloc; before MPI, whose threads would get heaps of their own
    if is_run_as_program() and told_size() > 1:
        with clock_over_the_start_of_mpi(settings_at_import().timeout.waiting, this_worker()):
            _start_mpi()
    else:
        _start_mpi()
    if worker_status().size > 1:
        end_the_job_on_uncaught_exceptions()  # sys.excepthook
        record_exit_status()  # sys.exit
        watch_main_program()  # sys.monitoring
        record_errors_of_threads()  # threading.excepthook
        end_the_job_on_sigterm()  # the handler of SIGTERM, and the descriptor that wakes up for signals


def stop_looking_at_imports() -> None:
    """Called at the end of the import: Python's garbage collector never looks again through what there is by now.

    Neither while the program runs nor, which takes longest, when it ends.
    """
    if worker_status().size > 1 and not _is_left_alone():
        gc.freeze()


def _is_left_alone() -> bool:
    return not settings_at_import().process or (_is_of_multiprocessing() and not mpi_is_up())


def _is_of_multiprocessing() -> bool:
    """Whether `multiprocessing` has started this process; its `parent_process` says so only after the imports."""
    words = (word for word in sys.orig_argv if word == "--multiprocessing-fork" or word.startswith(_SERVER))
    return parent_process() is not None or any(words)


_SERVER = "from multiprocessing.forkserver import"


def _start_mpi() -> None:
    """Start MPI, as importing mpi4py does, where it is installed."""
    with suppress(ImportError, RuntimeError):
        import_module("mpi4py.MPI")
