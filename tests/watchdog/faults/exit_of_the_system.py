"""One worker ends by `os._exit(0)`, which no code in the worker sees, while another one waits for it.

workers: 2
by: -m distdl_jax
says: Worker 1 of 2 (process
says: ended with exit status 0, by os._exit, os.exec... or exit() in C
says: (dj.close() and MPI.Finalize() come before such an end); the job ends.
"""

from os import _exit

import distdl_jax as dj

P = dj.Partition()
if P.rank == 1:
    _exit(0)
P.allgather_data(0)
