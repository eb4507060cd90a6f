"""The batch changes on one worker, under plain jax.jit: that worker traces anew, and the other one does not.

workers: 2
timeout: 2
says: Worker 1 asks for what others hold
says: worker 0 did not come to that. Most often a shape, a dtype or a static argument of a jax.jit function has changed
"""

from parts import P_all, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce

total = jax.jit(lambda x: all_sum_reduce(x, P_all, axes_keep=()))
for length in (4, 4 + rank):
    total(jnp.ones(length)).block_until_ready()
