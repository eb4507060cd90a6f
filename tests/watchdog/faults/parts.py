"""What most programs of the catalogue share: partitions, layers, a step that all take, and data that worker 0 holds."""

from functools import partial

import jax.numpy as jnp

import distdl_jax as dj
from distdl_jax import nn

P = dj.Partition()
rank = P.rank
P_root = P.grid([1, 1])
P_all = P.grid([1, P.size])

scatter = nn.Repartition(P_root, P_all)
spread = nn.Broadcast(P_root, P_all)
add_up = nn.SumReduce(P_all, P_root)
sum_all = partial(dj.functional.all_sum_reduce, P_x=P_all, axes_keep=())
large = jnp.ones(1_000_000)


@dj.jit
def total(x):
    return sum_all(x)


def others_wait(does, *args, worker=1):
    """Have one worker do this, for which the others wait in an agreement."""
    if rank == worker:
        does(*args)
    P.allgather_data(0)


def between_steps(does, *args):
    """Have worker 1 do this, for which the others wait in a program."""
    total(large)
    if rank == 1:
        does(*args)
    total(large)


def on_root(*shape):
    """Ones on worker 0, a zero-volume array elsewhere."""
    return jnp.ones(shape) if rank == 0 else dj.zero_volume_tensor(shape[0], jnp.float32)
