"""One worker's data are of another dtype.

when: long
workers: 2
says: float32[4, 6] on worker 0
says: float16[4, 6] on worker 1
"""

from parts import add_up, dj, jnp, rank

dj.jit(add_up)(jnp.ones((4, 6), jnp.float16 if rank else jnp.float32))
