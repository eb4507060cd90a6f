"""`init` gets another random key on one worker, so that the weights are a mixture of two draws.

workers: 2
environment: DISTDL_JAX_DEBUG=1
says: worker 1 has y of shape (4, 4)
says: must have the same `key` in `init` of weight (6 x 8) and bias (6)
"""

from parts import P_W, P_all, P_root, dj, jax, linear, nn, on_root, params, rank

print(f"worker {rank} has y of shape {dj.jit(linear)(params, on_root(4, 8)).shape}")
other = nn.DistributedLinear(P_root, P_all, P_W, in_features=8, out_features=6)
dj.jit(other)(other.init(jax.random.key(rank)), on_root(4, 8))
