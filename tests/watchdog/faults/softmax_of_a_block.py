"""A softmax in a network goes over features that are split: each block would be normalised by itself.

workers: 2
says: softmax
says: works along dimension 1 of the block (reduce_max), which is split over 2 workers
says: nn.Local(function) applies it to each block separately
"""

from parts import dj, jax, jnp

P = dj.Partition().grid([1, 2])
network = dj.nn.Sequential(dj.nn.DistributedLinear(P, in_features=4, out_features=4), jax.nn.softmax)
dj.jit(network)(network.init(jax.random.key(0)), jnp.ones((3, 2)))
