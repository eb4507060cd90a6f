"""jax_debug_nans finds a NaN on one worker in a later call, where JAX would run the function again, alone.

workers: 2
says: Worker 1 of 2 raised
says: FloatingPointError: Worker 1: jax_debug_nans or jax_debug_infs found nan in the output of jit
"""

from parts import P, P_all, dj, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce, roll


@dj.jit
def logarithm(x):
    return jnp.log(all_sum_reduce(roll(x, P, 1, 0), P_all, axes_keep=()) - 5.0 * rank)


jax.config.update("jax_debug_nans", True)
for _ in range(2):
    logarithm(9.0 * jnp.ones(4))
logarithm(jnp.ones(4))
