"""One worker raises SystemExit itself under plain `python`, which up to Python 3.11 keeps the status to itself.

workers: 2
timeout: 2
says: Worker 1 has ended its program
"""

from parts import P_all, jax, jnp, rank

from distdl_jax.functional import all_sum_reduce


def load():
    if rank == 1:
        raise SystemExit("no data")


total = jax.jit(lambda x: all_sum_reduce(x, P_all, axes_keep=()))
total(jnp.ones(1_000_000)).block_until_ready()
load()
total(jnp.ones(1_000_000)).block_until_ready()
