"""Nothing is wrong: two of three workers have a communicator of their own, made first, and call functions of their own.

workers: 3
status: 0
says: worker 0 is done: 3.0
says: worker 1 is done: 3.0
says: worker 2 is done: 3.0
"""

from mpi4py import MPI

import distdl_jax as dj
from distdl_jax.functional import all_sum_reduce

rank = MPI.COMM_WORLD.rank
P_team = dj.Partition(MPI.COMM_WORLD.Split(rank > 0))

import jax.numpy as jnp  # noqa: E402


def loss(x):
    return jnp.sum(all_sum_reduce(x, P_team, axes_keep=())) / P_team.size


@dj.jit
def of_the_only_ones(x):
    return dj.value_and_grad(loss)(x)  # as long as there is no partition of all workers


@dj.jit
def in_team(x):
    return dj.value_and_grad(loss, partition=P_team)(x)


for size in range(2, 2 + P_team.size):
    value, gradient = of_the_only_ones(jnp.ones(size))
    assert float(value) == size * P_team.size and gradient.tolist() == [1.0] * size, (value, gradient)

P = dj.Partition()
P_some = P.create_partition_inclusive([0, 2])


@dj.jit
def in_all(x):
    return all_sum_reduce(x, P, axes_keep=()) + all_sum_reduce(x, P_some, axes_keep=()) * 0


for size in range(1, 1 + P_team.size):
    in_team(jnp.ones(size + 7))
total = in_all(jnp.ones(()))
for _ in range(3 * P_team.size):
    in_team(jnp.ones(2))
total = in_all(jnp.ones(()))
print(f"worker {rank} is done: {float(total)}", flush=True)
