"""The checks when the first partition is made: the launch, the MPI library, and one software stack on all workers."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import socket
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import jax
from mpi4py import MPI

from distdl_jax.errors import SetupError
from distdl_jax.settings import Reading, own_reading, setting_problems, warning_of_unknown
from distdl_jax.transports.mpi.compat import import_mpi4jax
from distdl_jax.validation import difference
from distdl_jax.watchdog.launch.gpus import WorkerGpu, computes_on_gpu, gpu_in_use, gpu_messages, gpu_problem
from distdl_jax.watchdog.launch.launcher import MPI_SIZES, job_size
from distdl_jax.watchdog.launch.packages import FIRST_JAX_NOT_TRIED, PACKAGES, installed_version
from distdl_jax.watchdog.launch.said_once import set_job
from distdl_jax.watchdog.watch.log import log


def check_launch() -> None:
    """Reject an MPI that JAX can't call from its threads, or that was not started by its own launcher."""
    for problem in launch_problems():
        raise SetupError(problem)
    if jax.__version_info__ >= FIRST_JAX_NOT_TRIED and MPI.COMM_WORLD.Get_rank() == 0:
        first = ".".join(map(str, FIRST_JAX_NOT_TRIED))
        warnings.warn(
            f"distdl_jax has been tested with jax before {first} only, not with {jax.__version__}. If something "
            f'fails unexpectedly, try `python -m pip install "jax<{first}" "jaxlib<{first}"`.',
            RuntimeWarning,
            stacklevel=2,
        )


def launch_problems() -> Iterator[str]:
    """Yield a sentence for each problem with the MPI of this process, or with its launcher."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        yield (
            f"MPI was started with {thread_level()}, but JAX calls MPI from its own threads, which requires "
            "MPI_THREAD_MULTIPLE. Import mpi4py (or distdl_jax) before anything else starts MPI, don't change "
            "mpi4py.rc.thread_level, and use an MPI library built with thread support."
        )
    # mpi4py and mpi4jax must be bound to one libmpi, or each starts its own. Checked only if there is /proc.
    if len(libraries := loaded_mpi_libraries()) > 1:
        yield (
            f"This process has loaded more than one MPI library: {', '.join(libraries)}. mpi4jax was built against "
            "another MPI than mpi4py's; rebuild it: pip install --no-cache-dir --force-reinstall --no-deps "
            "--no-binary mpi4jax mpi4jax, with the right mpicc first on PATH."
        )
    if (started := job_size(MPI_SIZES)) > 1 and MPI.COMM_WORLD.Get_size() == 1:
        yield (
            f"The launcher started {started} processes, but this one believes that it is alone: its MPI library "
            f"({mpi_library()}) is not the one that mpirun belongs to. Use the mpirun, or mpiexec, of that library "
            "(for an MPI from PyPI it is in the environment's bin directory, next to python); `python -m distdl_jax "
            "doctor` gives details."
        )


class Installation(NamedTuple):
    """Values that must be the same on all workers, by name; the settings; the worker's GPU; and a name for the job."""

    versions: Mapping[str, Hashable]
    reading: Reading
    gpu: WorkerGpu
    job: str = ""


def own_installation() -> Installation:
    """Inspect this worker's."""
    gpu = _worker_gpu()
    versions: dict[str, Hashable] = {
        **{package: installed_version(package) or "not installed" for package in PACKAGES},
        "MPI library": mpi_library(),
        "Python": platform.python_version(),
        "oneDNN": "left out" if gpu.gpu or own_reading().settings.onednn == "off" else _onednn_version(),
        "jax_enable_x64": bool(jax.config.jax_enable_x64),  # type: ignore[attr-defined, unused-ignore]
        "jax_disable_jit": bool(jax.config.jax_disable_jit),  # type: ignore[attr-defined, unused-ignore]
    }
    return Installation(versions, own_reading(), gpu, os.urandom(16).hex())


def disagreements(everyone: Sequence[Installation]) -> Iterator[str]:
    """Yield a sentence for each reason why the workers, by rank, can't work together, except for their settings."""
    if problem := gpu_problem([worker.gpu for worker in everyone], own_reading().settings.gpus):
        yield problem
    for what in everyone[0].versions:
        cure = " (`python -m distdl_jax.onednn` compiles it)" if what == "oneDNN" else ""
        if text := difference(what + cure, {rank: worker.versions[what] for rank, worker in enumerate(everyone)}):
            yield text


def check_workers_agree(comm: MPI.Intracomm) -> None:
    """Reject workers with different software or settings; collective in `comm`, and raises on all of its workers."""
    everyone: list[Installation] = comm.allgather(own_installation())
    set_job(everyone[0].job)
    readings = [worker.reading for worker in everyone]
    for problem in chain(setting_problems(readings), disagreements(everyone)):
        raise SetupError(problem)
    if comm.Get_rank() == 0 and (warning := warning_of_unknown(readings)):
        warnings.warn(warning, RuntimeWarning, stacklevel=2)
    if comm.Get_rank() == 0 and (line := gpu_messages([worker.gpu for worker in everyone])):
        log.info("%s", line)


def _worker_gpu() -> WorkerGpu:
    platforms = jax.config.jax_platforms or ""  # type: ignore[attr-defined, unused-ignore]
    gpu = gpu_in_use() if computes_on_gpu(platforms) else ""
    bridge = bool(gpu) and import_mpi4jax().has_cuda_support()
    aware = cuda_aware(loaded_mpi_libraries()) if gpu else None
    use_cuda_mpi, flags = (os.environ.get(name, "") for name in ("MPI4JAX_USE_CUDA_MPI", "XLA_FLAGS"))
    return WorkerGpu(socket.gethostname(), gpu, bridge, aware, use_cuda_mpi, flags)


def cuda_aware(libraries: tuple[str, ...]) -> bool | None:
    """Return whether an MPI library reads a GPU's memory, by MPICH's and Open MPI's extension; None for others."""
    for library in libraries:
        with suppress(OSError, AttributeError):
            return bool(ctypes.CDLL(library).MPIX_Query_cuda_support())
    return None


def _onednn_version() -> str:
    from distdl_jax.kernels.onednn_library import version  # not on GPUs

    return version()


def check_devices() -> None:
    """Reject a process with several JAX devices: ordered operations run on one."""
    if (count := jax.local_device_count()) > 1:
        raise SetupError(
            f"This process has {count} JAX devices, but a worker is one process with one device. `python -m "
            "distdl_jax` gives each worker its GPU; on CPU, remove --xla_force_host_platform_device_count."
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


def loaded_mpi_libraries() -> tuple[str, ...]:
    """Return the files of all MPI libraries in this process; () if there is no /proc."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return ()
    paths = set(re.findall(r"\S*/libmp(?:i|ich)\.so\S*", maps.read_text()))
    return tuple(sorted({str(Path(path).resolve()) for path in paths}))


def mpi_library() -> str:
    """Return the name and version of the MPI library that mpi4py runs on."""
    return " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].replace("\0", "").split())
