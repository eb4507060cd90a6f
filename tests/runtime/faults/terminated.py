"""One worker gets SIGTERM while it waits in a compiled program.

workers: 2
says: Worker 0 got SIGTERM; the job ends. It was at:
says: terminated.py
"""

import os
import signal
import threading
import time

from parts import P_all, dj, jnp, rank

from distdl_jax.functional import all_sum_reduce

total = dj.jit(lambda x: all_sum_reduce(x, P_all, axes_keep=()))
total(jnp.ones(1_000_000))
if rank == 0:
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
else:
    time.sleep(10_000)
total(jnp.ones(1_000_000))
