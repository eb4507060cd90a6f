"""Checks of one worker: packages, JAX, MPI, its launcher, its folders. Nothing here raises.

Each check yields findings; a failed import is one of them, and ends the checks that need it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distdl_jax.settings import own_reading
from distdl_jax.tools.doctor.report import Finding
from distdl_jax.watchdog.launch import supervised
from distdl_jax.watchdog.launch.gpus import cuda_plugin, gpu_messages, visible_gpus
from distdl_jax.watchdog.launch.launcher import SET_BY_LAUNCHERS, job_size
from distdl_jax.watchdog.launch.packages import FIRST_JAX_NOT_TRIED, PACKAGES, installed_version, minimum_versions

if TYPE_CHECKING:
    from mpi4py import MPI

    from distdl_jax.transports.mpi.launch_checks import Installation

LONGEST_TRIAL = 30.0
"""Time limit, in seconds, of a program started by the doctor."""

LEAST_FREE = 2**30
"""Bytes of a folder for checkpoints."""

_COMPILE_MPI4JAX = (
    "With the right mpicc first on PATH: "
    "python -m pip install --force-reinstall --no-deps --no-cache-dir --no-binary=mpi4jax mpi4jax"
)
_COMPILE_ONEDNN = "python -m distdl_jax.onednn"


# --- packages and JAX ---


def versions(needs_mpi: bool = True) -> Iterator[Finding]:
    """Yield the packages that are missing, too old or too new; `needs_mpi`: not for `dj.simulate`."""
    found = {package: installed_version(package) for package in PACKAGES}
    oldest, problems = minimum_versions(), 0
    for package, version in found.items():
        cure = _COMPILE_MPI4JAX if package == "mpi4jax" else f'python -m pip install "{package}"'
        if version is None and package != "distdl_jax":  # which may be run from its folder
            problems += 1
            verdict = "error" if needs_mpi or package not in ("mpi4py", "mpi4jax") else "note"
            yield Finding(verdict, "versions", f"{package} is not installed.", cure)
        elif version is not None and numbers(version) < numbers(oldest.get(package, "")):
            problems += 1
            text = f"{package} {version} is too old: distdl_jax needs {oldest[package]}."
            yield Finding("error", "versions", text, f'python -m pip install "{package}>={oldest[package]}"')
    if numbers(found["jax"] or "") >= FIRST_JAX_NOT_TRIED:
        first = ".".join(map(str, FIRST_JAX_NOT_TRIED))
        text = f"distdl_jax has been tested with jax before {first} only, not with {found['jax']}."
        cure = f'If something fails unexpectedly: python -m pip install "jax<{first}" "jaxlib<{first}"'
        yield Finding("warning", "versions", text, cure)
    if not problems:
        listed = ", ".join(f"{package} {version or 'not installed'}" for package, version in found.items())
        yield Finding("ok", "versions", f"Python {platform.python_version()}, {listed}.")


def numbers(version: str) -> tuple[int, ...]:
    """Return the first numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def jax_and_devices() -> Iterator[Finding]:
    """Yield whether JAX starts, with which options and devices."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the doctor needs no memory of a GPU
    try:
        import_module("numpy")  # jaxlib ends the process if there is none
        jax = import_module("jax")
        kind, count = jax.default_backend(), jax.local_device_count()
    except Exception as error:
        cure = "Install what is missing; JAX_PLATFORMS=cpu selects the CPU; or see JAX's installation guide."
        yield Finding("error", "jax", f"JAX does not start: {sentence(error)}.", cure)
        return
    for option, value, text in (
        ("jax_disable_jit", True, "every operation runs separately, and workers compare shapes each time."),
        ("jax_numpy_rank_promotion", "raise", "layers, which add biases of one dimension, are rejected."),
    ):
        if getattr(jax.config, option, None) == value:
            yield Finding(
                "warning", "jax", f"{option.upper()}={value} is set: {text}", "Unset it, except for debugging."
            )
    gpus = visible_gpus(os.environ)
    if count > 1:
        text = f"This process has {count} JAX devices, but a worker is one process with one device."
        cure = "python -m distdl_jax gives each worker its GPU; remove --xla_force_host_platform_device_count."
        yield Finding("error", "devices", text, cure)
    elif kind == "cpu" and gpus and os.environ.get("JAX_PLATFORMS") != "cpu":
        text = f"JAX computes on the CPU, but the host has GPUs: {', '.join(gpus)}."
        cure = f"""{cuda_plugin()} is installed: python -c 'import jax; jax.devices("cuda")' says what it misses"""
        cure = cure if cuda_plugin() else 'python -m pip install "jax[cuda13]"'
        yield Finding("note", "devices", text, f"{cure}; JAX_PLATFORMS=cpu if that is what you want.")
    else:
        yield Finding("ok", "devices", f"JAX computes on one device ({kind}).")
    yield from _onednn(kind)


def _onednn(kind: str) -> Iterator[Finding]:
    """Yield whether oneDNN's convolutions are compiled in."""
    if kind != "cpu" or own_reading().settings.onednn == "off":
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library = import_module("distdl_jax.kernels.onednn_library")
        found = library.version()
    if found != "none":
        yield Finding("ok", "onednn", library.description())
    elif caught:  # compiled for another jaxlib
        yield Finding("warning", "onednn", str(caught[0].message), _COMPILE_ONEDNN)
    else:
        text = "oneDNN is not compiled in: float32 convolutions are XLA's, which are slower."
        yield Finding("warning", "onednn", text, _COMPILE_ONEDNN)


