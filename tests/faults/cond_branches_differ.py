"""A condition that depends on each worker's own data: one communicates, the other does not.

workers: 2
timeout: 4
says: the limit is 4 s (DISTDL_JAX_TIMEOUT
says: taken different branches of a cond
says: cond_branches_differ.py
"""

from parts import P_all, dj, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce


@dj.jit
def step(x):
    def summed(x):
        return all_sum_reduce(x, P_all, axes_keep=())

    y = jax.lax.cond(jnp.mean(x) > 0.5, summed, lambda x: x, x)
    return all_sum_reduce(jnp.concatenate([y, y]), P_all, axes_keep=())


jax.block_until_ready(step(jnp.full(1_000_000, float(rank))))
