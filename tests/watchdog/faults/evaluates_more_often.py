"""One worker evaluates in every round, the other in every second.

when: long
workers: 2
says: The workers call different functions: call
says: evaluate
says: train
"""

from parts import dj, jnp, on_root, rank, spread


@dj.jit
def train(x):
    return spread(x)


@dj.jit
def evaluate(x):
    return spread(jnp.concatenate([x, x]))


x = on_root(1000, 1000)
train(x), evaluate(x)
for number in range(10):
    train(x)
    if rank == 0 or number % 2 == 0:
        evaluate(x)
