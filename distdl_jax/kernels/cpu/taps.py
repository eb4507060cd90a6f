"""Convolutions of one input channel a group as sums over the kernel's taps."""

from __future__ import annotations

import math
from functools import reduce

import jax
import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.kernels.geometry import Placement, padded

MOST_TAPS = 64
"""The largest kernel that is written out tap by tap."""


def forward(x: Array, weight: Array, window: Placement, groups: int) -> Array:
    """Sum, over the taps, the entries that each meets times a number for each output channel."""
    each = weight.shape[0] // groups
    numbers = weight.reshape(weight.shape[0], -1, *(1,) * len(window.stride))
    met = window.met_by_taps(x, weight.shape[2:])
    met = met if 1 in (each, groups) else [jnp.repeat(a, each, axis=1) for a in met]
    return reduce(jnp.add, [a * numbers[:, tap] for tap, a in enumerate(met)])


def input_gradient(x: Array, weight: Array, dy: Array, window: Placement, groups: int) -> Array:
    """Return the gradient of x: where nothing is skipped, such a convolution of dy."""
    if set(window.stride) != {1} or weight.shape[0] != groups:
        return jax.vjp(lambda x: forward(x, weight, window, groups), x)[1](dy)[0]
    reversed_weight = jnp.flip(weight, range(2, weight.ndim))
    return forward(dy, reversed_weight, window.of_input_gradient(x.shape[2:], weight.shape[2:], dy.shape[2:]), groups)


def weight_gradient(x: Array, weight: Array, dy: Array, window: Placement, groups: int) -> Array:
    """Return the gradient of the weight."""
    kernel, each = weight.shape[2:], weight.shape[0] // groups
    whole = padded(x, window.padding)
    axes = tuple(range(1, x.ndim - 1))

    def add(total: Array, sample: tuple[Array, Array]) -> tuple[Array, None]:
        one_x, one_dy = sample
        met = (a[0] for a in window.unpadded().met_by_taps(one_x[None], kernel))
        met = met if each == 1 else (jnp.repeat(a, each, axis=0) for a in met)
        return total + jnp.stack([jnp.sum(a * one_dy, axes) for a in met], axis=1), None

    zeros = jnp.zeros((weight.shape[0], math.prod(kernel)), x.dtype)
    return lax.scan(add, zeros, (whole, dy))[0].reshape(weight.shape)
