"""An iteration goes on until the residual is small; on one worker it is NaN, so it stops at once there.

workers: 2
timeout: 2
says: the limit is {timeout} s (DISTDL_JAX_TIMEOUT
says: left a while loop after different numbers of passes
says: nan_in_while_condition.py
"""

from parts import P_all, dj, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce


@dj.jit
def solve(x):
    def step(x):
        return 0.5 * x + 0 * all_sum_reduce(x, P_all, axes_keep=())

    return jax.lax.while_loop(lambda x: jnp.max(x) > 1e-3, step, x)


jax.block_until_ready(solve(jnp.full(1_000_000, jnp.nan if rank else 1.0)))
