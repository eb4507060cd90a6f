"""One worker's output is closed, as when a terminal or a full disk is behind it; then it fails.

workers: 2
says: ValueError: nothing is open
"""

import sys

from parts import P_all, dj, jnp, rank

from distdl_jax.functional import all_sum_reduce

total = dj.jit(lambda x: all_sum_reduce(x, P_all, axes_keep=()))
total(jnp.ones(1_000_000))
if rank == 1:
    sys.stdout.close()
    sys.stderr.close()
    raise ValueError("nothing is open")
total(jnp.ones(1_000_000))
