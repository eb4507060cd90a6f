"""Findings about folders: the compilation cache, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distdl_jax.doctor.facts import Facts, Folder, Measured
from distdl_jax.doctor.findings import Finding, by_host, on_each_worker, size_text, worker_names
from distdl_jax.doctor.launch import family

LEAST_FREE = 2**30
"""Bytes."""

_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "smb", "cifs", "glusterfs", "panfs", "fuse.sshfs", "9p", "afs")
_IN_MEMORY = ("tmpfs", "ramfs")


def find(everyone: Sequence[Facts], measured: Measured | None = None) -> Iterator[Finding]:
    """Yield the findings about folders."""
    yield from on_each_worker(_cache, everyone)
    yield from _cache_of_unlike_workers(everyone)
    yield from _checkpoints(everyone, measured or Measured())


def is_shared(filesystem: str) -> bool:
    """Return whether a file system is one of a network.

    >>> is_shared("nfs4"), is_shared("ext4")
    (True, False)
    """
    return filesystem.startswith(_SHARED)


def _cache(facts: Facts) -> Iterator[Finding]:
    cache, openmpi = facts.cache, family(facts.mpi.implementation) == "Open MPI"
    if cache is None:
        cure = "" if openmpi else "JAX_COMPILATION_CACHE_DIR=... lets the next job take what one has compiled."
        yield Finding("ok", "compilation cache", "JAX keeps no compiled programs between jobs.", cure)
        return
    if cache.problem:
        found = f"JAX can't write to its compilation cache {cache.path}: {cache.problem}."
        yield Finding("warning", "compilation cache", found, "Set JAX_COMPILATION_CACHE_DIR to a folder of yours.")
        return
    if cache.anyone_writes:
        found = f"Every user can write to {cache.path}, and who writes there runs code in your jobs."
        yield Finding("warning", "compilation cache", found, f"chmod go-w {cache.path}")
    if openmpi:
        found = f"Under Open MPI jobs find little in {cache.path}, and let it grow: handles are addresses."
        yield Finding("warning", "compilation cache", found, "Leave JAX_COMPILATION_CACHE_DIR out.")
    elif facts.settings.settings.debug:
        found = f"With DISTDL_JAX_DEBUG=1 programs that communicate are not kept in {cache.path}."
        yield Finding("note", "compilation cache", found)
    elif not cache.anyone_writes:
        yield Finding("ok", "compilation cache", f"{cache.path} ({_about(cache)}).")


def _cache_of_unlike_workers(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Yield a warning where workers share a cache, but neither processors nor numbers of threads."""
    users: dict[str, set[tuple[str, int | None]]] = {}
    for facts in everyone:
        if facts.cache is not None:
            users.setdefault(facts.cache.path, set()).add((facts.host.processor, facts.threads.xla))
    for path, kinds in users.items():
        processors, threads = map(set, zip(*kinds, strict=True))
        for what, values in (("processors", processors), ("numbers of threads", threads)):
            if len(values) > 1:
                found = f"Workers with different {what} share the compilation cache {path}."
                cure = "Set JAX_COMPILATION_CACHE_DIR to a folder for each: XLA compiles for the one that it finds."
                yield Finding("warning", "compilation cache", found, cure)


def _checkpoints(everyone: Sequence[Facts], measured: Measured) -> Iterator[Finding]:
    hosts = by_host(everyone)
    blind = [worker for worker, seen in enumerate(measured.folder_seen) if not seen]
    if blind:
        path = everyone[0].checkpoints.path if everyone[0].checkpoints else "the folder"
        found = f"{worker_names(blind).capitalize()} can't see a file that worker 0 writes to {path}."
        yield Finding("error", "checkpoints", found, "Save to a folder on a file system that all hosts share.")
    yield from on_each_worker(lambda facts: _folder(facts, len(hosts)), everyone)


def _folder(facts: Facts, hosts: int) -> Iterator[Finding]:
    folder = facts.checkpoints
    if folder is None:
        return
    if folder.problem:
        found = f"{folder.path} can't be written to: {folder.problem}."
        yield Finding("warning", "checkpoints", found, "Save to another folder; --checkpoints looks at it.")
    elif folder.filesystem in _IN_MEMORY:
        found = f"{folder.path} is in memory ({folder.filesystem}): checkpoints there end with the host."
        yield Finding("warning", "checkpoints", found, "Save to a folder on a disk.")
    elif folder.free is not None and folder.free < LEAST_FREE:
        found = f"{folder.path} has {size_text(folder.free)} free."
        yield Finding("warning", "checkpoints", found, "Make room, or save to another folder.")
    elif hosts > 1 and not is_shared(folder.filesystem):
        found = f"{folder.path} ({_about(folder)}) doesn't look like a file system that hosts share."
        yield Finding("note", "checkpoints", found, "All workers must see the folder that checkpoints are saved to.")
    else:
        yield Finding("ok", "checkpoints", f"{folder.path} ({_about(folder)}).")


def _about(folder: Folder) -> str:
    where = "of a network" if is_shared(folder.filesystem) else "local"
    free = f", {size_text(folder.free, 2)} free" if folder.free is not None else ""
    return f"{folder.filesystem or 'unknown file system'}, {where}{free}"
