"""Nothing is wrong: workers fork processes that end by themselves, while a checkpoint is written and batches are read.

workers: 2
by: -m distdl_jax
status: 0
says: worker 0 is done: [0, 3, 1] [1, 2]
says: worker 1 is done: [0, 3, 1] [1, 2]
"""

import os
import sys
import tempfile
import warnings

import numpy as np
from parts import P, dj, jnp, rank

warnings.filterwarnings("ignore", ".*fork")  # JAX's and Python's: threads are not forked along
path = P.broadcast_data(tempfile.mkdtemp() if rank == 0 else None)
whole = dj.TensorSpec((2_000_000,), P.grid([2]))
rows = np.arange(4000).reshape(2000, 2)
statuses = []
without_with = dj.checkpoint.Manager(path)
without_with.save(jnp.ones(1_000_000), whole, 1)
with dj.checkpoint.Manager(path) as manager, dj.data.batches(rows, dj.TensorSpec((2,), P.grid([2])), 2) as batches:
    without_with.wait()
    for _ in range(3):
        next(batches)
        if not statuses:
            manager.save(jnp.ones(1_000_000), whole, 2)
        if (child := os.fork()) == 0:
            if len(statuses) == 2:
                raise ValueError("of the process that was forked")
            sys.exit(3 * len(statuses))
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(f"worker {rank} is done: {statuses} {manager.steps()}")
