"""The data-movement primitives, reductions, Fourier transforms and array functions, which take the partitions.

`distdl_jax.nn` has the primitives as objects with the partitions bound.
"""

from distdl_jax.arrays.grid_sample import affine_grid, grid_sample
from distdl_jax.arrays.pixel_shuffle import depth_to_space, pixel_shuffle, pixel_unshuffle, space_to_depth
from distdl_jax.arrays.scans import associative_scan, cummax, cummin, cumprod, cumsum
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
    max,
    mean,
    min,
    reduce_scatter,
    repartition,
    reshape,
    roll,
    std,
    sum,
    sum_reduce,
    top_k,
    var,
)
from distdl_jax.spectral.fourier import fft, fftn, ifft, ifftn, irfft, irfftn, rfft, rfftn

__all__ = [
    "affine_grid",
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
    "grid_sample",
    "halo_exchange",
    "ifft",
    "ifftn",
    "irfft",
    "irfftn",
    "max",
    "mean",
    "min",
    "pixel_shuffle",
    "pixel_unshuffle",
    "reduce_scatter",
    "repartition",
    "reshape",
    "rfft",
    "rfftn",
    "roll",
    "space_to_depth",
    "std",
    "sum",
    "sum_reduce",
    "top_k",
    "var",
    "window_mask",
    "window_partition",
    "window_reverse",
]
