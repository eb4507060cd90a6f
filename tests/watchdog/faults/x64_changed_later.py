"""64-bit numbers are switched on on one worker after the partitions were made.

when: long
workers: 2
says: All workers must have the same jax_enable_x64
"""

from parts import dj, jax, on_root, rank, spread

if rank == 1:
    jax.config.update("jax_enable_x64", True)
dj.jit(lambda x: spread(x))(on_root(4, 6))
