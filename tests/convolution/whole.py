"""What a drawn layer gives on the whole array, in one process: in numpy, and with JAX's own operations."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from convolution import direct
from convolution.draws import Conv, Pool


class Whole(NamedTuple):
    """The output, and the gradients of its inner product with a cotangent."""

    y: np.ndarray
    dx: np.ndarray
    dw: np.ndarray | None = None
    db: np.ndarray | None = None


def conv_by_numpy(conv: Conv, x: np.ndarray, w: np.ndarray, b: np.ndarray, dy: np.ndarray) -> Whole:
    padded = direct.pad(x, conv.pairs, conv.mode)
    y = direct.convolve(padded, w, conv.stride, conv.dilation, conv.groups)
    dx, dw = direct.convolve_adjoint(dy, padded, w, conv.stride, conv.dilation, conv.groups)
    dx = direct.pad_adjoint(dx, conv.sizes, conv.pairs, conv.mode)
    return Whole(y + b.reshape(-1, *(1,) * conv.dims), dx, dw, dy.sum(axis=(0, *range(2, dy.ndim))))


def conv_by_lax(conv: Conv, x: np.ndarray, w: np.ndarray, b: np.ndarray, dy: np.ndarray) -> Whole:
    return _with_gradients(conv_forward(conv), x, w, b, dy=dy)


def conv_forward(conv: Conv) -> Callable[[Array, Array, Array], Array]:
    """The sequential layer, of x, w and b."""

    def forward(x: Array, w: Array, b: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, 0), *conv.pairs], mode=direct.NUMPY_MODES[conv.mode])
        y = lax.conv_general_dilated(
            padded, w, conv.stride, "VALID", rhs_dilation=conv.dilation, feature_group_count=conv.groups
        )
        return y + b.reshape(-1, *(1,) * conv.dims)

    return forward


def pool_by_numpy(pool: Pool, x: np.ndarray, dy: np.ndarray) -> Whole:
    """`dy` is the cotangent of each window's maximum or, for an average, of its sum."""
    with np.errstate(invalid="ignore"):
        return Whole(*pooled(pool, x, pool.pairs, dy, entries(pool)))


def pooled(pool: Pool, x: np.ndarray, pairs: Any, dy: np.ndarray, entries: Any) -> tuple[np.ndarray, np.ndarray]:
    """Pooling and its adjoint: of a worker's block, with `pairs` its own padding, or of the whole array."""
    if pool.kind == "Max":
        padded = direct.pad(x, pairs, value=-np.inf)
        y = direct.max_pool(padded, pool.kernel, pool.stride, pool.dilation)
        back = direct.max_pool_adjoint(dy, padded, pool.kernel, pool.stride, pool.dilation)
    else:
        padded = direct.pad(x, pairs)
        y = direct.sum_pool(padded, pool.kernel, pool.stride) / entries
        back = direct.sum_pool_adjoint(dy, padded.shape, pool.kernel, pool.stride)
    return y, direct.pad_adjoint(back, x.shape[2:], pairs)


def entries(pool: Pool) -> np.ndarray:
    """What the sum of each window is divided by."""
    ones = np.ones((1, 1, *pool.sizes))
    return direct.sum_pool(direct.pad(ones, pool.pairs, value=float(pool.count_include_pad)), pool.kernel, pool.stride)


def pool_by_lax(pool: Pool, x: np.ndarray, dy: np.ndarray) -> Whole:
    """The gradient too, but where the window is dilated: JAX has none there."""
    forward = pool_forward(pool)
    if set(pool.dilation) != {1}:
        return Whole(np.asarray(forward(x)), pool_by_numpy(pool, x, dy).dx)
    return _with_gradients(forward, x, dy=dy)


def pool_forward(pool: Pool) -> Callable[[Array], Array]:
    pairs = ((0, 0), (0, 0), *pool.pairs)
    window = ((1, 1, *pool.kernel), (1, 1, *pool.stride))

    def largest(x: Array) -> Array:
        dilation = None if set(pool.dilation) == {1} else (1, 1, *pool.dilation)
        return lax.reduce_window(x, -np.inf, lax.max, *window, pairs, window_dilation=dilation)

    def mean(x: Array) -> Array:
        total = lax.reduce_window(x, 0.0, lax.add, *window, pairs)
        if pool.count_include_pad:
            return total / prod(pool.kernel)
        return total / lax.reduce_window(jnp.ones_like(x), 0.0, lax.add, *window, pairs)

    return largest if pool.kind == "Max" else mean


def _with_gradients(forward, *args: np.ndarray, dy: np.ndarray) -> Whole:
    def both(args, dy):
        y, pullback = jax.vjp(forward, *args)
        return y, *pullback(dy)

    return Whole(*map(np.asarray, jax.jit(both)(args, dy)))
