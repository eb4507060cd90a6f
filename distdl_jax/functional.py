"""The data-movement primitives, Fourier transforms and array functions: they take the partitions as arguments.

`distdl_jax.nn` has the primitives as objects with the partitions bound.
"""

from distdl_jax.arrays.pixel_shuffle import depth_to_space, pixel_shuffle, pixel_unshuffle, space_to_depth
from distdl_jax.arrays.scans import associative_scan, cummax, cummin, cumprod, cumsum
from distdl_jax.arrays.segments import segment_max, segment_mean, segment_min, segment_softmax
from distdl_jax.arrays.window_partition import window_mask, window_partition, window_reverse
from distdl_jax.primitives import (
    all_gather,
    all_max,
    all_reduce,
    all_sum_reduce,
    all_to_all,
    argmax,
    broadcast,
    halo_exchange,
    reduce_scatter,
    repartition,
    reshape,
    roll,
    segment_sum,
    sum_reduce,
    take,
    top_k,
)
from distdl_jax.spectral.fourier import fft, fftn, ifft, ifftn, irfft, irfftn, rfft, rfftn

__all__ = [
    "all_gather",
    "all_max",
    "all_reduce",
    "all_sum_reduce",
    "all_to_all",
    "argmax",
    "associative_scan",
    "broadcast",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "depth_to_space",
    "fft",
    "fftn",
    "halo_exchange",
    "ifft",
    "ifftn",
    "irfft",
    "irfftn",
    "pixel_shuffle",
    "pixel_unshuffle",
    "reduce_scatter",
    "repartition",
    "reshape",
    "rfft",
    "rfftn",
    "roll",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_softmax",
    "segment_sum",
    "space_to_depth",
    "sum_reduce",
    "take",
    "top_k",
    "window_mask",
    "window_partition",
    "window_reverse",
]
