"""A message holds another dtype than its receive expects, in the program's own calls of mpi4jax, which take any tag.

Before, all is well: with any tag, and from any worker.

when: long
workers: 2
says: worker 0 got [1. 1. 1. 1.]
says: worker 0 heard 3.0
says: (4 x float32 and 4 x int32)
says: the two belong together, and must mean the same data
"""

import mpi4jax
from mpi4py import MPI
from parts import dj, jnp, rank

comm = MPI.COMM_WORLD.Clone()


def swapped(dtype):
    @dj.jit
    def swap(x):
        template = x.astype(dtype) if rank else x
        return mpi4jax.sendrecv(x, template, source=1 - rank, dest=1 - rank, comm=comm)

    return swap


mine = swapped("float32")(jnp.full(4, 1.0 * rank))
print(f"worker {rank} got {mine}")


@dj.jit
def hear(x):
    if rank:
        mpi4jax.send(x, 0, tag=7, comm=comm)
        return x
    return mpi4jax.recv(x, comm=comm)


print(f"worker {rank} heard {hear(jnp.float32(3 * rank))}")
swapped("int32")(mine)
