"""Data-movement primitives, reductions, Fourier transforms and array functions, which take partitions.

`distdl_jax.nn` has the primitives as objects with the partitions bound.
"""

from distdl_jax.functional.all_gather import all_gather, reduce_scatter
from distdl_jax.functional.all_reduce import all_max, all_reduce
from distdl_jax.functional.all_sum_reduce import all_sum_reduce
from distdl_jax.functional.broadcast import broadcast, sum_reduce
from distdl_jax.functional.fourier.fft import fft, fftn, ifft, ifftn, irfft, irfftn, rfft, rfftn
from distdl_jax.functional.grid_sample import affine_grid, grid_sample
from distdl_jax.functional.halo_exchange import halo_exchange
from distdl_jax.functional.largest import argmax, top_k
from distdl_jax.functional.reductions import max, mean, min, std, sum, var
from distdl_jax.functional.repartition import all_to_all, repartition, roll
from distdl_jax.functional.reshape import reshape
from distdl_jax.functional.scans import associative_scan, cummax, cummin, cumprod, cumsum
from distdl_jax.functional.segments import segment_max, segment_mean, segment_min, segment_softmax
from distdl_jax.functional.take import segment_sum, take
from distdl_jax.functional.windows_and_pixels import (
    depth_to_space,
    pixel_shuffle,
    pixel_unshuffle,
    space_to_depth,
    window_mask,
    window_partition,
    window_reverse,
)

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
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_softmax",
    "segment_sum",
    "space_to_depth",
    "std",
    "sum",
    "sum_reduce",
    "take",
    "top_k",
    "var",
    "window_mask",
    "window_partition",
    "window_reverse",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
