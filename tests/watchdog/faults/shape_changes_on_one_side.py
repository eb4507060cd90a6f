"""A shape changes on one worker only, so the function is traced anew there and not on the others.

workers: 2
says: Worker 0 traces train
says: again in call 2
says: but worker 1 did not
"""

from parts import dj, jnp, on_root, spread


@dj.jit
def train(x):
    return jnp.sum(spread(x))


train(on_root(4, 600_000))
train(on_root(4, 500_000))
