"""One worker makes a partition and a layer of its own, and waits for company, under plain jax.jit.

workers: 2
timeout: 3
says: the limit is {timeout} s (DISTDL_JAX_TIMEOUT
says: Worker 0 is about to run broadcast from 1 x 1 (0) to 1 x 2 (0, 1) (never_joined.py
says: think_about_it
"""

import time

from parts import jax, on_root, rank, spread


def think_about_it():
    time.sleep(10_000)


if rank == 1:
    think_about_it()
jax.jit(spread)(on_root(4, 6))
