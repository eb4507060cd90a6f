"""64-bit numbers are switched on on one worker.

workers: 2
says: All workers must have the same jax_enable_x64
says: worker 1
"""

import jax
from mpi4py import MPI

import distdl_jax as dj

jax.config.update("jax_enable_x64", MPI.COMM_WORLD.rank == 0)
dj.Partition()
