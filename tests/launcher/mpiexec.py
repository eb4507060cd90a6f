"""Which MPI this is, and its command line."""

import functools
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

from launcher import settings


@functools.cache
def find() -> str | None:
    """Return the `mpiexec` beside this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")


@functools.cache
def flavour() -> str:
    """Return `"hydra"` (MPICH and its relatives), `"openmpi"`, or what `mpiexec --version` says first."""
    path = find()
    if path is None:
        return "none"
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, env=clean(os.environ))
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    output = done.stdout + done.stderr
    if "HYDRA" in output or "Intel(R) MPI" in output:
        return "hydra"
    if any(name in output for name in ("Open MPI", "OpenRTE", "PRRTE", "prterun")):
        return "openmpi"
    return f"unknown ({output.strip().splitlines()[0] if output.strip() else 'no version'})"


def command(size: int) -> list[str]:
    """Return the words that start a program on `size` ranks; raise `FileNotFoundError` without an MPI."""
    own = shlex.split(os.environ.get(settings.MPIEXEC, ""))
    if own:
        return [*own, "-n", str(size)]
    path = find()
    if path is None:
        raise FileNotFoundError(
            f"no mpiexec beside {sys.executable} and none on PATH. "
            f"Install an MPI, or set {settings.MPIEXEC} to its command"
        )
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


def clean(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Remove what an MPI process leaves in the environment, which makes a child mpiexec believe it is a rank."""
    user_set = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_")
    left_behind = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPIR_")
    return {k: v for k, v in environment.items() if k.startswith(user_set) or not k.startswith(left_behind)}


def leave_mpi_alone() -> None:
    """Keep mpi4py from initialising MPI, which its import in a test module would do."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
    except ImportError:
        pass


def mpi_version() -> str:
    """Return the version of the MPI library that mpi4py has loaded. Does not initialise it."""
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].split())


def versions() -> list[str]:
    """Return the lines of pytest's header. Loads the MPI library, but does not initialise it."""

    def version(package: str) -> str:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            return f"{package} missing"

    try:
        library = mpi_version()
    except Exception as error:  # no MPI, or one that does not load: the header says so and plain tests still run
        library = f"none ({type(error).__name__}: {error})"
    started_by = os.environ.get(settings.MPIEXEC) or f"{find()} ({flavour()})"
    return [
        f"MPI: {library}; mpiexec: {started_by}",
        ", ".join(map(version, ("mpi4py", "numpy", "hypothesis"))),
    ]
