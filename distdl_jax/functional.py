"""The data-movement primitives as functions: they take the partitions as arguments.

`distdl_jax.nn` has the same as objects with the partitions bound.
"""

from distdl_jax.primitives import (
    all_gather,
    all_max,
    all_reduce,
    all_sum_reduce,
    argmax,
    broadcast,
    halo_exchange,
    reduce_scatter,
    repartition,
    sum_reduce,
)

__all__ = [
    "all_gather",
    "all_max",
    "all_reduce",
    "all_sum_reduce",
    "argmax",
    "broadcast",
    "halo_exchange",
    "reduce_scatter",
    "repartition",
    "sum_reduce",
]
