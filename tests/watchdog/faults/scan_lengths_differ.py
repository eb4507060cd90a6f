"""A scan takes more steps on one worker, over data that end later there.

when: long
workers: 2
says: The plan of steps
says: ends, after 1 operations, without its part in that
says: scan_lengths_differ.py
"""

from parts import P_all, dj, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce


@dj.jit
def steps(batches):
    def step(total, batch):
        return total + jnp.sum(all_sum_reduce(batch, P_all, axes_keep=())), None

    return jax.lax.scan(step, 0.0, batches)[0]


steps(jnp.ones((1000 + rank, 8)))
