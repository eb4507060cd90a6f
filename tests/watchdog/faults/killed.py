"""One worker is killed (SIGKILL), as by a system that has run out of memory.

workers: 2
by: -m distdl_jax
says: Worker 1 of 2 (process
says: was ended by SIGKILL: most often the system was out of memory; the job ends.
"""

import os
import signal

from parts import P_all, dj, jnp, rank

from distdl_jax.functional import all_sum_reduce

total = dj.jit(lambda x: all_sum_reduce(x, P_all, axes_keep=()))
total(jnp.ones(1_000_000))
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
total(jnp.ones(1_000_000))
