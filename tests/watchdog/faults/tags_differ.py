"""A message is sent with one tag and expected with another.

when: long
workers: 2
says: The plan of pass_on
says: the message has tag 7, and one with tag 8 is expected
"""

import mpi4jax
from mpi4py import MPI
from parts import dj, jnp, rank


@dj.jit
def pass_on(x):
    if rank == 0:
        mpi4jax.send(x, dest=1, tag=7, comm=MPI.COMM_WORLD)
        return x
    return mpi4jax.recv(x, source=0, tag=8, comm=MPI.COMM_WORLD)


pass_on(jnp.ones(10))
