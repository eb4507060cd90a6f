"""Convolutions as products of matrices, and those of one channel a group as sums over the kernel's taps.

A kernel of 1 x 1 multiplies every pixel's channels by one matrix. XLA computes that as a convolution, which for its
weight gradient takes 2 to 8 times as long as the products do, sample by sample. The weight gradient of few input
channels is such a product too, of dy with all that a tap meets. One sample at a time keeps these copies of x small.
"""

from __future__ import annotations

import math
from functools import reduce

import jax
import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.kernels.geometry import Placement, padded
from distdl_jax.kernels.layout import row_major


def by_pixels(x: Array, weight: Array, window: Placement, groups: int) -> Array:
    """The convolution with a kernel of one tap, without groups."""
    (pixels,) = window.met_by_taps(x, weight.shape[2:])
    return _pixels_times(weight.reshape(weight.shape[:2]), pixels)


def input_gradient_by_pixels(x: Array, weight: Array, dy: Array, window: Placement, groups: int) -> Array:
    """The gradient of the input of `by_pixels`."""
    pixels = _pixels_times(jnp.swapaxes(weight.reshape(weight.shape[:2]), 0, 1), dy)
    return _into_places(pixels, x.shape, window)


def weight_gradient_by_products(x: Array, weight: Array, dy: Array, window: Placement, groups: int) -> Array:
    """The gradient of the weight, c_out x C x kernel, without groups."""
    c_out, c_in, *kernel = weight.shape
    whole = padded(x, window.padding)

    def add(total: Array, sample: tuple[Array, Array]) -> tuple[Array, None]:
        own, own_dy = sample
        met = [a.reshape(c_in, -1) for a in window.unpadded().met_by_taps(own[None], kernel)]
        met_by_all = met[0] if len(met) == 1 else row_major(jnp.concatenate(met))
        return total + lax.dot_general(own_dy.reshape(c_out, -1), met_by_all, (((1,), (1,)), ((), ()))), None

    zeros = jnp.zeros((c_out, math.prod(kernel) * c_in), x.dtype)
    gradient = lax.scan(add, zeros, (whole, dy))[0].reshape(c_out, *kernel, c_in)
    return jnp.moveaxis(gradient, -1, 1)


def by_taps(x: Array, weight: Array, window: Placement, groups: int) -> Array:
    """One input channel a group: the sum over the taps of what each meets, times a number for each output channel."""
    each = weight.shape[0] // groups
    numbers = weight.reshape(*weight.shape[:1], -1, *(1,) * len(window.stride))
    met = window.met_by_taps(x, weight.shape[2:])
    met = met if each == 1 else [jnp.repeat(a, each, axis=1) for a in met]
    return reduce(jnp.add, (a * numbers[:, tap] for tap, a in enumerate(met)))


def input_gradient_by_taps(x: Array, weight: Array, dy: Array, window: Placement, groups: int) -> Array:
    """The gradient of the input of `by_taps`: where nothing is skipped, it is such a convolution of dy."""
    if set(window.stride) != {1} or weight.shape[0] != groups:
        return jax.vjp(lambda x: by_taps(x, weight, window, groups), x)[1](dy)[0]
    reversed_weight = jnp.flip(weight, range(2, weight.ndim))
    return by_taps(dy, reversed_weight, window.of_input_gradient(x.shape[2:], weight.shape[2:], dy.shape[2:]), groups)


def weight_gradient_by_taps(x: Array, weight: Array, dy: Array, window: Placement, groups: int) -> Array:
    """The gradient of the weight of `by_taps`."""
    kernel, each = weight.shape[2:], weight.shape[0] // groups
    whole = padded(x, window.padding)
    axes = tuple(range(1, x.ndim - 1))

    def add(total: Array, sample: tuple[Array, Array]) -> tuple[Array, None]:
        own, own_dy = sample
        met = (a[0] for a in window.unpadded().met_by_taps(own[None], kernel))
        met = met if each == 1 else (jnp.repeat(a, each, axis=0) for a in met)
        return total + jnp.stack([jnp.sum(a * own_dy, axes) for a in met], axis=1), None

    zeros = jnp.zeros((weight.shape[0], math.prod(kernel)), x.dtype)
    return lax.scan(add, zeros, (whole, dy))[0].reshape(weight.shape)


def _pixels_times(matrix: Array, x: Array) -> Array:
    """A matrix times the channels of every pixel."""
    y = lax.map(lambda sample: matrix @ sample, x.reshape(*x.shape[:2], -1))
    return y.reshape(x.shape[0], -1, *x.shape[2:])


def _into_places(pixels: Array, shape: tuple[int, ...], window: Placement) -> Array:
    """The pixels that a stride has taken from an array of `shape`, back where they were, and zeros between them."""
    along = zip(window.padding, window.stride, shape[2:], pixels.shape[2:], strict=True)
    ends = [(-low, n + low - (m - 1) * stride - 1, stride - 1) for (low, _), stride, n, m in along]
    return lax.pad(pixels, jnp.zeros((), pixels.dtype), [(0, 0, 0)] * 2 + ends)
