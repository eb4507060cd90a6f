"""Facts about the host, the launch and folders, read from the system. Nothing here raises."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from distdl_jax.doctor.facts import Folder, Host, Launch
from distdl_jax.launch.launcher import SET_BY_LAUNCHERS, job_rank, job_size

LONGEST_TRIAL = 20.0
"""Seconds that `mpiexec -n 2` may take."""

_TRIAL = "import os; from mpi4py import MPI; os.write(1, b'size=%d\\n' % MPI.COMM_WORLD.Get_size())"
"""Each worker writes its line in one piece."""

_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"

_LAUNCHERS = {"hydra_pmi_proxy", "prted", "prterun", "orted", "orterun", "mpirun", "mpiexec", "slurmstepd"}


def host() -> Host:
    """Return the facts about this host."""
    memory = _meminfo()
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    cores = os.cpu_count() or 1
    affinity = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(range(cores))
    libc, version = platform.libc_ver()
    return Host(
        name=socket.gethostname(),
        processor=_processor(),
        cores=cores,
        affinity=affinity,
        quota=_quota(),
        memory=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        memory_limit=_memory_limit(),
        address_space=_limit(resource.RLIMIT_AS),
        locked_memory=_limit(getattr(resource, "RLIMIT_MEMLOCK", resource.RLIMIT_AS)),
        shared_memory=shared and shared.total,
        shared_memory_free=shared and shared.free,
        huge_pages=_huge_pages(),
        glibc=version if libc == "glibc" else "",
        malloc=os.environ.get("GLIBC_TUNABLES", ""),
    )


def _text(path: Path | str) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return Path(path).read_text()
    return ""


def _meminfo() -> dict[str, int]:
    """Return /proc/meminfo in bytes."""
    lines = (line.split() for line in _text("/proc/meminfo").splitlines())
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if len(words) == 3}


def _processor() -> str:
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _huge_pages() -> str:
    words = _text("/sys/kernel/mm/transparent_hugepage/enabled").split()
    return next((word.strip("[]") for word in words if word.startswith("[")), "")


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _cgroup_folders(controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and of those around it, for version 2 and version 1."""
    folders = []
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup") / (controller if controllers else "")
        inner = root / path.lstrip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    return folders


def _quota() -> float | None:
    quotas = []
    for folder in _cgroup_folders("cpu"):
        words = _text(folder / "cpu.max").split()
        words = words or (_text(folder / "cpu.cfs_quota_us") + " " + _text(folder / "cpu.cfs_period_us")).split()
        if len(words) == 2 and words[0].isdecimal() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _memory_limit() -> int | None:
    limits = []
    for folder in _cgroup_folders("memory"):
        text = (_text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")).strip()
        if text.isdecimal() and int(text) < 2**60:  # version 1 writes a number near 2**63 for none
            limits.append(int(text))
    return min(limits, default=None)


def launch(tries: bool) -> Launch:
    """Return the facts about launchers; starts no MPI in this process.

    `tries`: start two workers with the mpiexec on PATH, where no launcher is around.
    """
    mpiexec, beside = shutil.which("mpiexec"), Path(sys.executable).with_name("mpiexec")
    launcher = _launcher()
    environment = {name: value for name, value in os.environ.items() if not SET_BY_LAUNCHERS.match(name)}
    trial, library = None, ""
    if launcher:
        library = _output([sys.executable, "-c", _LIBRARY], environment)
    if tries and mpiexec and not launcher:
        trial = _output([mpiexec, "-n", "2", sys.executable, "-c", _TRIAL], environment)
    return Launch(
        rank=job_rank(),
        started=job_size(),
        launcher=launcher,
        launcher_program=_launcher_program() if launcher else None,
        implementation=library,
        mpiexec=mpiexec,
        mpiexec_of=_kind(_output([mpiexec, "--version"], environment)) if mpiexec else "",
        mpiexec_beside=str(beside) if os.access(beside, os.X_OK) else None,
        trial=trial,
        srun=shutil.which("srun") is not None,
    )


def _launcher() -> str:
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return "Open MPI"
    if any(name in os.environ for name in ("HYDI_CONTROL_FD", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")):
        return "MPICH"
    if "SLURM_STEP_NUM_TASKS" in os.environ and "SLURM_PROCID" in os.environ:
        return "Slurm"
    return "unknown" if job_size() > 1 else ""


def _kind(version: str) -> str:
    """Return whose mpiexec says this of its version."""
    if "HYDRA" in version or "Intel(R) MPI" in version:
        return "MPICH"
    return "Open MPI" if any(name in version for name in ("Open MPI", "OpenRTE", "PRRTE", "prterun")) else "unknown"


def _output(command: list[str], environment: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LONGEST_TRIAL,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"(no end within {LONGEST_TRIAL:g} s)"
    except OSError as error:
        return f"({error})"
    return done.stdout + done.stderr


def _launcher_program() -> str | None:
    """Return the file of the launcher among the processes above this one."""
    process = os.getppid()
    while process > 1:
        with suppress(OSError):
            program = os.readlink(f"/proc/{process}/exe")
            if Path(program).name in _LAUNCHERS:
                return program
        status = _text(f"/proc/{process}/stat").rpartition(")")[2].split()
        process = int(status[1]) if len(status) > 1 else 0
    return None


def folder(path: str | None) -> Folder | None:
    """Return the facts about a folder, which may not be there yet: then it has to be possible to make it."""
    if path is None:
        return None
    there = Path(os.path.abspath(os.path.expanduser(path)))
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".distdl_jax_doctor_"):
            problem = None
    except OSError as error:
        problem = error.strerror or str(error)
    usage = None
    with suppress(OSError):
        usage = shutil.disk_usage(there).free
    anyone = there.is_dir() and bool(there.stat().st_mode & stat.S_IWOTH and not there.stat().st_mode & stat.S_ISVTX)
    return Folder(path, problem, _filesystem(there), usage, anyone)


def _filesystem(path: Path) -> str:
    """Return the type of the file system of a path: that of the longest mount point above it."""
    real, best = Path(os.path.realpath(path)), (0, "")
    for line in _text("/proc/self/mounts").splitlines():
        _, point, kind, *_ = line.split(" ")
        where = Path(point.encode().decode("unicode_escape"))
        if real.is_relative_to(where) and len(where.parts) >= best[0]:
            best = (len(where.parts), kind)
    return best[1]
