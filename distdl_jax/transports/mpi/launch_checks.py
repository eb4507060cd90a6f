"""The checks when the first partition is made: the launch, the MPI library, and one software stack on all workers."""

from __future__ import annotations

import platform
import re
import warnings
from pathlib import Path

import jax
from mpi4py import MPI

from distdl_jax.errors import SetupError
from distdl_jax.launch.launcher import MPI_SIZES, job_size
from distdl_jax.launch.packages import FIRST_JAX_NOT_TRIED, PACKAGES, installed_version
from distdl_jax.settings import Reading, check_settings, own_reading, refuse_differences, warning_of_unknown


def check_launch() -> None:
    """Refuse an MPI that JAX can't call from its threads, and one that was not started by its own launcher."""
    _check_thread_support()
    _check_one_library()
    if jax.__version_info__ >= FIRST_JAX_NOT_TRIED and MPI.COMM_WORLD.Get_rank() == 0:
        first = ".".join(map(str, FIRST_JAX_NOT_TRIED))
        warnings.warn(
            f"distdl_jax has not been tested with jax {jax.__version__}, but with versions before {first}. If "
            f'something fails that should not, try `python -m pip install "jax<{first}" "jaxlib<{first}"`.',
            RuntimeWarning,
            stacklevel=2,
        )
    if (started := job_size(MPI_SIZES)) > 1 and MPI.COMM_WORLD.Get_size() == 1:
        raise SetupError(
            f"The launcher started {started} processes, but this one believes that it is alone: its MPI library "
            f"({mpi_library()}) is not the one that mpirun belongs to. Use the mpirun, or mpiexec, of that library "
            "(for an MPI from PyPI it is in the environment's bin directory, beside python); `python -m distdl_jax "
            "doctor` says more."
        )


def check_workers_agree(comm: MPI.Intracomm) -> None:
    """Refuse workers with different software or settings; collective in `comm`, and raises on all of its workers."""
    mine = {
        **{package: installed_version(package) or "not installed" for package in PACKAGES},
        "MPI library": mpi_library(),
        "Python": platform.python_version(),
        "oneDNN": _onednn_version() if own_reading().settings.onednn != "off" else "left out",
        "jax_enable_x64": bool(jax.config.jax_enable_x64),  # type: ignore[attr-defined, unused-ignore]
        "jax_disable_jit": bool(jax.config.jax_disable_jit),  # type: ignore[attr-defined, unused-ignore]
    }
    everyone: list[tuple[dict[str, object], Reading]] = comm.allgather((mine, own_reading()))
    check_settings([reading for _, reading in everyone])
    for what in mine:
        refuse_differences(what, [facts[what] for facts, _ in everyone])
    if comm.Get_rank() == 0 and (warning := warning_of_unknown([reading for _, reading in everyone])):
        warnings.warn(warning, RuntimeWarning, stacklevel=2)


def _onednn_version() -> str:
    from distdl_jax.kernels.cpu.onednn.shared_library import (
        version,  # not without need: nothing else is imported on GPUs
    )

    return version()


def check_devices() -> None:
    """Refuse a process with several JAX devices: ordered operations run on one."""
    if (count := jax.local_device_count()) > 1:
        raise SetupError(
            f"This process has {count} JAX devices, but a worker is one process with one device. On GPUs give each "
            "worker its own, for example CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK; on CPU leave out "
            "--xla_force_host_platform_device_count."
        )


def _check_thread_support() -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise SetupError(
            f"MPI was started with {thread_level()}, but JAX calls MPI from its own threads, which takes "
            "MPI_THREAD_MULTIPLE. Import mpi4py (or distdl_jax) before anything else starts MPI, leave "
            "mpi4py.rc.thread_level as it is, and use an MPI library built with thread support."
        )


def thread_level() -> str:
    """Return the name of MPI's level of thread support."""
    names = {
        MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
        MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
        MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
        MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
    }
    return names[MPI.Query_thread()]


def _check_one_library() -> None:
    """mpi4py and mpi4jax must be bound to one libmpi, or each starts its own. Checked where there is /proc."""
    if len(libraries := loaded_mpi_libraries()) > 1:
        raise SetupError(
            f"This process has loaded more than one MPI library: {', '.join(libraries)}. mpi4jax was built against "
            "another MPI than mpi4py runs on; build it again: pip install --no-cache-dir --force-reinstall --no-deps "
            "--no-binary mpi4jax mpi4jax, with the right mpicc first on PATH."
        )


def loaded_mpi_libraries() -> tuple[str, ...]:
    """Return the files of all MPI libraries in this process; () where there is no /proc."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return ()
    paths = set(re.findall(r"\S*/libmp(?:i|ich)\.so\S*", maps.read_text()))
    return tuple(sorted({str(Path(path).resolve()) for path in paths}))


def mpi_library() -> str:
    """Return the name and version of the MPI library that mpi4py runs on."""
    return " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].replace("\0", "").split())
