"""Convolutions as products of matrices, without groups: with kernels of one tap, and the weight gradient of few inputs.

A kernel of 1 x 1 multiplies every pixel's channels by one matrix. XLA computes that as a convolution, which for its
weight gradient takes 2 to 8 times as long as the products do, sample by sample. The weight gradient of few input
channels is such a product too, of dy with the entries that each tap meets. One sample at a time keeps these copies of x
small.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.kernels.geometry import Placement, padded, row_major


def forward(x: Array, weight: Array, window: Placement, groups: int) -> Array:
    """Return the convolution with a kernel of one tap."""
    (pixels,) = window.met_by_taps(x, weight.shape[2:])
    return _pixels_times(weight.reshape(weight.shape[:2]), pixels)


def input_gradient(x: Array, weight: Array, dy: Array, window: Placement, groups: int) -> Array:
    """Return the gradient of x; with a kernel of one tap."""
    pixels = _pixels_times(jnp.swapaxes(weight.reshape(weight.shape[:2]), 0, 1), dy)
    # Back to where a stride took them, with zeros between.
    along = zip(window.padding, window.stride, x.shape[2:], pixels.shape[2:], strict=True)
    ends = [(-low, n + low - (m - 1) * stride - 1, stride - 1) for (low, _), stride, n, m in along]
    return lax.pad(pixels, jnp.zeros((), pixels.dtype), [(0, 0, 0)] * 2 + ends)


def weight_gradient(x: Array, weight: Array, dy: Array, window: Placement, groups: int) -> Array:
    """Return the gradient of the weight, with any kernel."""
    c_out, c_in, *kernel = weight.shape
    whole = padded(x, window.padding)

    def add(total: Array, sample: tuple[Array, Array]) -> tuple[Array, None]:
        one_x, one_dy = sample
        met = [a.reshape(c_in, -1) for a in window.unpadded().met_by_taps(one_x[None], kernel)]
        met_by_all = met[0] if len(met) == 1 else row_major(jnp.concatenate(met))
        return total + lax.dot_general(one_dy.reshape(c_out, -1), met_by_all, (((1,), (1,)), ((), ()))), None

    zeros = jnp.zeros((c_out, math.prod(kernel) * c_in), x.dtype)
    gradient = lax.scan(add, zeros, (whole, dy))[0].reshape(c_out, *kernel, c_in)
    return jnp.moveaxis(gradient, -1, 1)


def _pixels_times(matrix: Array, x: Array) -> Array:
    """Return a matrix times the channels of every pixel."""
    y = lax.map(lambda sample: matrix @ sample, x.reshape(*x.shape[:2], -1))
    return y.reshape(x.shape[0], -1, *x.shape[2:])
