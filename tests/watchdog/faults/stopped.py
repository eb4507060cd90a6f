"""One worker is stopped (SIGSTOP), as by a debugger or a system that is out of memory; the other one waits for it.

workers: 2
timeout: 6
says: Worker 1 was not heard from for {timeout} s.
"""

import os
import signal

import distdl_jax as dj

P = dj.Partition()
if P.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
P.allgather_data(0)
