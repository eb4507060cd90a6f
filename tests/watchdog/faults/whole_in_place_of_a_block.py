"""Each worker passes the whole batch of images where its block belongs.

when: long
workers: 2
says: `x` is 1 x 2 x 8 x 8, the whole tensor, but must be this worker's block
says: `spec.block(x)` cuts it
"""

from parts import dj, jax, jnp

P = dj.Partition().grid([1, 1, 2, 1])
spec = dj.TensorSpec((1, 2, 8, 8), P)
conv = dj.nn.DistributedConv2d(P, in_channels=2, out_channels=2, kernel_size=3, padding=1)
network = dj.nn.Sequential(conv, jax.nn.relu, x_spec=spec)
dj.jit(network)(network.init(jax.random.key(0)), jnp.ones(spec.global_shape))
