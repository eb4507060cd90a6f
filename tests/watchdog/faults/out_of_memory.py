"""One worker asks for more memory than there is.

workers: 2
says: Worker 1 of 2 raised
says: RESOURCE_EXHAUSTED
"""

from parts import P_all, dj, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce

total = dj.jit(lambda x: all_sum_reduce(x, P_all, axes_keep=()))
total(jnp.ones(1_000_000))
if rank == 1:
    jax.block_until_ready(jnp.ones((1 << 20, 1 << 20, 64)))
total(jnp.ones(1_000_000))
