"""Checks across workers: hosts, cores, threads, memory, differences, and a message between two of them."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from distdl_jax.plans.shape_dtype import ranks_text
from distdl_jax.tools.doctor.report import Finding, merged

if TYPE_CHECKING:
    from mpi4py import MPI

LEAST_MEMORY = 2**30
"""Bytes; a worker needs 0.25 GiB before it holds a tensor, and more while it compiles."""

LEAST_SHARED = 32 * 2**20
"""Bytes of /dev/shm for each worker of a host; MPI's own queues need 5 MiB, and messages are additional."""

SIZES = {8: "8 bytes", 2**20: "1 MiB"}
"""The messages, in bytes and as text."""

SLOW_NETWORK = 15e-6
"""Seconds of a small message between hosts. Cluster networks take 1 to 5 us, Ethernet with TCP 20 or more."""


_THREADS = ("NPROC", "PJRT_NPROC", "OMP_NUM_THREADS")


class Host(NamedTuple):
    """A worker's host, and its resources for the worker; None if unknown.

    - `cores`: of the host; `affinity`: those that this worker may run on.
    - `memory`: bytes that are available, by the host and by a cgroup's limit; `shared`: bytes free in /dev/shm.
    - `threads`: the number with which XLA and oneDNN compute; `variables`: the environment variables that determine it.
    """

    name: str
    cores: int
    affinity: tuple[int, ...]
    memory: int | None
    shared: int | None
    threads: Mapping[str, int]
    variables: str

    @classmethod
    def here(cls) -> Host:
        """Inspect this worker's host, once JAX has started its threads."""
        cores = os.cpu_count() or 1
        kib = [int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemAvailable")]
        limits = [int(limit) for limit in _memory_limits() if limit.isdecimal()]
        return cls(
            name=socket.gethostname(),
            cores=cores,
            affinity=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (*range(cores),),
            memory=min([*(1024 * size for size in kib), *limits], default=None),
            shared=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
            threads=_threads_here(),
            variables=", ".join(f"{name}={os.environ[name]}" for name in _THREADS if os.environ.get(name)),
        )


def _lines(path: Path | str) -> list[str]:
    with suppress(OSError, UnicodeDecodeError):
        return Path(path).read_text().splitlines()
    return []


def _memory_limits() -> Iterator[str]:
    """Yield the limits of this process's cgroup (version 2), and of its parents."""
    for line in _lines("/proc/self/cgroup"):
        if line.startswith("0::"):
            inner = Path(f"/sys/fs/cgroup{line[3:]}")
            for folder in (inner, *inner.parents):
                yield from _lines(folder / "memory.max")


def _threads_here() -> dict[str, int]:
    names = [line for task in Path("/proc").glob("self/task/*/comm") for line in _lines(task)]
    threads = {"XLA": names.count("tf_XLAEigen")}
    if "jax" in sys.modules:
        from distdl_jax.kernels import onednn_library as shared_library

        if shared_library.version() != "none":
            threads["oneDNN"] = shared_library.threads()
    return {name: count for name, count in threads.items() if count}


def find(everyone: Sequence[Host], simulated: int = 0) -> Iterator[Finding]:
    """Yield the findings about hosts, for the workers by rank; `simulated`: the number of threads of one process."""
    hosts: dict[str, list[int]] = {}
    for worker, host in enumerate(everyone):
        hosts.setdefault(host.name, []).append(worker)
    if not simulated:
        share = {name: usable([everyone[rank] for rank in ranks]) / len(ranks) for name, ranks in hosts.items()}
        fullest = hosts[min(hosts, key=lambda name: share[name])]
        yield from _placement(everyone, hosts)
        yield _cores([everyone[rank] for rank in fullest], fullest)
        yield from merged([list(_threads(host, max(1, int(share[host.name])))) for host in everyone])
    for subject, least, sizes, cure in (
        ("memory", LEAST_MEMORY, [host.memory for host in everyone], "Use fewer workers on the host, or more memory."),
        ("shared memory", LEAST_SHARED, [host.shared for host in everyone], _CURE_SHARED),
    ):
        shares = {
            host.name: size / (simulated or len(hosts[host.name])) / 2**30
            for host, size in zip(everyone, sizes, strict=True)
            if size is not None and (subject == "memory" or len(hosts[host.name]) > 1)
        }
        if shares:
            name = min(shares, key=lambda name: shares[name])
            bad, text = shares[name] * 2**30 < least, f"{shares[name]:.3g} GiB for each worker on {name}."
            yield Finding("warning" if bad else "ok", subject, text, cure * bad)


_CURE_SHARED = "A job is ended by SIGBUS if /dev/shm is full: docker run --shm-size=2g, or --ipc=host, in a container."


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def usable(everyone: Sequence[Host]) -> int:
    """Return the number of cores available to the workers of one host together."""
    return len(set[int]().union(*(host.affinity for host in everyone)))


def _placement(everyone: Sequence[Host], workers: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    listed = "; ".join(f"{name}: {ranks_text(tuple(ranks))}" for name, ranks in list(workers.items())[:8])
    more = f"; and {len(workers) - 8} more" if len(workers) > 8 else ""
    text = f"{_number(len(everyone), 'worker')} on {_number(len(workers), 'host')} ({listed}{more})."
    changes = sum(one.name != other.name for one, other in pairwise(everyone))
    if changes >= len(workers) > 1:
        cure = "Fill one host after the other: srun --distribution=block, mpiexec --map-by core."
        yield Finding("warning", "hosts", f"Neighbours are on different hosts: {text}", cure)
    else:
        yield Finding("ok", "hosts", text)


def _cores(everyone: Sequence[Host], ranks: Sequence[int]) -> Finding:
    """Return the share of cores for the workers of the fullest host."""
    first, cores, sizes = everyone[0], usable(everyone), [len(host.affinity) for host in everyone]
    text = f"{_number(len(ranks), 'worker')} on {first.name} can use {cores} of {_number(first.cores, 'core')}"
    bind = "Bind each to its own cores: --bind-to core, srun --cpu-bind=cores."
    if len(ranks) > cores:
        text += ": MPI spins while it waits, taking time from the worker that computes."
        return Finding("warning", "cores", text, bind if cores < first.cores else f"Start at most {cores} there.")
    if sum(sizes) > cores > min(sizes):
        some = zip(ranks[:4], everyone, strict=False)
        text += ", which overlap: " + ", ".join(f"worker {rank} has {ranks_text(host.affinity)}" for rank, host in some)
        return Finding("warning", "cores", f"{text}.", bind)
    return Finding("ok", "cores", f"{text}.")


def _threads(host: Host, share: int) -> Iterator[Finding]:
    """Yield whether a worker computes with as many threads as it has cores, its `share` of the host's."""
    for name, threads in host.threads.items():
        given = host.variables or "no variable is set"
        text = f"{name} computes with {_number(threads, 'thread')} on {_number(share, 'core')} ({given})."
        if threads > share:
            cure = "Unset NPROC, PJRT_NPROC and OMP_NUM_THREADS: python -m distdl_jax sets them."
            yield Finding("warning", "threads", text, cure)
        elif threads < share:
            variable = "NPROC" if name == "XLA" else "OMP_NUM_THREADS"
            yield Finding("note", "threads", text, f"{variable}={share} would use all.")
        else:
            yield Finding("ok", "threads", text)


# --- messages, and a file visible to all: collective ---


def messages(comm: MPI.Intracomm, everyone: Sequence[str]) -> list[Finding]:
    """Time messages from worker 0 to another on its host, and to one on another host; return worker 0's findings."""
    near = [worker for worker, host in enumerate(everyone) if worker and host == everyone[0]][:1]
    far = [worker for worker, host in enumerate(everyone) if host != everyone[0]][:1]
    found = []
    for other in near + far:
        for nbytes in SIZES:
            request = comm.Ibarrier()
            while not request.Test():
                time.sleep(0.001)  # an MPI barrier spins, taking time from workers that measure
            if comm.Get_rank() in (0, other):
                found.append(message(_ping_pong(comm, other, nbytes), nbytes, everyone[0], everyone[other], other))
    return found


def _ping_pong(comm: MPI.Intracomm, other: int, nbytes: int, times: int = 50) -> float:
    """Return half the time of a message and its answer, the median of several."""
    block, seconds = bytearray(nbytes), []
    for _ in range(times):
        began = time.perf_counter()
        if comm.Get_rank() == 0:
            comm.Send(block, other)
            comm.Recv(block, other)
        else:
            comm.Recv(block, 0)
            comm.Send(block, 0)
        seconds.append((time.perf_counter() - began) / 2)
    return median(seconds)


def message(seconds: float, nbytes: int, host: str, other_host: str, other: int) -> Finding:
    """Return the finding about the time of a message to a worker."""
    where = "on one host" if host == other_host else f"on {host} and {other_host}"
    speed = f" ({nbytes / seconds / 1e9:.3g} GB/s)" if nbytes > 1024 else ""
    text = f"{SIZES[nbytes]} from worker 0 to {other}, {where}, takes {1e6 * seconds:.4g} us{speed}."
    if host != other_host and nbytes < 1024 and seconds > SLOW_NETWORK:
        cure = "If the hosts have a faster network than Ethernet, MPI does not use it: use the cluster's own MPI."
        return Finding("note", "message", text, cure)
    return Finding("ok", "message", text)


def folder_seen(comm: MPI.Intracomm, folder: str) -> list[Finding]:
    """Return an error if a worker does not see a file that worker 0 writes to the folder for checkpoints."""
    path = Path(folder).expanduser() / f".distdl_jax_doctor_{comm.bcast(os.getpid())}"
    if comm.Get_rank() == 0:
        with suppress(OSError):  # the problem has been found before
            path.touch()
    wrote = comm.bcast(path.exists())
    blind = tuple(worker for worker, sees in enumerate(comm.allgather(path.exists())) if wrote and not sees)
    if comm.Get_rank() == 0:
        path.unlink(missing_ok=True) if wrote else None
    text = f"A file that worker 0 writes to {folder} can't be seen"
    cure = "Save to a folder on a file system that all hosts share."
    return [Finding("error", "checkpoints", f"{text}.", cure, blind)] if blind else []
