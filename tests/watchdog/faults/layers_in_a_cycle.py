"""Three layers, each on two of three workers, begun at another one by each worker: everyone waits for the next.

when: long
workers: 3
says: The workers wait for each other in a cycle
says: all_sum_reduce
"""

from parts import P, jnp, rank

from distdl_jax.functional import all_sum_reduce

pairs = [P.create_partition_inclusive([i, (i + 1) % 3]) for i in range(3)]
for i in range(3):
    all_sum_reduce(jnp.ones(3), pairs[(rank + i) % 3], axes_keep=())
