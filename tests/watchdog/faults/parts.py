"""What the programs of the catalogue share: some partitions, a layer, and data that worker 0 holds."""

import jax
import jax.numpy as jnp

import distdl_jax as dj
from distdl_jax import nn

P = dj.Partition()
rank = P.rank
P_root = P.grid([1, 1])
P_all = P.grid([1, P.size])
P_W = P.grid([P.size, 1])

scatter = nn.Repartition(P_root, P_all)
spread = nn.Broadcast(P_root, P_all)
add_up = nn.SumReduce(P_all, P_root)
linear = nn.DistributedLinear(P_root, P_all, P_W, in_features=8, out_features=8)
params = linear.init(jax.random.key(0))


def on_root(*shape, dtype=jnp.float32):
    """Ones on worker 0, a zero-volume array elsewhere."""
    return jnp.ones(shape, dtype) if rank == 0 else dj.zero_volume_tensor(shape[0], dtype)
