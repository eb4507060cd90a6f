"""Findings about hosts: which workers they have, on which cores, with how many threads and how much memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from distdl_jax.doctor.facts import Facts
from distdl_jax.doctor.findings import HOST, Finding, by_host, on_each_host, on_each_worker, size_text, worker_names

LEAST_MEMORY = 2**30
"""Bytes; a worker takes 0.25 GiB before it holds a tensor, and more while it compiles."""

LEAST_SHARED = 32 * 2**20
"""Bytes of /dev/shm for each worker of a host; MPI's own queues take 5 MiB, and messages come on top."""

LEAST_LOCKED = 64 * 2**20
"""Bytes; networks with RDMA lock the memory that they send."""


def find(everyone: Sequence[Facts], simulated: int = 0) -> Iterator[Finding]:
    """Yield the findings about hosts; `simulated`: how many workers are threads of one process."""
    hosts = by_host(everyone)
    yield from _placement(everyone)
    yield from on_each_host(_cores, everyone)
    if not simulated:
        share = {host: _share([everyone[worker] for worker in workers]) for host, workers in hosts.items()}
        yield from on_each_worker(lambda facts: _threads(facts, share[facts.host.name]), everyone)
        yield from on_each_worker(_malloc, everyone)
    yield from _warnings_or_one(on_each_host(partial(_memory, simulated=simulated), everyone))
    if not simulated:
        yield from _warnings_or_one(on_each_host(_shared_memory, everyone))
    yield from on_each_worker(_address_space, everyone)
    yield from _locked_memory(everyone)


def _placement(everyone: Sequence[Facts]) -> Iterator[Finding]:
    hosts = by_host(everyone)
    if len(hosts) == 1:
        yield Finding("ok", "hosts", f"{_count(len(everyone), 'worker')} on {next(iter(hosts))}.")
        return
    listed = "; ".join(f"{host}: {worker_names(workers)}" for host, workers in list(hosts.items())[:8])
    more = f"; and {len(hosts) - 8} more" if len(hosts) > 8 else ""
    neighbours = sum(one.host.name != other.host.name for one, other in pairwise(everyone))
    if neighbours >= len(hosts) and max(map(len, hosts.values())) > 1:
        found = (
            f"Workers are dealt out to the hosts in turn, so that neighbours are on different hosts: {listed}{more}."
        )
        cure = "Fill one host after the other: srun --distribution=block, mpiexec --map-by core."
        yield Finding("warning", "hosts", found, cure)
    else:
        yield Finding("ok", "hosts", f"{len(everyone)} workers on {len(hosts)} hosts: {listed}{more}.")
    sizes = {len(workers) for workers in hosts.values()}
    if len(sizes) > 1:
        found = f"Hosts have between {min(sizes)} and {max(sizes)} workers: those on full hosts are waited for."
        yield Finding("note", "hosts", found)
    processors = Counter(facts.host.processor for facts in everyone)
    if len(processors) > 1:
        found = f"Hosts differ in their processors: {', '.join(processors)}. Equal blocks take unequal times."
        yield Finding("note", "hosts", found)


def usable(everyone: Sequence[Facts]) -> int:
    """Return how many cores the workers of one host have together."""
    cores = len(set[int]().union(*(facts.host.affinity for facts in everyone)))
    quotas = [facts.host.quota for facts in everyone if facts.host.quota is not None]
    return min(cores, max(1, math.floor(min(quotas)))) if quotas else cores


