"""One worker never comes: it hangs in something of its own.

workers: 3
timeout: 3
says: the limit is {timeout} s (DISTDL_JAX_TIMEOUT
says: Worker 2 did not come to call 2, of total
says: of its plan
says: wait_for_a_file
"""

import time

from parts import P_all, dj, jnp, rank

from distdl_jax.functional import all_sum_reduce


@dj.jit
def total(x):
    return all_sum_reduce(x, P_all, axes_keep=())


def wait_for_a_file():
    time.sleep(10_000)


total(jnp.ones(1_000_000))
if rank == 2:
    wait_for_a_file()
total(jnp.ones(1_000_000))
