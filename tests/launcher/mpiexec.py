"""Which MPI this is, and its command line."""

import functools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from launcher.settings import PREFIX


@functools.cache
def find() -> str | None:
    """Return the `mpiexec` next to this Python, else the one on PATH."""
    path = Path(sys.executable).with_name("mpiexec")
    return str(path) if os.access(path, os.X_OK) else shutil.which("mpiexec")


@functools.cache
def flavour() -> str:
    """Return `"hydra"` (MPICH and its relatives), `"openmpi"` or `"unknown"`."""
    path = find()
    if path is None:
        return "unknown"
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, env=clean(os.environ))
    output = done.stdout + done.stderr
    if "HYDRA" in output or "Intel(R) MPI" in output:
        return "hydra"
    return "openmpi" if any(name in output for name in ("Open MPI", "OpenRTE", "PRRTE", "prterun")) else "unknown"


def command(size: int) -> list[str]:
    """Return the words that start a program on `size` ranks; raise `FileNotFoundError` without an MPI."""
    own = shlex.split(os.environ.get(f"{PREFIX}MPIEXEC", ""))
    if own:
        return [*own, "-n", str(size)]
    path = find()
    if path is None:
        raise FileNotFoundError(f"no mpiexec next to {sys.executable} and none on PATH: install an MPI")
    flags: list[str] = []
    if flavour() == "openmpi":
        # Binding would press all XLA threads of a rank on one core, two ranks on the same one.
        flags = ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            flags.append("--allow-run-as-root")
    return [path, *flags, "-n", str(size)]


def size_around() -> int:
    """Return how many ranks the mpiexec around this process has started; 1 without one."""
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1)


def rank() -> int:
    """Return this process's number among them, before MPI has started."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    return int(next(filter(None, map(os.environ.get, names)), 0))


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove what an MPI process leaves in the environment, which makes a child mpiexec believe it is a rank."""
    user_set = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_")
    left_behind = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPIR_")
    return {k: v for k, v in environment.items() if k.startswith(user_set) or not k.startswith(left_behind)}


def leave_mpi_alone() -> None:
    """Keep mpi4py from initialising MPI, which its import in a test module would do."""
    import mpi4py

    mpi4py.rc.initialize = False