def sentence(error: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"


# --- MPI and its launcher ---


def family(library: str) -> str:
    """Return the MPI of a library, for its launcher: "MPICH", "Open MPI", or "" if unknown.

    >>> family("MPICH Version: 5.0.2"), family("Open MPI v5.0.11"), family("MVAPICH2 Version: 2.3")
    ('MPICH', 'Open MPI', 'MPICH')
    """
    if library.startswith("Open MPI"):
        return "Open MPI"
    return "MPICH" if re.match(r"(?i)MPICH|Intel|MVAPICH|CRAY MPICH", library) else ""


def launcher() -> str:
    """Return the MPI whose launcher has started this process; "" if none has, "unknown" if it can't be determined."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return "Open MPI"
    if os.environ.keys() & {"HYDI_CONTROL_FD", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE"}:
        return "MPICH"
    if os.environ.keys() >= {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}:
        return "Slurm"
    return "unknown" if job_size() > 1 else ""


def launcher_mismatch() -> Finding | None:
    """Return why MPI may end this process at its start without a message: the launcher belongs to another MPI."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    if (by := launcher()) not in ("MPICH", "Open MPI"):
        return None
    own = family(output([sys.executable, "-c", code]))
    text = f"The launcher is {by}'s, but mpi4py runs on {own}, which may end the job, or start workers alone."
    return Finding("error", "launcher", text, right_launcher()) if own not in ("", by) else None


def right_launcher() -> str:
    """Return a cure."""
    if launcher() == "Slurm":
        return "srun --mpi=...: `srun --mpi=list` shows what there is (Open MPI 5: pmix; MPICH: pmi2)."
    if (beside := Path(sys.executable).with_name("mpiexec")).exists():
        return f"Use {beside}, or activate the environment."
    return "Use the mpiexec of that MPI, or compile mpi4py and mpi4jax for this one (docs/install.md)."


def start_mpi() -> tuple[MPI.Intracomm | None, list[Finding]]:
    """Start MPI, and mpi4jax on it; return all workers, None if it can't be started, and the findings."""
    supervised.tell(supervised.STARTS_MPI)
    try:
        from mpi4py import MPI

        if not MPI.Is_initialized():
            text = "mpi4py was told not to start MPI (mpi4py.rc.initialize, MPI4PY_RC_INITIALIZE)."
            return None, [Finding("error", "mpi", text, "Leave these at their defaults.")]
    except Exception as error:
        cure = (
            "Without an MPI: python -m pip install mpich mpi4py. With one whose library the loader doesn't find: load "
            "its module, set LD_LIBRARY_PATH, or compile mpi4py (docs/install.md)."
        )
        return None, [Finding("error", "mpi", f"MPI can't be started: {sentence(error)}.", cure)]
    finally:
        supervised.tell(supervised.HAS_MPI)
    return MPI.COMM_WORLD, [*_mpi(MPI.Get_library_version()), *_launcher(MPI.COMM_WORLD.Get_size())]


def _mpi(library: str) -> Iterator[Finding]:
    name = " ".join(library.split("\n")[0].split(",")[0].replace("\0", "").split())
    yield Finding("ok", "mpi", f"mpi4py runs on {name}.")
    try:
        import_module("numpy")
        checks = import_module("distdl_jax.transports.mpi.launch_checks")
        import_module("distdl_jax.transports.mpi.compat").import_mpi4jax()
    except Exception as error:
        of = re.search(r"libmpi\.so\.(12|40)", str(error))
        text = f" It was compiled for {'MPICH' if of[1] == '12' else 'Open MPI'}." if of else ""
        yield Finding("error", "mpi4jax", f"mpi4jax can't be loaded: {sentence(error)}.{text}", _COMPILE_MPI4JAX)
        return
    problems = [
        Finding("error", "mpi", problem.partition("; `python")[0], right_launcher() if "alone" in problem else "")
        for problem in checks.launch_problems()
    ]
    files = ", ".join(checks.loaded_mpi_libraries())
    yield from problems or [
        Finding("ok", "mpi4jax", f"It calls the same library, {files}, with {checks.thread_level()}.")
    ]


def _launcher(size: int) -> Iterator[Finding]:
    mpiexec, by, started = shutil.which("mpiexec"), launcher(), job_size()
    if by and started == size:
        yield Finding("ok", "launcher", f"{started} processes (launcher: {by}), and MPI knows all of them.")
    elif by == "Slurm":
        text = f"srun started {started} tasks, but each believes that it is alone."
        yield Finding("error", "launcher", text, right_launcher())
    elif by:
        return  # in `launch_problems`
    elif mpiexec is None:
        text, srun = "There is no mpiexec on PATH.", shutil.which("srun")
        yield Finding("note" if srun else "warning", "launcher", text, "srun is there." if srun else right_launcher())
    else:
        yield trial(mpiexec, output([mpiexec, "-n", "2", sys.executable, "-c", _TRIAL]))


_TRIAL = "import os; from mpi4py import MPI; os.write(1, b'size=%d\\n' % MPI.COMM_WORLD.Get_size())"
"""Each worker writes its line in one piece."""


def trial(mpiexec: str, printed: str) -> Finding:
    """Return the finding if two workers started by `mpiexec` have `printed` this."""
    sizes = re.findall(r"size=(\d+)", printed)
    if sizes == ["2", "2"]:
        cure = "`mpiexec -n 4 python -m distdl_jax doctor` checks several workers."
        return Finding("ok", "launcher", f"{mpiexec} starts workers that find each other.", cure)
    if "1" in sizes:
        text = f"{mpiexec} starts workers each of which believes that it is alone: it belongs to another MPI."
        return Finding("error", "launcher", text, right_launcher())
    words = " ".join(word for word in printed.split() if word.strip("-"))[:500]
    cure = right_launcher()
    if "not enough slots" in words:
        cure = "Open MPI, more workers than cores: mpiexec --oversubscribe."
    elif "run as root" in words:
        cure = "Open MPI: mpiexec --allow-run-as-root, in a container."
    return Finding("error", "launcher", f"{mpiexec} -n 2 does not start two workers: {words}", cure)


def output(command: list[str], **settings: str) -> str:
    """Return the output of a program that is started outside the job."""
    environment = {name: value for name, value in os.environ.items() if not SET_BY_LAUNCHERS.match(name)} | settings
    options: dict[str, Any] = {"env": environment, "timeout": LONGEST_TRIAL, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({error})"
    return str(done.stderr + done.stdout)


def installation() -> Installation | None:
    """Return the values that must be the same on all workers; None if they can't be determined."""
    with suppress(Exception):  # which has been found before; and JAX ends the process if numpy is missing
        import_module("numpy")
        found: Installation = import_module("distdl_jax.transports.mpi.launch_checks").own_installation()
        return found
    return None


def disagreements(everyone: Sequence[Installation | None]) -> Iterator[Finding]:
    """Yield what the first partition of a job would reject; and how GPU messages are sent."""
    known = [worker for worker in everyone if worker is not None]
    if len(known) < len(everyone):
        return
    cure = "Start all workers in one environment that all hosts see, with the same variables."
    for problem in import_module("distdl_jax.transports.mpi.launch_checks").disagreements(known):
        yield Finding("error", "workers differ", problem, cure)
    if line := gpu_messages([worker.gpu for worker in known]):
        yield Finding("ok", "gpu messages", f"{line}.")


# --- folders ---


def checkpoints(path: str) -> Iterator[Finding]:
    """Yield the findings about a folder for checkpoints."""
    there, problem = _place(path)
    kind, free = output(["stat", "--file-system", "--format=%T", str(there)]).strip(), shutil.disk_usage(there).free
    if problem:
        cure = "Save to another folder, which --checkpoints checks."
        yield Finding("warning", "checkpoints", f"{path} can't be written to: {problem}.", cure)
    elif kind in ("tmpfs", "ramfs"):
        text = f"{path} is in memory ({kind}): checkpoints there end with the host."
        yield Finding("warning", "checkpoints", text, "Save to a folder on a disk.")
    elif free < LEAST_FREE:
        text = f"{path} has {free / 2**20:.0f} MiB free."
        yield Finding("warning", "checkpoints", text, "Free some space, or save to another folder.")
    else:
        yield Finding("ok", "checkpoints", f"{path} ({kind}, {free / 2**30:.2g} GiB free).")


def _place(path: str) -> tuple[Path, str]:
    """Return a folder, or its closest existing parent; and why it can't be written to."""
    there = Path(path).expanduser().absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".distdl_jax_doctor_"):
            return there, ""
    except OSError as error:
        return there, error.strerror or str(error)


_RELOAD = """
import jax
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
jax.jit(lambda x: x @ x + 1)(jax.numpy.ones((8, 8)))
print("hit" if any(event.endswith("cache_hits") for event in events) else "miss")
"""


def compilation_cache(library: str) -> Iterator[Finding]:
    """Yield whether a compilation cache works with this MPI: one process writes to it, and another reads."""
    jax = sys.modules.get("jax")
    path = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir if jax else None
    subject, cure = "compilation cache", "Set JAX_COMPILATION_CACHE_DIR to a folder of yours, or unset it."
    if not path:
        cure = "" if family(library) == "Open MPI" else "JAX_COMPILATION_CACHE_DIR=... keeps them for the next job."
        yield Finding("ok", subject, "JAX keeps no compiled programs between jobs.", cure)
        return
    there, problem = _place(path)
    mode = there.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        text = f"Every user can write to {path}, and thus run code in your jobs."
        yield Finding("warning", subject, text, f"chmod go-w {path}")
    if problem:
        yield Finding("warning", subject, f"JAX can't write to {path}: {problem}.", cure)
    elif family(library) == "Open MPI":
        text = f"Under Open MPI jobs find little in {path}, and make it grow: handles are addresses."
        yield Finding("warning", subject, text, "Leave JAX_COMPILATION_CACHE_DIR out.")
    else:
        with tempfile.TemporaryDirectory(dir=there, prefix=".distdl_jax_doctor_") as folder:
            settings = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            settings |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
            _, again = (output([sys.executable, "-c", _RELOAD], **settings) for _ in range(2))
        yield reloaded(path, again)


def reloaded(path: str, printed: str) -> Finding:
    """Return the finding if a process printed this that loaded another's compiled program from the cache."""
    if printed.endswith("hit\n"):
        return Finding("ok", "compilation cache", f"A process finds in {path} what another has compiled.")
    lines = printed.removesuffix("miss\n").splitlines() or ["there is no further output"]
    why = next((line for line in lines if "not supported" in line or "rror" in line), lines[-1])
    text = f"A process does not use compiled programs of another in {path}: {why[:300]}"
    return Finding("warning", "compilation cache", text, "Don't use the cache, or use another jaxlib.")
