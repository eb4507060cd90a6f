"""One worker's block less its mean, scaled, with a derivative that stores x alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.custom_vjp
def scaled(x: Array, mean: Array, scale: Array, weight: Array) -> Array:
    """Return (x - mean) scale weight; all have one dtype, and shapes that broadcast with x."""
    return (x - mean) * scale * weight


def _forward(x: Array, mean: Array, scale: Array, weight: Array) -> tuple[Array, tuple[Array, ...]]:
    return scaled(x, mean, scale, weight), (x, mean, scale, weight)


def _backward(residuals: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array, Array]:
    x, mean, scale, weight = residuals
    deviation = x - mean
    if _are_rows(scale.shape, weight.shape, mean.shape, x.shape):
        # Sums along rows are products with the weight: then one array is all that is written for the sums.
        products = dy * (deviation * scale)
        of_mean, overflown = _times(dy, weight) * scale, scale == 0  # of a variance that is too large for its dtype
        # There the products are 0, or NaN where x is infinite.
        of_scale = _times(products, weight) / jnp.where(overflown, 1, scale)
        return dy * weight * scale, -of_mean, of_scale, _summed(products, weight.shape)
    weighted = dy * weight
    if mean.shape == scale.shape:  # so that it is the same sum as the gradient of a bias
        of_mean = _summed(weighted, mean.shape) * scale
    else:
        of_mean = _summed(weighted * scale, mean.shape)
    of_scale, of_weight = _summed(weighted * deviation, scale.shape), _summed(dy * (deviation * scale), weight.shape)
    return weighted * scale, -of_mean, of_scale, of_weight


def _are_rows(scale: tuple[int, ...], weight: tuple[int, ...], mean: tuple[int, ...], x: tuple[int, ...]) -> bool:
    """Say whether `scale` and `mean` have a number for each row of x, and `weight` one for each entry of a row.

    Else `scale` may be a product with a weight, which may be 0.
    """
    entries = len(weight)
    return entries > 0 and scale == mean == (*x[: len(x) - entries], *(1,) * entries) and weight == x[-entries:]


def _times(x: Array, weight: Array) -> Array:
    """Return the sums along rows of x times `weight`; of length 1 in the dimensions of a row."""
    along = tuple(range(x.ndim - weight.ndim, x.ndim))
    sums = lax.dot_general(x, weight, ((along, tuple(range(weight.ndim))), ((), ())), precision=lax.Precision.HIGHEST)
    return jnp.expand_dims(sums, along)


scaled.defvjp(_forward, _backward)


def _summed(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum x to `shape`: the transpose of broadcasting from it."""
    before = x.ndim - len(shape)
    stretched = [before + d for d, n in enumerate(shape) if n == 1]
    return jnp.sum(x, axis=(*range(before), *stretched)).reshape(shape)
