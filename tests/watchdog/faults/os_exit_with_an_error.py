"""One worker ends by `os._exit(3)`, taken from `os` before the library was there.

workers: 2
by: -m distdl_jax
says: Worker 1 of 2 (process
says: ended with exit status 3, by os._exit, os.exec... or exit() in C; the job ends.
"""

from os import _exit

import distdl_jax as dj

P = dj.Partition()
if P.rank == 1:
    _exit(3)
P.allgather_data(0)
