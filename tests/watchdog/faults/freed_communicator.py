"""A partition is made of a communicator that was freed.

workers: 2
says: `comm` is MPI.COMM_NULL
"""

from mpi4py import MPI

import distdl_jax as dj

comm = MPI.COMM_WORLD.Dup()
comm.Free()
dj.Partition(comm)
