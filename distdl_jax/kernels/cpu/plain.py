"""XLA's own convolution, forward and gradients, in the order in memory that its CPU compiler computes in.

The compiler brings convolutions into that order by itself, but not those inside a loop, which then take 5 to 100 times
as long: a training loop in `lax.scan` is such a loop. So in one and two dimensions they are written in it here.
Groups and three dimensions are left as they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from distdl_jax.kernels.geometry import Pairs, Placement, row_major
from distdl_jax.kernels.xla_conv import conv


def forward(x: Array, weight: Array, window: Placement, groups: int) -> Array:
    """Return the convolution of `x`, N x C x features, with `weight`, c_out x C/groups x kernel."""
    if not _is_reordered(groups, x, weight):
        return _as_it_is(x, weight, window, groups)
    if x.ndim == 3:
        return forward(x[:, :, None], weight[:, :, None], window.with_row(), 1)[:, :, 0]
    return _reordered(x, jnp.transpose(weight, (2, 3, 1, 0)), window.stride, window.padding, (1, 1), window.dilation)


def input_gradient(x: Array, weight: Array, dy: Array, window: Placement, groups: int) -> Array:
    """Return the gradient of x, from the cotangent `dy` of the result."""
    if not _is_reordered(groups, x, weight, dy):
        return jax.vjp(lambda x: _as_it_is(x, weight, window, groups), x)[1](dy)[0]
    if x.ndim == 3:
        x, weight, dy = (a[:, :, None] for a in (x, weight, dy))
        return input_gradient(x, weight, dy, window.with_row(), 1)[:, :, 0]
    along = zip(window.reach(weight.shape[2:]), window.padding, window.stride, x.shape[2:], dy.shape[2:], strict=True)
    padding = tuple((reach - low, n - (m - 1) * stride - 1 + low) for reach, (low, _), stride, n, m in along)
    kernel = jnp.transpose(jnp.flip(weight, (2, 3)), (2, 3, 0, 1))
    return _reordered(dy, kernel, (1, 1), padding, window.stride, window.dilation)


def weight_gradient(x: Array, weight: Array, dy: Array, window: Placement, groups: int) -> Array:
    """Return the gradient of the weight: the convolution of x, whose channels are a batch, with dy."""
    if not _is_reordered(groups, x, weight, dy):
        return jax.vjp(lambda weight: _as_it_is(x, weight, window, groups), weight)[1](dy)[0]
    if x.ndim == 3:
        x, weight, dy = (a[:, :, None] for a in (x, weight, dy))
        return weight_gradient(x, weight, dy, window.with_row(), 1)[:, :, 0]
    gradient = conv(
        row_major(jnp.transpose(x, (1, 2, 3, 0))),
        row_major(jnp.transpose(dy, (2, 3, 0, 1))),
        window.dilation,
        window.padding_read(x.shape[2:], weight.shape[2:], dy.shape[2:]),
        dilation=window.stride,
        channels_last=True,
    )
    return jnp.transpose(gradient, (3, 0, 1, 2))


def _is_reordered(groups: int, *arrays: Array) -> bool:
    return groups == 1 and arrays[0].ndim < 5 and all(0 not in array.shape for array in arrays)


def _as_it_is(x: Array, weight: Array, window: Placement, groups: int) -> Array:
    return conv(x, weight, window.stride, window.padding, dilation=window.dilation, groups=groups)


def _reordered(
    x: Array, kernel: Array, stride: tuple[int, ...], padding: Pairs, spread: tuple[int, ...], dilation: tuple[int, ...]
) -> Array:
    x = row_major(jnp.moveaxis(x, 1, 3))
    y = conv(x, kernel, stride, padding, x_dilation=spread, dilation=dilation, channels_last=True)
    return row_major(jnp.moveaxis(y, 3, 1))
