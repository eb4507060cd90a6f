"""Loading data fails on one worker while the others wait for it.

workers: 3
says: Worker 2 of 3 raised
says: FileNotFoundError
says: in load
"""

from parts import P_all, dj, jnp, rank

from distdl_jax.functional import all_sum_reduce


@dj.jit
def total(x):
    return all_sum_reduce(x, P_all, axes_keep=())


def load(number):
    if rank == 2 and number == 3:
        return open("/does/not/exist")
    return jnp.ones(1_000_000)


for number in range(6):
    total(load(number))
