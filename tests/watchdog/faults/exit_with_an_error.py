"""One worker calls sys.exit with an error while the others go on, under plain jax.jit.

when: long
workers: 3
by: -m distdl_jax
says: Worker 1 has ended its program with exit status 3
"""

import sys

from parts import P_all, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce

total = jax.jit(lambda x: all_sum_reduce(x, P_all, axes_keep=()))
total(jnp.ones(1_000_000))
if rank == 1:
    sys.exit(3)
total(jnp.ones(1_000_000))
