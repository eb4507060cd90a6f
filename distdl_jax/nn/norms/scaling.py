"""One worker's block with its mean taken out, scaled: its derivative reads x and the cotangent, and keeps x alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


@jax.custom_vjp
def scaled(x: Array, mean: Array, scale: Array, weight: Array) -> Array:
    """(x - mean) scale weight; all of one dtype, and of shapes that broadcast with x."""
    return (x - mean) * scale * weight


def _forward(x: Array, mean: Array, scale: Array, weight: Array) -> tuple[Array, tuple[Array, ...]]:
    return scaled(x, mean, scale, weight), (x, mean, scale, weight)


def _backward(kept: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array, Array]:
    x, mean, scale, weight = kept
    weighted, deviation = dy * weight, x - mean
    if mean.shape == scale.shape:  # so that the sum is that of which a bias's gradient is made
        of_mean = _summed(weighted, mean.shape) * scale
    else:
        of_mean = _summed(weighted * scale, mean.shape)
    of_scale, of_weight = _summed(weighted * deviation, scale.shape), _summed(dy * (deviation * scale), weight.shape)
    return weighted * scale, -of_mean, of_scale, of_weight


scaled.defvjp(_forward, _backward)


def _summed(x: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of broadcasting from `shape`."""
    before = x.ndim - len(shape)
    stretched = [before + d for d, n in enumerate(shape) if n == 1]
    return jnp.sum(x, axis=(*range(before), *stretched)).reshape(shape)
