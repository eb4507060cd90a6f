"""A worker that waits is asked what it did last: with DISTDL_JAX_DEBUG=1 its last operations are recorded.

when: long
workers: 2
timeout: 3
environment: DISTDL_JAX_DEBUG=1
says: Its last operations:
says: s ago send to worker 1 (1000000 x float32): took
says: s ago recv from worker 0 (1000000 x float32): goes on
says: What worker 0 knows:
"""

import time

from parts import dj, jax, jnp, on_root, rank, scatter, spread

move = dj.jit(lambda x: jnp.sum(spread(x)) + jnp.sum(scatter(x)))
x = on_root(1000, 1000)
jax.block_until_ready(move(x))
if rank == 0:
    time.sleep(10_000)
jax.block_until_ready(move(x))
