"""A worker that waits has no file descriptor left, without which JAX itself can't be asked; the other one sleeps.

workers: 2
timeout: 4
says: Worker 0 has waited for
says: Worker 1 did not come to call 2
"""

import os
import resource
import time

from parts import P_all, dj, jnp, rank

from distdl_jax.functional import all_sum_reduce

total = dj.jit(lambda x: all_sum_reduce(x, P_all, axes_keep=()))
x = jnp.ones(1_000_000)
total(x).block_until_ready()
if rank == 1:
    time.sleep(10_000)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
total(x).block_until_ready()
