"""One worker never comes: it hangs in something of its own, beside many threads. Each has one that calls functions.

workers: 3
timeout: 2
says: The job goes on; the limit is {timeout} s (DISTDL_JAX_TIMEOUT
says: the limit is {timeout} s (DISTDL_JAX_TIMEOUT, in seconds
says: Worker 2 did not come to call 2, of total
says: of its plan
says: Worker 2 is at sleeps_forever.py:
says: in wait_for_a_file, outside any operation
says: What worker 0 was told last, and did, by its own clock:
says: s: the job ends, because of worker 2
"""

import threading
import time

from parts import P_all, dj, jnp, rank

from distdl_jax.functional import all_sum_reduce


@dj.jit
def total(x):
    return all_sum_reduce(x, P_all, axes_keep=())


@dj.jit
def augment(x):
    return x + 1


def load():
    while True:
        augment(batch)
        time.sleep(0.01)


def wait_for_a_file():
    time.sleep(10_000)


total(jnp.ones(1_000_000))
augment(batch := jnp.ones(3))
threading.Thread(target=load, daemon=True).start()
if rank == 2:
    for _ in range(120):  # more than faulthandler writes the stacks of
        threading.Thread(target=time.sleep, args=(10_000,), daemon=True).start()
    wait_for_a_file()
total(jnp.ones(1_000_000))
