"""One worker evaluates in every round, the other in every second.

workers: 2
says: The workers call different functions: call
says: evaluate
says: train
"""

from parts import P_all, dj, jnp, rank

from distdl_jax.functional import all_sum_reduce


@dj.jit
def train(x):
    return all_sum_reduce(x, P_all, axes_keep=())


@dj.jit
def evaluate(x):
    return all_sum_reduce(jnp.concatenate([x, x]), P_all, axes_keep=())


x = jnp.ones(1_000_000)
train(x), evaluate(x)
for number in range(10):
    train(x)
    if rank == 0 or number % 2 == 0:
        evaluate(x)
