"""Communication between launchers (mpiexec, mpirun, srun) and a process, by its environment and otherwise."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import stat
import time

LAUNCH = "DISTDL_JAX_SUPERVISOR_LAUNCH"
"""The environment variable with a worker's `launch()` and process, for the processes that it starts: one that finds its
own launch there was started by no launcher, and must not speak for the worker."""

SET_BY_LAUNCHERS = re.compile(
    "PMI2?_|PMIX_(?!MCA_)|HYDI_|MPI_LOCAL|MV2_COMM_|PRTE_LAUNCHED|OMPI_COMM_|OMPI_MCA_(orte|ess_base)_"
    f"|SLURM_(PMI|SRUN_COMM_|STEP|PROCID|LOCALID)|{LAUNCH}"
)
"""The variables by which a process, and its MPI library, know that they belong to a job; none set by users."""

MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""The number of processes, as set by the launchers of MPICH and its relatives, Open MPI and MVAPICH."""

_SIZES = (*MPI_SIZES, "SLURM_STEP_NUM_TASKS")
_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_LOCAL_SIZES = (
    "MPI_LOCALNRANKS",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",  # "4(x2),3": on the first host; the others have the same number, or one less
)

_LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def job_size(names: tuple[str, ...] = _SIZES) -> int:
    """Return how many processes were started together; 1 if no launcher tells."""
    return _number(names) or 1


def job_rank() -> int | None:
    """Return this process's number among them; None if no launcher tells."""
    return _number(_RANKS)


def local_size() -> int:
    """Return how many of them run on this host; 1 if no launcher tells."""
    return _number(_LOCAL_SIZES) or 1


def local_rank() -> int | None:
    """Return this process's number among those on this host; None if no launcher tells, 0 without a launcher."""
    return _number(_LOCAL_RANKS) if job_size() > 1 else 0


def launch() -> str:
    """Return the identity of this process's launch: the launcher's connection, or a name."""
    if "PMI_FD" not in os.environ:
        names = ("PMI_PORT", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")
        return ".".join(os.environ.get(name, "") for name in names)
    with contextlib.suppress(ValueError, OSError):
        connection = os.fstat(int(os.environ["PMI_FD"]))
        return str(connection.st_ino) if stat.S_ISSOCK(connection.st_mode) else ""
    return ""  # not inherited


def common_launch() -> str:
    """Return the part of `launch()` that all workers of this launch have in common: not a connection."""
    return "" if "PMI_FD" in os.environ else launch()


def mark_worker() -> None:
    """Let this worker's child processes know that they are inside it; not the worker after `os.exec...`."""
    os.environ[LAUNCH] = f"{os.getpid()} {launch()}"


def _is_inside_a_worker() -> bool:
    worker, _, its_launch = os.environ.get(LAUNCH, "").partition(" ")
    return worker not in ("", str(os.getpid())) and launch() in ("", its_launch)


_IS_INSIDE_A_WORKER = _is_inside_a_worker()


def leave_job_around() -> None:
    """Forget, inside a worker, the job of its launcher: MPI is to start for this process alone."""
    if _IS_INSIDE_A_WORKER:
        for name in [name for name in os.environ if SET_BY_LAUNCHERS.match(name)]:
            del os.environ[name]


def _number(names: tuple[str, ...]) -> int | None:
    if _IS_INSIDE_A_WORKER:
        return None
    found = (re.match(r"\d+", os.environ.get(name, "")) for name in names)
    return next((int(number[0]) for number in found if number), None)


def worker_text(process: int) -> str:
    """Name the worker of this launch that runs as `process`, even before MPI has started."""
    rank, size = job_rank(), job_size()
    where = f"process {process} on {socket.gethostname()}"
    return where[0].upper() + where[1:] if rank is None else f"Worker {rank} of {size} ({where})"


def abort_job(status: int) -> None:
    """Have MPICH's launcher, or Slurm, end all workers with `status`; without effect under other launchers.

    If a process ends before it has started MPI, MPICH's launcher lets the others wait for ever, whatever the exit
    status. Under other launchers the exit status of this process, which must not be 0, ends the job.
    """
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        time.sleep(_UNTIL_CONNECTED)
    _say_to_launcher(f"cmd=abort exitcode={status}\n")


def report_normal_end() -> None:
    """Tell MPICH's launcher that this worker is done with MPI, if the worker itself did not.

    Otherwise the launcher ends all others.
    """
    if "HYDI_CONTROL_FD" in os.environ and (connection := _say_to_launcher("cmd=finalize\n")) is not None:
        select.select([connection], [], [], _LONGEST_ANSWER)


def _say_to_launcher(command: str) -> int | None:
    """Send a command by the protocol PMI 1, MPICH's default; return the descriptor."""
    if os.environ.get("MPIR_CVAR_PMI_VERSION", "1") == "1" and not _IS_INSIDE_A_WORKER:
        with contextlib.suppress(KeyError, ValueError, OSError):
            connection = int(os.environ["PMI_FD"])
            os.write(connection, command.encode())
            return connection
    return None


_LONGEST_ANSWER = 10.0
"""Seconds that a launcher is given to react."""

_UNTIL_CONNECTED = 2.0
"""Open MPI's launcher (5.0.11) hangs if a process fails while another one, which starts MPI, connects to it."""
