"""A condition that depends on each worker's own data: it holds on one worker only.

when: long
workers: 2
timeout: 4
says: the limit is {timeout} s (DISTDL_JAX_TIMEOUT
says: has waited, or computed, for
says: taken different branches of a cond
says: cond_branches_differ.py
"""

from parts import dj, jax, jnp, on_root, scatter, spread


@dj.jit
def step(x):
    y = jax.lax.cond(jnp.sum(x) > 0.5, lambda x: jnp.sum(spread(x)), lambda x: jnp.sum(scatter(x)), x)
    return y + jnp.sum(spread(x))


jax.block_until_ready(step(on_root(1000, 1000)))
