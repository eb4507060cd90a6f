"""Steps without an end, after a line that says that they have begun."""

import time

import jax.numpy as jnp

import distdl_jax as dj

P = dj.Partition()
P_all = P.grid([P.size])
total = dj.jit(lambda x: dj.functional.all_sum_reduce(x, P_all, axes_reduce=0))
total(jnp.ones(1000)).block_until_ready()
if P.rank == 0:
    print("steps have begun", flush=True)
while True:
    total(jnp.ones(1000)).block_until_ready()
    time.sleep(0.1)
