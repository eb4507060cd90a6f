"""One worker is interrupted.

workers: 2
says: Worker 1 of 2 raised
says: KeyboardInterrupt
"""

import os
import signal
import time

from parts import P_all, dj, jnp, rank

from distdl_jax.functional import all_sum_reduce

total = dj.jit(lambda x: all_sum_reduce(x, P_all, axes_keep=()))
total(jnp.ones(1_000_000))
if rank == 1:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10_000)
total(jnp.ones(1_000_000))
