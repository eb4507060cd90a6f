"""The choice of each worker's GPU, before JAX starts, and the detection of two workers on one. Imports no JAX."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from distdl_jax.watchdog.launch.packages import installed_version

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
"""JAX's packages for NVIDIA's GPUs."""

JAX_TAKES = 0.75
"""The fraction of a GPU's memory that JAX allocates at its start, by default."""

XLA_FLAG = "--xla_gpu_enable_dynamic_slice_fusion=false"
"""Without it XLA (of jax 0.12) fuses a message with its slice, and the fusion's token crashes the compiler: `Check
failed: shape.IsArray() || shape.IsTuple()`."""


class Choice(NamedTuple):
    """Additions to a worker's environment, a line to log, and a sentence if workers have no GPU."""

    added: dict[str, str]
    line: str = ""
    problem: str = ""


class WorkerGpu(NamedTuple):
    """The GPU of a worker, by the host's name and the GPU's own; and how its messages are sent.

    - `bridge`: whether mpi4jax is compiled with CUDA.
    - `cuda_aware`: whether the MPI library reads a GPU's memory; None if it doesn't say.
    - `use_cuda_mpi`, `xla_flags`: the variables MPI4JAX_USE_CUDA_MPI, XLA_FLAGS.
    """

    host: str
    gpu: str
    bridge: bool
    cuda_aware: bool | None
    use_cuda_mpi: str
    xla_flags: str


def cuda_plugin() -> str | None:
    """Return JAX's package for NVIDIA's GPUs; None if there is none."""
    return next((name for name in PLUGINS if installed_version(name)), None)


def computes_on_gpu(platforms: str) -> bool:
    """Return whether JAX uses a GPU if there is one; `platforms` is JAX_PLATFORMS."""
    return platforms.split(",")[0] in ("", "cuda", "gpu") and cuda_plugin() is not None


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that this process may use, by the names in CUDA_VISIBLE_DEVICES."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return tuple(map(str, range(len(list(Path("/dev").glob("nvidia[0-9]*"))))))
    return tuple(name for name in given.split(",") if name not in ("", "-1"))


def choose_gpu(
    environment: Mapping[str, str], gpus: Sequence[str], workers: int, number: int | None, gpu_use: str, host: str
) -> Choice:
    """Choose the GPU of one worker.

    **Arguments:**

    - `environment`: the supervisor's. Settings of the user are kept.
    - `gpus`: the ones that the process may use.
    - `workers`: the number of workers on the host; `number`: this worker's among them, None if it is not known.
    - `gpu_use`: the setting: "own", "share" or "given".
    - `host`: its name, for messages.
    """
    if not gpus:
        return Choice({})
    flags = environment.get("XLA_FLAGS", "")
    added = {"MPI4JAX_USE_CUDA_MPI": environment.get("MPI4JAX_USE_CUDA_MPI", "0")}
    added["XLA_FLAGS"] = flags if XLA_FLAG.split("=")[0] in flags else f"{XLA_FLAG} {flags}".strip()
    if number is None or gpu_use == "given":
        return Choice(added)
    here, there = _counted(workers, "worker"), _counted(len(gpus), "GPU")
    added["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    line = f"{here} on {host}, a GPU each: {', '.join(gpus[:workers])}."
    if workers > len(gpus) and gpu_use == "share":
        sharing = len(range(number % len(gpus), workers, len(gpus)))
        if not environment.keys() & {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}:  # JAX rejects both
            added["XLA_CLIENT_MEM_FRACTION"] = f"{JAX_TAKES / sharing:.3f}"
        line = f"{here} on {host} share {there} and the memory."
    elif workers > len(gpus) == 1 and "CUDA_VISIBLE_DEVICES" in environment:
        line = f"{here} on {host}, GPUs as given."  # Slurm numbers a task's GPU 0
    elif workers > len(gpus):
        return Choice(
            {},
            problem=f"{host} has {there} for {here}: start at most one worker for each GPU, or set "
            "DISTDL_JAX_GPUS=share, to share GPUs and memory. JAX_PLATFORMS=cpu computes on CPUs.",
        )
    return Choice(added, f"distdl_jax: {line}" if number == 0 else "")


def gpu_in_use() -> str:
    """Return the name of the GPU that JAX uses in this process, the first one that CUDA shows; "" if there is none.

    CUDA is asked, since a container may show each process another GPU by the same number.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    device, name = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDeviceGetUuid_v2(name, device):
        return ""
    return f"GPU-{uuid.UUID(bytes=bytes(name))}"


def gpu_problem(everyone: Sequence[WorkerGpu], gpu_use: str) -> str:
    """Return a sentence if workers can't compute on their GPUs as configured; "" if they can, as a single worker can.

    `everyone` has each worker's, by rank; `gpu` is "" for one that computes on a CPU.
    """
    if len(everyone) == 1:
        return ""  # no messages
    users: dict[tuple[str, str], list[int]] = {}
    for worker, mine in enumerate(everyone):
        if mine.gpu:
            users.setdefault((mine.host, mine.gpu), []).append(worker)
        if mine.gpu and not mine.bridge:
            return (
                f"Worker {worker} computes on a GPU, but mpi4jax was compiled without CUDA: `make venv GPU=cuda13` (or "
                "docs/gpu.md) compiles it with CUDA. JAX_PLATFORMS=cpu computes on CPUs."
            )
        if mine.gpu and mine.use_cuda_mpi in ("1", "true", "on") and mine.cuda_aware is False:
            return (
                f"MPI4JAX_USE_CUDA_MPI is {mine.use_cuda_mpi} on worker {worker}, but its MPI library reports that it "
                "is built without CUDA, and would read the GPU's memory as the host's. With 0 messages are copied."
            )
        if mine.gpu and XLA_FLAG.split("=")[0] not in mine.xla_flags:
            return (
                f"Worker {worker} computes on a GPU, for which XLA can't compile messages of slices unless XLA_FLAGS "
                f"has {XLA_FLAG}. `python -m distdl_jax` sets it."
            )
    for (host, _), sharing in users.items():
        if len(sharing) > 1 and gpu_use != "share":
            return (
                f"Workers {', '.join(map(str, sharing))} on {host} share one GPU. Start them with `python -m "
                "distdl_jax`, which gives each worker its own, or set DISTDL_JAX_GPUS=share."
            )
    return ""


def gpu_messages(everyone: Sequence[WorkerGpu]) -> str:
    """Return how messages between GPUs are sent, as a line to log; "" if worker 0 has no GPU."""
    first = everyone[0]
    if not first.gpu:
        return ""
    if first.use_cuda_mpi in ("1", "true", "on"):
        return "MPI reads the GPUs' memory (MPI4JAX_USE_CUDA_MPI=1)"
    aware = {
        True: "is built with CUDA",
        False: "is built without CUDA",
        None: "does not report whether it supports CUDA",
    }
    return f"GPU messages are copied through the host; the MPI library {aware[first.cuda_aware]}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
