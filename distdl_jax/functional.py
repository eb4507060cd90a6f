"""The data-movement primitives, and Fourier transforms, as functions: they take the partitions as arguments.

`distdl_jax.nn` has the primitives as objects with the partitions bound.
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
    reshape,
    segment_sum,
    sum_reduce,
    take,
)
from distdl_jax.spectral.fourier import fft, fftn, ifft, ifftn, irfft, irfftn, rfft, rfftn

__all__ = [
    "all_gather",
    "all_max",
    "all_reduce",
    "all_sum_reduce",
    "argmax",
    "broadcast",
    "fft",
    "fftn",
    "halo_exchange",
    "ifft",
    "ifftn",
    "irfft",
    "irfftn",
    "reduce_scatter",
    "repartition",
    "reshape",
    "rfft",
    "rfftn",
    "segment_sum",
    "sum_reduce",
    "take",
]
