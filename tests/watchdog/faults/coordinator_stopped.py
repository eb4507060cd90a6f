"""Worker 0, which knows of all others, is stopped; the other one waits for it.

workers: 2
timeout: 6
says: Worker 0, which knows of all others, was not heard from
"""

import os
import signal

import distdl_jax as dj

P = dj.Partition()
if P.rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
P.allgather_data(0)
