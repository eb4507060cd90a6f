"""Facts about packages, JAX and MPI. Nothing here raises: what fails is a fact."""

from __future__ import annotations

import os
import platform
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from distdl_jax.doctor.facts import Devices, Mpi, Software, Threads
from distdl_jax.launch import supervised
from distdl_jax.launch.gpus import cuda_plugin, gpu_in_use
from distdl_jax.launch.packages import PACKAGES, installed_version, minimum_versions


def start_mpi() -> Mpi:
    """Start MPI, and mpi4jax on it, and return the facts."""
    supervised.tell(supervised.STARTS_MPI)
    try:
        from mpi4py import MPI

        if not MPI.Is_initialized():
            return Mpi("mpi4py was told not to start MPI (mpi4py.rc.initialize, MPI4PY_RC_INITIALIZE)")
    except (ImportError, RuntimeError) as error:
        return Mpi(_sentence(error))
    finally:
        supervised.tell(supervised.HAS_MPI)
    bridge_error = None
    try:
        from distdl_jax.transports.mpi.compat import import_mpi4jax

        import_mpi4jax()
    except (ImportError, RuntimeError) as error:
        bridge_error = _sentence(error)
    try:
        from distdl_jax.transports.mpi.launch_checks import cuda_aware, loaded_mpi_libraries, mpi_library, thread_level
    except ImportError as error:  # no JAX
        return Mpi(size=MPI.COMM_WORLD.Get_size(), bridge_error=bridge_error or _sentence(error))
    loaded = loaded_mpi_libraries()
    return Mpi(
        implementation=mpi_library(),
        loaded=loaded,
        size=MPI.COMM_WORLD.Get_size(),
        thread_level=thread_level(),
        bridge_error=bridge_error,
        cuda_aware=cuda_aware(loaded),
    )


def software() -> Software:
    """Return the facts about packages and JAX's options; starts JAX."""
    python = platform.python_version()
    packages = {package: installed_version(package) for package in PACKAGES}
    location = str(Path(__file__).parents[1])
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the doctor needs no memory of a GPU
    try:
        import jax

        jax.local_devices()
    except (ImportError, RuntimeError) as error:
        return Software(python, packages, minimum_versions(), location, jax_error=_sentence(error))
    onednn, problem, is_here = _onednn()
    return Software(
        python,
        packages,
        minimum_versions(),
        location,
        x64=bool(_option("jax_enable_x64")),
        disable_jit=bool(_option("jax_disable_jit")),
        debug_nans=bool(_option("jax_debug_nans") or _option("jax_debug_infs")),
        rank_promotion=str(_option("jax_numpy_rank_promotion")),
        onednn=onednn,
        onednn_problem=problem,
        onednn_is_here=is_here,
    )


def _option(name: str) -> Any:
    """Return an option of JAX's; None without JAX, or where it has no such option."""
    try:
        import jax
    except ImportError:
        return None
    return getattr(jax.config, name, None)


def _onednn() -> tuple[str, str | None, bool]:
    """Return oneDNN's version, the warning where a compiled one is left out, and whether one could be compiled."""
    from distdl_jax.kernels.cpu.onednn.build import can_be_tried
    from distdl_jax.kernels.cpu.onednn.shared_library import version

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = version()
    try:
        is_here = can_be_tried()
    except (OSError, ValueError):
        is_here = False
    return found, str(caught[0].message) if caught else None, is_here


def devices() -> Devices:
    """Return the facts about JAX's devices and the host's GPUs; after `software`."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible, platforms = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("JAX_PLATFORMS", "")
    kind, count, bridge = "cpu", 1, False
    with suppress(ImportError, RuntimeError):
        import jax

        kind, count = jax.default_backend(), jax.local_device_count()
        from distdl_jax.transports.mpi.compat import import_mpi4jax

        bridge = bool(import_mpi4jax().has_cuda_support())
    gpu, use_cuda_mpi = gpu_in_use() if kind == "gpu" else "", os.environ.get("MPI4JAX_USE_CUDA_MPI")
    return Devices(kind, count, gpus, visible, cuda_plugin(), bridge, use_cuda_mpi, platforms, gpu)


def threads() -> Threads:
    """Return the facts about threads; after `software`, with which XLA's have started."""
    names = ("NPROC", "PJRT_NPROC", "OMP_NUM_THREADS")
    environment = {name: os.environ[name] for name in names if os.environ.get(name)}
    tasks = Path("/proc/self/task")
    count = 0
    for task in tasks.iterdir() if tasks.exists() else ():
        with suppress(OSError):
            count += (task / "comm").read_text().strip() == "tf_XLAEigen"
    onednn = 1
    with suppress(ImportError):
        from distdl_jax.kernels.cpu.onednn.shared_library import threads as onednn_threads

        onednn = onednn_threads()
    return Threads(environment, count or None, onednn)


def cache_folder() -> str | None:
    """Return JAX's compilation cache; None where none is set, or it is off."""
    if _option("jax_enable_compilation_cache"):
        return _option("jax_compilation_cache_dir") or None
    return None


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
