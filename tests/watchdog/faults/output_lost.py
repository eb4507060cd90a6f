"""One worker's output is closed before it starts, and nothing it says can be read; it fails. Another one says so.

workers: 2
says: Worker 1 of 2 raised; the job ends.
says: ValueError: nobody reads this here
"""

import os

from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
if rank == 1:
    os.close(1)
    os.close(2)

import distdl_jax as dj  # noqa: E402

P = dj.Partition()
if rank == 1:
    raise ValueError("nobody reads this here")
P.allgather_data(0)