def _share(everyone: Sequence[Facts]) -> int:
    """Return how many cores a worker of one host has, if all have equally many."""
    return max(1, usable(everyone) // len(everyone))


def _cores(everyone: Sequence[Facts], workers: Sequence[int]) -> Iterator[Finding]:
    first, count = everyone[0].host, usable(everyone)
    sets = [set(facts.host.affinity) for facts in everyone]
    bound = all(len(cores) < first.cores for cores in sets)
    together = set[int]().union(*sets)
    who, of = _count(len(workers), "worker"), f"{count} of {_count(first.cores, 'core')} on {HOST}"
    if first.quota is not None and first.quota < len(together):
        found = f"A cgroup gives {first.quota:g} processors for {_count(len(together), 'core')} on {HOST}."
        yield Finding("note", "cores", found, "docker run --cpus, Kubernetes' limits.cpu.")
    if len(workers) > count:
        found = f"{who} share {of}: MPI spins while it waits, and takes the time of the worker that computes."
        cure = f"Start at most {_count(first.cores if bound else count, 'worker')} there"
        cure += ", and bind each to cores of its own: --bind-to core, srun --cpu-bind=cores." if bound else "."
        yield Finding("warning", "cores", found, cure)
    elif bound and sum(map(len, sets)) > len(together) and any(cores != together for cores in sets):
        found = f"The cores of workers on {HOST} overlap: " + ", ".join(
            f"worker {worker} has {_range(cores)}" for worker, cores in zip(workers[:4], sets, strict=False)
        )
        cure = "Bind each to cores of its own: mpiexec --bind-to core, srun --cpu-bind=cores."
        yield Finding("warning", "cores", f"{found}{', ...' if len(workers) > 4 else ''}.", cure)
    elif len(workers) > 1 and all(cores == together for cores in sets):
        cure = "Binding is faster on large hosts: --bind-to core, srun --cpu-bind=cores."
        yield Finding("ok", "cores", f"{who} share {of}, and may move between them.", cure)
    else:
        yield Finding("ok", "cores", f"{who} may use {of}.")


def _threads(facts: Facts, share: int) -> Iterator[Finding]:
    """Yield whether a worker computes with as many threads as it has cores, its `share` of the host's."""
    onednn = facts.threads.onednn if facts.software.onednn != "none" else None
    for name, threads, variables in (
        ("XLA", facts.threads.xla, ("NPROC", "PJRT_NPROC")),
        ("oneDNN", onednn, ("OMP_NUM_THREADS", "NPROC")),
    ):
        if threads is None:
            continue
        settings = [
            f"{each}={facts.threads.environment[each]}" for each in variables if each in facts.threads.environment
        ]
        given = ", ".join(settings) or f"{variables[0]} is not set"
        found = f"{name} computes with {_count(threads, 'thread')} on a worker, whose share is {_count(share, 'core')} "
        found += f"({given})."
        if threads > share:
            cure = "Leave NPROC, PJRT_NPROC and OMP_NUM_THREADS out: python -m distdl_jax sets them."
            yield Finding("warning", "threads", found, cure)
        elif threads < share:
            yield Finding("note", "threads", found, f"{variables[0]}={share} would use all.")
        else:
            yield Finding("ok", "threads", found)


def _warnings_or_one(found: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the warnings about hosts; where there are none, what is said of the first."""
    every = list(found)
    yield from [each for each in every if each.verdict != "ok"] or every[:1]


def _memory(everyone: Sequence[Facts], workers: Sequence[int], simulated: int) -> Iterator[Finding]:
    first, count = everyone[0].host, simulated or len(workers)
    sizes = [size for size in (first.memory_available, first.memory_limit) if size is not None]
    if not sizes:
        return
    available = min(sizes)
    limit = f" (a cgroup's limit is {size_text(first.memory_limit)})" if first.memory_limit is not None else ""
    found = f"{size_text(available)} of {size_text(first.memory or available)} on {HOST} can be had{limit}: "
    found += f"{size_text(available / count)} for each worker."
    if available / count < LEAST_MEMORY:
        cure = "Fewer workers on the host, or more memory: a worker takes 0.25 GiB before it holds a tensor."
        yield Finding("warning", "memory", found, cure)
    else:
        yield Finding("ok", "memory", found)


def _shared_memory(everyone: Sequence[Facts], workers: Sequence[int]) -> Iterator[Finding]:
    first = everyone[0].host
    if first.shared_memory is None or first.shared_memory_free is None or len(workers) == 1:
        return
    found = f"{size_text(first.shared_memory_free)} of {size_text(first.shared_memory)} in /dev/shm on {HOST} are free."
    if first.shared_memory_free < LEAST_SHARED * len(workers):
        found += " MPI keeps messages between workers of a host there, and a job ends by SIGBUS where it is full."
        cure = "In a container: docker run --shm-size=2g, or --ipc=host. Else remove files that other jobs left there."
        yield Finding("warning", "shared memory", found, cure)
    else:
        yield Finding("ok", "shared memory", found)


def _malloc(facts: Facts) -> Iterator[Finding]:
    host, tunables = facts.host, facts.host.malloc
    if not host.glibc:
        return
    if "hugetlb=1" not in tunables:
        found = f"malloc is left alone (GLIBC_TUNABLES={tunables!r}): large buffers are fresh pages at each call."
        yield Finding(
            "note", "huge pages", found, "Leave GLIBC_TUNABLES and MALLOC_ARENA_MAX out for malloc on huge pages."
        )
    elif tuple(int(part) for part in host.glibc.split(".")[:2]) < (2, 35):
        found = (
            f"glibc {host.glibc} has no huge pages for malloc, which come with 2.35: messages of megabytes are slower."
        )
        yield Finding("note", "huge pages", found)
    elif host.huge_pages == "never":
        found = "The system gives out no huge pages: messages of megabytes are slower by a third or more."
        cure = "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("note", "huge pages", found, cure)
    else:
        yield Finding("ok", "huge pages", f"malloc asks for them, and the system gives them ({host.huge_pages}).")


def _address_space(facts: Facts) -> Iterator[Finding]:
    host = facts.host
    if host.address_space is not None:
        found = f"A process may have {size_text(host.address_space)} of addresses, of which XLA takes many unused."
        yield Finding("warning", "limits", found, "ulimit -v unlimited")


def _locked_memory(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Yield a note where a job on several hosts may lock little memory."""
    sizes = [facts.host.locked_memory for facts in everyone if facts.host.locked_memory is not None]
    if len(by_host(everyone)) > 1 and sizes and min(sizes) < LEAST_LOCKED:
        found = f"A process may lock {size_text(min(sizes))} of memory; InfiniBand and its like want it unlimited."
        yield Finding("note", "limits", found, "ulimit -l unlimited; Slurm: PropagateResourceLimitsExcept=MEMLOCK.")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _range(cores: set[int]) -> str:
    text = worker_names(sorted(cores))
    return text.replace("worker", "core")
