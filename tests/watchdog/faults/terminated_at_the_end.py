"""A worker whose program has ended gets SIGTERM while it waits for the other's end.

workers: 2
by: -m distdl_jax
says: Worker 1 of 2 (process
says: was ended by SIGTERM; the job ends.
"""

import os
import signal
import time

from parts import P_all, rank

pids = P_all.allgather_data(os.getpid())
if rank == 0:
    time.sleep(1)
    os.kill(pids[1], signal.SIGTERM)
    time.sleep(10_000)
