"""Nothing is wrong: three communicators that overlap in one worker each, a compilation longer than the clock's limit at
the far end, and workers that wait for it in one communicator while others wait for them in the next. Two of them wait
at the first partition of one more communicator: the neighbour, and the one at the other end, which has none in common.
The first partition of all is one of COMM_WORLD, whose timeout sees all of that.

workers: 4
timeout: 2
status: 0
says: worker 0 is done: 2.0
says: worker 3 is done: 2.0
"""

import os
import time

import jax
import jax.numpy as jnp
from mpi4py import MPI

import distdl_jax as dj
from distdl_jax.functional import all_sum_reduce

dj.Partition()
limit = float(os.environ["DISTDL_JAX_TIMEOUT"])
rank, group = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.group
pairs = [(first, first + 1) for first in range(3)]
comms = {pair[0]: MPI.COMM_WORLD.Create_group(group.Incl(pair)) for pair in pairs if rank in pair}
P = {first: dj.Partition(comm) for first, comm in comms.items()}
again = comms[2].Dup() if rank >= 2 else None
ends = MPI.COMM_WORLD.Create_group(group.Incl((0, 3))) if rank in (0, 3) else None

if rank == 3:
    began, factor = time.monotonic(), 0.0
    while time.monotonic() - began < 1.3 * limit:
        factor += 1
        function = jax.jit(lambda x, factor=factor: [x := jnp.sin(factor * x) @ x for _ in range(40)][-1])
        function.lower(jnp.ones((2, 2))).compile()
if again is not None:
    P[2] = dj.Partition(again)
if ends is not None:
    assert dj.Partition(ends).size == 2
for first in sorted(P, reverse=True):  # who waits for the far end comes late to the next pair
    total = dj.jit(lambda x, P=P[first]: all_sum_reduce(x, P, axes_keep=()))(jnp.ones(()))
print(f"worker {rank} is done: {float(total)}", flush=True)
