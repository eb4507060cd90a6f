"""One worker fails before it makes a partition; the others wait for it there.

workers: 2
says: Worker 1 of 2 raised
says: ValueError: no such configuration
"""

from mpi4py import MPI

import distdl_jax as dj

if MPI.COMM_WORLD.rank == 1:
    raise ValueError("no such configuration")
dj.Partition()
