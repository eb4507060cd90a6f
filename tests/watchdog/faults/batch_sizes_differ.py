"""The last batch is shorter on one worker: what is summed has different shapes.

when: long
workers: 2
says: must have the same shape and dtype on all workers that are summed
says: float32[4, 6] on worker 0
says: float32[3, 6] on worker 1
"""

from parts import add_up, dj, jnp, rank

dj.jit(add_up)(jnp.ones((4 - rank, 6), jnp.float32))
