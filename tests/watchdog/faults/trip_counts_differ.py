"""A while loop is left after different numbers of passes, and the worker that is through first is gone.

when: long
workers: 2
timeout: 6
says: Worker 1 has ended its program
says: left a while loop after different numbers of passes
"""

from parts import P_all, dj, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce


@dj.jit
def sums(x, passes):
    def add(state):
        return state[0] + 1, all_sum_reduce(state[1], P_all, axes_keep=())

    return jax.lax.while_loop(lambda state: state[0] < passes, add, (0, x))


sums(jnp.ones(1_000_000), 3 - rank)
