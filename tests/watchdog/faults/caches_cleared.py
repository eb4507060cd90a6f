"""One worker alone loses what JAX keeps of a function of dj.jit, and traces again what the others do not.

workers: 2
says: Worker 1 traces total (caches_cleared.py:13) again in call 2 (at caches_cleared.py:15 in total), but worker 0
says: Or that worker alone has lost what JAX keeps of traces: call jax.clear_caches()
"""

from parts import P_all, dj, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce


@dj.jit
def total(x):
    return all_sum_reduce(x, P_all, axes_keep=())


total(jnp.ones(8))
if rank == 1:
    jax.clear_caches()
print(total(jnp.ones(8)))
