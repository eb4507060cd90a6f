"""JAX_DISABLE_JIT is set on one worker: all refuse it when the first partition is made.

workers: 2
by: python
says: All workers must have the same jax_disable_jit
"""

import os

from mpi4py import MPI

if MPI.COMM_WORLD.rank == 1:
    os.environ["JAX_DISABLE_JIT"] = "1"

import distdl_jax as dj

dj.Partition()
