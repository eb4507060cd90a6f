"""One worker raises SystemExit itself, which Python tells nobody: the program that runs it sees it.

workers: 2
by: -m distdl_jax
says: Worker 1 has ended its program with exit status 3
"""

import distdl_jax as dj

P = dj.Partition()
if P.rank == 1:
    raise SystemExit(3)
P.allgather_data(0)
