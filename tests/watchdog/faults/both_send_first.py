"""Both workers send before they receive, with mpi4jax itself: it works while MPI buffers, and hangs when it doesn't.

workers: 2
says: The plan of swap
says: worker 0 is in operation 1 of 2, send to worker 1
says: worker 1 is in operation 1 of 2, send to worker 0
says: neither can go on
"""

import mpi4jax
from mpi4py import MPI
from parts import dj, jnp, rank


@dj.jit
def swap(x):
    mpi4jax.send(x, dest=1 - rank, comm=MPI.COMM_WORLD)
    return mpi4jax.recv(x, source=1 - rank, comm=MPI.COMM_WORLD)


swap(jnp.ones(10))
