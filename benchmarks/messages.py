"""halo exchange, broadcast and all-reduce of 1 KiB to 256 MiB, on GPUs or CPUs, beside raw mpi4py between hosts.

mpiexec -n 2 python -m distdl_jax benchmarks/messages.py [most KiB]

"raw" sends arrays of numpy. A halo of the size goes to each neighbour, "broadcast" from worker 0 to all, "all-reduce"
is a sum on all. On GPUs the messages of the one program go through the host, unless MPI4JAX_USE_CUDA_MPI=1. Sizes whose
buffers don't fit into a tenth of the memory that JAX has are left out.
"""

import sys

import distdl_jax as dj
import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import functional
from mpi4py import MPI

from harness import Table, in_one_program, repeated

P_all = dj.Partition()
P_x, P_root, raw, rank = P_all.grid([P_all.size, 1]), P_all.grid([1, 1]), MPI.COMM_WORLD.Dup(), P_all.rank
most = int(sys.argv[1]) if sys.argv[1:] else 2**18
room = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 2**40) // 10
table = Table("messages")


def raw_halo(sent: np.ndarray, received: np.ndarray) -> None:
    """Exchange a halo with the neighbour below and with the one above."""
    above, below = (n if 0 <= n < P_all.size else MPI.PROC_NULL for n in (rank - 1, rank + 1))
    raw.Sendrecv(sent, below, 0, received, above, 0)
    raw.Sendrecv(sent, above, 1, received, below, 1)


for kib in (1, 16, 256, 4 * 1024, 64 * 1024, 256 * 1024):
    if kib > most or kib * 1024 > min(P_all.allgather_data(room)):
        continue
    calls = max(1, min(1000, 2**16 // kib))
    sent, received = np.ones(kib * 256, np.float32), np.empty(kib * 256, np.float32)
    rows = jnp.asarray(sent).reshape(1, -1)
    works = {
        "halo exchange": (
            lambda sent=sent, received=received: raw_halo(sent, received),
            lambda x: functional.halo_exchange(x, P_x, ((1, 1), (0, 0))),
            rows,
        ),
        "broadcast": (
            lambda sent=sent: raw.Bcast(sent, 0),
            lambda x: functional.broadcast(x, P_root, P_x, preserve_batch=False),
            rows if rank == 0 else dj.zero_volume_tensor(dtype=np.float32),
        ),
        "all-reduce": (
            lambda sent=sent, received=received: raw.Allreduce(sent, received, MPI.SUM),
            lambda x: functional.all_sum_reduce(x, P_x, axes_keep=()),
            rows,
        ),
    }
    for name, (raw_call, function, x) in works.items():
        ways = [repeated("raw", raw_call, calls), in_one_program("distdl_jax", function, (x,), calls)]
        table.row(f"{name}, {kib} KiB, {P_all.size} workers, {jax.devices()[0].platform}", ways, rounds=5)
table.write()
