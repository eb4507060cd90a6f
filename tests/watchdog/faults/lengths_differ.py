"""The terms of an all-reduce, made with mpi4jax itself, have different lengths.

when: long
workers: 2
says: The plan of total
says: (10 x float32)
says: (11 x float32)
"""

import mpi4jax
from mpi4py import MPI
from parts import dj, jnp, rank


@dj.jit
def total(x):
    return mpi4jax.allreduce(x, op=MPI.SUM, comm=MPI.COMM_WORLD)


total(jnp.ones(10 + rank))
