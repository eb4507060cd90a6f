"""A worker outside of a layer's partition passes its batch, where a placeholder belongs.

workers: 2
says: `x` is float32[4, 3] on worker 1, which is outside of its partition
says: dj.zero_volume_tensor
"""

from parts import dj, jax, jnp

P = dj.Partition()
linear = dj.nn.DistributedLinear(P.create_partition_inclusive([0]).grid([1, 1]), in_features=3, out_features=3)
params = linear.init(jax.random.key(0))
dj.jit(dj.grad(lambda params, x: jnp.sum(linear(params, x))))(params, jnp.ones((4, 3), jnp.float32))
