"""A thread of one worker raises, which ends only that thread; the program waits for what it was to bring.

workers: 2
timeout: 5
says: Exception in thread loader:
says: OSError: no such file
says: Worker 1 is at thread_raises.py:27 in <module>
"""

import queue
import threading

from parts import P_all, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce

batches: "queue.Queue[int]" = queue.Queue()


def load():
    if rank == 1:
        raise OSError("no such file")
    batches.put(4)


threading.Thread(target=load, name="loader").start()
x = jnp.ones(batches.get())
jax.jit(lambda x: all_sum_reduce(x, P_all, axes_keep=()))(x).block_until_ready()
