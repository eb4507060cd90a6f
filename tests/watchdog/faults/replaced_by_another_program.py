"""One worker replaces its program by another one, which fails: the others would wait for it.

workers: 2
by: -m distdl_jax
says: Worker 1 of 2 (process
says: ended with exit status 5
"""

import os
import sys

import distdl_jax as dj

P = dj.Partition()
if P.rank == 1:
    os.execv(sys.executable, [sys.executable, "-c", "raise SystemExit(5)"])
P.allgather_data(0)
