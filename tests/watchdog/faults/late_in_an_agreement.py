"""Nothing is wrong: one worker is late, and the others wait for it in one agreement, each in its own place of it.

workers: 5
status: 0
says: worker 4 is done
"""

import time

from parts import dj, jnp, on_root, rank, spread

if rank == 2:
    time.sleep(2)
dj.jit(lambda x: jnp.sum(spread(x)))(on_root(4, 6))
print(f"worker {rank} is done")
