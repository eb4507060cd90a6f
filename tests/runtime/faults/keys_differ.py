"""`init` gets another random key on one worker, so that the weights are a mixture of two draws.

Before, all is well: a worker makes weights for itself, from a key of its own.

workers: 2
says: worker 1 has y of shape (4, 4)
says: `init` of DistributedLinear(8 -> 6, bias=True, P_x 1 x 1, P_y 1 x 2, P_W 2 x 1) had another `key` on worker 1
"""

from parts import P_W, P_all, P_root, dj, jax, linear, nn, on_root, params, rank

if rank == 1:
    linear.init(jax.random.key(rank))
print(f"worker {rank} has y of shape {dj.jit(linear)(params, on_root(4, 8)).shape}")
other = nn.DistributedLinear(P_root, P_all, P_W, in_features=8, out_features=6)
dj.jit(other)(other.init(jax.random.key(rank)), on_root(4, 8))
