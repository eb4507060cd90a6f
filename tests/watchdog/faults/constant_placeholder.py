"""Parameters on one worker, a constant in their place on the other: JAX differentiates on one of them only.

workers: 2
says: The plan of step
says: in the backward pass
says: no constant in their place
"""

from parts import dj, jax, jnp, on_root, rank, spread


@dj.jit
def step(weight):
    def loss(weight):
        return jnp.sum(spread(weight if rank == 0 else jnp.zeros((4, 0))) ** 2)

    return jax.grad(loss)(weight)


step(on_root(4, 6))
