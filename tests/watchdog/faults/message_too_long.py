"""Under plain jax.jit one worker's batch grows, but it is not traced anew on the other: a longer message comes in.

workers: 2
says: Worker 1: MPI failed in a compiled program, at message_too_long.py
says: another length or dtype: the workers run different programs
"""

import mpi4jax
from mpi4py import MPI
from parts import P, jax, jnp, rank

comm = P.world.communicators.messages


@jax.jit
def pass_on(x):
    if rank == 0:
        mpi4jax.send(x, dest=1, comm=comm)
        return x
    return mpi4jax.recv(x, source=0, comm=comm)


jax.block_until_ready(pass_on(jnp.ones(20 if rank == 0 else 10)))
MPI.COMM_WORLD.Barrier()
