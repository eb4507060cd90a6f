"""One worker's block with its mean taken out, scaled: its derivative reads x and the cotangent, and keeps x alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.custom_vjp
def scaled(x: Array, mean: Array, scale: Array, weight: Array) -> Array:
    """(x - mean) scale weight; all of one dtype, and of shapes that broadcast with x."""
    return (x - mean) * scale * weight


def _forward(x: Array, mean: Array, scale: Array, weight: Array) -> tuple[Array, tuple[Array, ...]]:
    return scaled(x, mean, scale, weight), (x, mean, scale, weight)


def _backward(kept: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array, Array]:
    x, mean, scale, weight = kept
    deviation = x - mean
    if _are_rows(scale.shape, weight.shape, mean.shape, x.shape):
        # Sums along rows are products with the weight: then one array is all that is written for the sums.
        products = dy * (deviation * scale)
        of_mean, overflown = _times(dy, weight) * scale, scale == 0  # of a variance that is too large for its dtype
        # There the products are 0, or NaN where x is infinite.
        of_scale = _times(products, weight) / jnp.where(overflown, 1, scale)
        return dy * weight * scale, -of_mean, of_scale, _summed(products, weight.shape)
    weighted = dy * weight
    if mean.shape == scale.shape:  # so that the sum is that of which a bias's gradient is made
        of_mean = _summed(weighted, mean.shape) * scale
    else:
        of_mean = _summed(weighted * scale, mean.shape)
    of_scale, of_weight = _summed(weighted * deviation, scale.shape), _summed(dy * (deviation * scale), weight.shape)
    return weighted * scale, -of_mean, of_scale, of_weight


def _are_rows(scale: tuple[int, ...], weight: tuple[int, ...], mean: tuple[int, ...], x: tuple[int, ...]) -> bool:
    """Whether `scale` and `mean` are one number for each row of x, and `weight` one for each of its entries.

    Else `scale` may be one that has a weight in it, which may be 0.
    """
    entries = len(weight)
    return entries > 0 and scale == mean == (*x[: len(x) - entries], *(1,) * entries) and weight == x[-entries:]


def _times(x: Array, weight: Array) -> Array:
    """The sums along rows of x times `weight`; of length 1 in the dimensions of a row."""
    along = tuple(range(x.ndim - weight.ndim, x.ndim))
    sums = lax.dot_general(x, weight, ((along, tuple(range(weight.ndim))), ((), ())), precision=lax.Precision.HIGHEST)
    return jnp.expand_dims(sums, along)


scaled.defvjp(_forward, _backward)


def _summed(x: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of broadcasting from `shape`."""
    before = x.ndim - len(shape)
    stretched = [before + d for d, n in enumerate(shape) if n == 1]
    return jnp.sum(x, axis=(*range(before), *stretched)).reshape(shape)
