"""The facts of a healthy job, of which a test breaks one."""

from dataclasses import replace
from typing import Any

from distdl_jax.doctor.facts import Devices, Facts, Folder, Host, Launch, Mpi, Software, Threads
from distdl_jax.settings import read_settings

PACKAGES = {"distdl_jax": "0.2.0", "jax": "0.12.0", "jaxlib": "0.12.0", "mpi4jax": "0.9.1", "mpi4py": "4.1.2"}

HOST = Host(
    name="node0",
    processor="AMD EPYC 7763",
    cores=8,
    affinity=tuple(range(8)),
    memory=64 * 2**30,
    memory_available=60 * 2**30,
    shared_memory=32 * 2**30,
    shared_memory_free=32 * 2**30,
    huge_pages="madvise",
    glibc="2.36",
    malloc="glibc.malloc.hugetlb=1",
)


def worker(rank: int = 0, size: int = 4, environment: dict[str, str] | None = None, **changes: Any) -> Facts:
    """Return the facts of one of `size` workers on a host of 8 cores; `changes` to fields of the parts, by part."""
    parts: dict[str, Any] = {
        "software": Software("3.13.1", PACKAGES, {"jax": "0.10.2"}, "/env/distdl_jax", onednn="3.2.0"),
        "host": HOST,
        "mpi": Mpi(
            implementation="MPICH Version: 5.0.2", loaded=("/env/lib/libmpi.so.12",), size=size, cuda_aware=False
        ),
        "launch": Launch(
            rank, size, "MPICH", "/env/bin/hydra_pmi_proxy", mpiexec="/env/bin/mpiexec", mpiexec_of="MPICH"
        ),
        "threads": Threads({"NPROC": "2", "OMP_NUM_THREADS": "2"}, 8 // size, 8 // size),
        "devices": Devices(),
        "cache": Folder("/home/me/jax", filesystem="nfs4", free=2**40),
        "checkpoints": Folder("/scratch/me", filesystem="lustre", free=2**40),
    }
    for part, fields in changes.items():
        parts[part] = replace(parts[part], **fields)
    return Facts(settings=read_settings(environment or {}), **parts)


def job(*changed: dict[str, Any], size: int = 4, **changes: Any) -> list[Facts]:
    """Return the facts of `size` workers: with `changes` on all, and those of `changed` on the first, second, ..."""
    each = [*changed, *({} for _ in range(size - len(changed)))]
    return [worker(rank, size, **(changes | mine)) for rank, mine in enumerate(each)]
