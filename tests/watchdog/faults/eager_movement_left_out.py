"""One worker leaves out a movement without jit, and waits in a function of jax.jit that the other has yet to come to.

workers: 2
timeout: 3
says: Worker 0 asks for what others hold
says: worker 1 did not come to that
says: Or a call without jit is left out on worker 1
"""

from parts import P_all, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce

total = jax.jit(lambda x: all_sum_reduce(x, P_all, axes_keep=()))
x = jnp.ones(1_000_000)
total(x).block_until_ready()
if rank == 0:
    all_sum_reduce(x[:3], P_all, axes_keep=())
total(x).block_until_ready()
