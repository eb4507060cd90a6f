"""Jit is disabled on one worker, for a while: its operations run one by one, and agree on shapes each time.

when: long
workers: 2
says: refused: The workers' programs differ: worker
says: the plan of <lambda> (jit_disabled_later.py:21) (jax_disable_jit)
says: Worker 1 traces <lambda> (jit_disabled_later.py:17) again in call 2
says: jax_disable_jit), but worker 0 did not: without jit
"""

import contextlib

from parts import P_all, dj, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce

total = dj.jit(lambda x: all_sum_reduce(x, P_all, axes_keep=()))
total(jnp.ones(1_000_000))
with jax.disable_jit() if rank else contextlib.nullcontext():
    try:
        dj.jit(lambda x: all_sum_reduce(x, P_all, axes_keep=()))(jnp.ones(4))
    except dj.PlanError as error:
        print(f"refused: {error}")
    total(jnp.ones(1_000_000))
