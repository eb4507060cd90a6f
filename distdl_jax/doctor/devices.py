"""Findings about JAX's devices, GPUs, and whether MPI can read their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distdl_jax.doctor.facts import Facts
from distdl_jax.doctor.findings import HOST, Finding, on_each_host, on_each_worker, worker_names


def find(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Yield the findings about devices."""
    yield from on_each_worker(_device, everyone)
    yield from on_each_worker(_messages_of_gpus, everyone)
    yield from on_each_host(_one_gpu_for_many, everyone)


def _on_gpu(facts: Facts) -> bool:
    return facts.devices.platform in ("gpu", "cuda", "rocm")


def _device(facts: Facts) -> Iterator[Finding]:
    devices = facts.devices
    if devices.count > 1:
        found = f"This process has {devices.count} JAX devices, but a worker is one process with one device."
        cure = "Leave --xla_force_host_platform_device_count out of XLA_FLAGS."
        if _on_gpu(facts):
            cure = "python -m distdl_jax gives each worker its GPU (DISTDL_JAX_GPUS); or srun --gpus-per-task=1."
        yield Finding("error", "devices", found, cure)
    elif devices.platform == "cpu" and devices.gpus and devices.platforms != "cpu" and devices.visible != "":
        found = f"JAX computes on the CPU, but the host has {devices.gpus} NVIDIA GPU{'s' * (devices.gpus > 1)}."
        cure = 'python -m pip install "jax[cuda13]"'
        if devices.plugin:
            cure = f"""{devices.plugin} is installed: python -c 'import jax; jax.devices("cuda")' says what it misses"""
        cure += "; JAX_PLATFORMS=cpu if that is what you want."
        yield Finding("note", "devices", found, cure)
    elif facts.software.jax_error is None:
        yield Finding("ok", "devices", f"JAX computes on one device ({devices.platform}).")


def _messages_of_gpus(facts: Facts) -> Iterator[Finding]:
    """Yield whether messages between GPUs go through the host."""
    devices, aware = facts.devices, facts.mpi.cuda_aware
    if devices.use_cuda_mpi == "1" and aware is False:
        found = "MPI4JAX_USE_CUDA_MPI=1, but the MPI library says that it is built without CUDA: a segmentation fault."
        yield Finding("error" if _on_gpu(facts) else "note", "gpu messages", found, "MPI4JAX_USE_CUDA_MPI=0")
    elif not _on_gpu(facts):
        return
    elif not devices.bridge:
        found = "JAX computes on a GPU, but mpi4jax was compiled without CUDA."
        yield Finding("error", "gpu messages", found, "make venv GPU=cuda13, or as docs/gpu.md says.")
    elif devices.use_cuda_mpi == "1":
        yield Finding("ok", "gpu messages", "MPI reads the GPU's memory.")
    else:
        cure = "MPI4JAX_USE_CUDA_MPI=1 has MPI read the GPU's memory." if aware else "An MPI built for CUDA is faster."
        yield Finding("note", "gpu messages", "Messages are copied to the host and back.", cure)


def _one_gpu_for_many(everyone: Sequence[Facts], workers: Sequence[int]) -> Iterator[Finding]:
    users: dict[str, list[int]] = {}
    for worker, facts in zip(workers, everyone, strict=True):
        if _on_gpu(facts):
            name = "not set" if facts.devices.visible is None else facts.devices.visible
            users.setdefault(facts.devices.gpu or f"CUDA_VISIBLE_DEVICES is {name}", []).append(worker)
    shared = everyone[0].settings.settings.gpus == "share"
    for gpu, sharing in users.items():
        if len(sharing) > 1:
            found = f"{worker_names(sharing).capitalize()} on {HOST} share one GPU ({gpu})."
            cure = "python -m distdl_jax gives each worker its own; with DISTDL_JAX_GPUS=share they share the memory."
            yield Finding("ok" if shared else "error", "devices", found, "" if shared else cure)
