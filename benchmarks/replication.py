"""broadcast, sum_reduce and all_sum_reduce beside raw mpi4py: mpiexec -n 4 python benchmarks/replication.py"""

import distdl_jax as dj
import jax.numpy as jnp
import numpy as np
from distdl_jax import functional
from mpi4py import MPI

from harness import Table, in_one_program, one_call, repeated

P_all = dj.Partition()
P_root = P_all.create_partition_inclusive([0])
raw = MPI.COMM_WORLD.Dup()
nothing = dj.zero_volume_tensor()

table = Table("replication")
for size, calls in ((2**10, 5000), (2**20, 600), (2**24, 60)):
    buffer, result = np.ones(size // 4, np.float32), np.empty(size // 4, np.float32)
    x = jnp.asarray(buffer)
    works = {
        "broadcast": (
            lambda buffer=buffer: raw.Bcast(buffer, 0),
            lambda x: functional.broadcast(x, P_root, P_all, preserve_batch=False),
            x if P_root.active else nothing,
        ),
        "sum_reduce": (
            lambda buffer=buffer, result=result: raw.Reduce(buffer, result, MPI.SUM, 0),
            lambda x: functional.sum_reduce(x, P_all, P_root, preserve_batch=False),
            x,
        ),
        "all_sum_reduce": (
            lambda buffer=buffer, result=result: raw.Allreduce(buffer, result, MPI.SUM),
            lambda x: functional.all_sum_reduce(x, P_all, axes_keep=()),
            x,
        ),
    }
    for name, (raw_call, function, mine) in works.items():
        table.row(
            f"{name}, {size // 1024} KiB, {P_all.size} workers",
            [
                repeated("raw", raw_call, calls),
                in_one_program("in a program", function, (mine,), calls),
                one_call("one jitted call", function, (mine,), min(calls, 50)),
            ],
        )
table.write()
