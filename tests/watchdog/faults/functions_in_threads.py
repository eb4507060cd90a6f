"""Nothing is wrong: a thread trains beside the program, over a communicator of its own; and one that loads data calls
functions that need nobody, first of all before the program does anything, or after everything else.

workers: 2
status: 0
says: worker 0 is done: 12.0
says: worker 1 is done: 12.0
"""

import threading
import time

import jax.numpy as jnp
from mpi4py import MPI

import distdl_jax as dj
from distdl_jax.functional import all_sum_reduce


def everyone(comm):
    P = dj.Partition(comm)
    return P.grid([P.size])


P, P_own = everyone(MPI.COMM_WORLD), everyone(MPI.COMM_WORLD.Dup())
rank = MPI.COMM_WORLD.rank
step = dj.jit(lambda x: all_sum_reduce(x, P, axes_keep=()))
step_in_thread = dj.jit(lambda x: all_sum_reduce(2 * x, P_own, axes_keep=()))
augment = dj.jit(lambda x: x[::-1])


def load():
    loader = threading.Thread(target=augment, args=(jnp.ones(3),))
    loader.start()
    loader.join()


def train():
    for number in range(6):
        step_in_thread(jnp.ones(1 + number // 3)).block_until_ready()
        time.sleep(0.1 * rank)


training = threading.Thread(target=train)
if rank == 0:
    load()
    training.start()
for number in range(6):
    total = step(jnp.ones(6 - number // 3))
    time.sleep(0.1 * (1 - rank))
    if number == 1 and rank == 1:
        training.start()
training.join()
if rank == 1:
    load()
print(f"worker {rank} is done: {float(step(jnp.ones(6)).sum())}", flush=True)
