"""An output is not used on one worker, and the gradient is taken with jax.grad.

when: long
workers: 2
says: The plan of step
says: in the backward pass
says: let the loss use every output on every worker
"""

from parts import dj, jax, jnp, on_root, rank, spread


@dj.jit
def step(x):
    def loss(x):
        y = spread(x)
        return jnp.sum(y**2) if rank == 0 else jnp.sum(x)

    return jax.grad(loss)(x)


step(on_root(4, 6))
