"""One worker fails before it makes a partition; the others wait for it there.

workers: 2
by: -m distdl_jax
says: Worker 1 of 2 (process
says: ended with exit status 1, before it had a partition with others; the job ends.
says: ValueError: no such configuration
"""

from mpi4py import MPI

import distdl_jax as dj

if MPI.COMM_WORLD.rank == 1:
    raise ValueError("no such configuration")
dj.Partition()
