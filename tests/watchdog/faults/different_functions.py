"""The workers jit different functions.

when: long
workers: 2
says: The workers' programs differ
says: the plan of sum_of
says: the plan of mean_of
"""

from parts import dj, jnp, rank


def sum_of(x):
    return jnp.sum(x)


def mean_of(x):
    return jnp.mean(x)


dj.jit(mean_of if rank else sum_of)(jnp.ones(3))
