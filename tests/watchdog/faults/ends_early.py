"""One worker's data end sooner, so it leaves the loop and the program, whose last line ends MPI.

workers: 2
says: Worker 1 has ended its program, after 3 calls
says: worker 0 is in call 4, of train
"""

from mpi4py import MPI
from parts import P_all, dj, jnp, rank

from distdl_jax.functional import all_sum_reduce


@dj.jit
def train(x):
    return all_sum_reduce(x, P_all, axes_keep=())


for _ in range(4 - rank):
    train(jnp.ones(1_000_000))
MPI.Finalize()
