"""Convolutions written so that XLA's CPU compiler meets the kernels that it is good at.

`forward` is `lax.conv_general_dilated` in other words, and so are its gradients. Left to itself the compiler makes
loops of three dimensions, of one input channel and of groups that are 5 to 50 times slower than a matrix product. So
depth becomes channels of a two-dimensional convolution, one channel becomes a sum over the kernel's taps, groups become
convolutions of their own, strides become channels of the input's gradient; rewritten_2d.py does the rest. Figures:
records.json, which benchmarks/local_convolution.py writes.

The price is memory in three dimensions: the planes that become channels are copies of x, as many as the kernel is deep;
in four, as many as its first two sides have taps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.kernels.cpu import taps
from distdl_jax.kernels.cpu.rewritten_2d import planar, planar_weight_gradient
from distdl_jax.kernels.geometry import Placement, folded, row_major, unfolded

MOST_GROUPS = 16
"""The most groups that are written out as convolutions of their own; of more, one after the other in a loop."""


def forward(x: Array, weight: Array, window: Placement, groups: int) -> Array:
    """Return the convolution of `x`, N x C x features, with `weight`, c_out x C/groups x kernel."""
    return _by_groups(lambda x, weight: _convolution(x, weight, window), groups, (x, weight), 1)


def input_gradient(x: Array, weight: Array, dy: Array, window: Placement, groups: int) -> Array:
    """Return the gradient of x, from the cotangent `dy` of the result."""
    return _by_groups(lambda x, weight, dy: _input_gradient(x, weight, dy, window), groups, (x, weight, dy), 1)


def weight_gradient(x: Array, weight: Array, dy: Array, window: Placement, groups: int) -> Array:
    """Return the gradient of the weight."""
    return _by_groups(lambda x, weight, dy: _weight_gradient(x, weight, dy, window), groups, (x, weight, dy), 0)


def _by_groups(f: Callable[..., Array], groups: int, arrays: tuple[Array, ...], result_along: int) -> Array:
    """Call `f` with each group's parts of x, weight and perhaps dy, and join its results along a dimension."""
    if groups == 1:
        return f(*arrays)
    along = (1, 0, 1)[: len(arrays)]
    if groups <= MOST_GROUPS:
        parts = (jnp.split(a, groups, axis) for a, axis in zip(arrays, along, strict=True))
        return jnp.concatenate([f(*part) for part in zip(*parts, strict=True)], axis=result_along)
    stacks = []
    for a, axis in zip(arrays, along, strict=True):
        a = a.reshape(*a.shape[:axis], groups, -1, *a.shape[axis + 1 :])
        stacks.append(row_major(jnp.moveaxis(a, axis, 0)))
    y = lax.map(lambda parts: f(*parts), tuple(stacks))
    y = row_major(jnp.moveaxis(y, 0, result_along))
    return y.reshape(*y.shape[:result_along], -1, *y.shape[result_along + 2 :])


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _convolution(x: Array, weight: Array, window: Placement) -> Array:
    if x.shape[1] == 1 and math.prod(weight.shape[2:]) <= taps.MOST_TAPS:
        return taps.forward(x, weight, window, 1)
    return _as_products(x, weight, window)


def _as_products(x: Array, weight: Array, window: Placement) -> Array:
    return _by_planes(x, weight, window) if x.ndim > 4 else planar(x, weight, window)


def _backward(window: Placement, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    return _input_gradient(*residuals, dy, window), _weight_gradient(*residuals, dy, window)


_convolution.defvjp(lambda x, weight, window: (_convolution(x, weight, window), (x, weight)), _backward)


def _input_gradient(x: Array, weight: Array, dy: Array, window: Placement) -> Array:
    if any(stride > 1 for stride in window.stride):
        if 0 not in (*x.shape, *dy.shape) and _phases_pay(x, weight, dy, window):
            return _by_phases(x, weight, dy, window)
        return jax.vjp(lambda x: _as_products(x, weight, window), x)[1](dy)[0]
    # With stride 1 it is the convolution of dy with the reversed kernel.
    reversed_weight = jnp.swapaxes(jnp.flip(weight, range(2, weight.ndim)), 0, 1)
    on_dy = window.of_input_gradient(x.shape[2:], weight.shape[2:], dy.shape[2:])
    return _convolution(dy, reversed_weight, on_dy)


def _phases_pay(x: Array, weight: Array, dy: Array, window: Placement) -> bool:
    """Tell whether the input gradient with stride is faster by phases, as measured outside of loops."""
    kernel = weight.shape[2:]
    if 1 < math.prod(dy.shape[2:]) < math.prod(kernel):  # the compiler would take the one for the other
        return True
    if x.dtype == jnp.float64:
        return x.shape[1] > 2 and max(window.reach(kernel)) > 0
    # The phases' kernels are larger than their shares of the taps.
    spans = ((reach // stride + 1) * stride for reach, stride in zip(window.reach(kernel), window.stride, strict=True))
    return x.shape[1] <= 16 and math.prod(spans) <= 1.5 * math.prod(kernel)


def _by_phases(x: Array, weight: Array, dy: Array, window: Placement) -> Array:
    """Compute the input gradient of a convolution with stride as a convolution without.

    Columns of x that are the stride apart meet the same taps. So the columns of one stride, the phases, are the
    channels of a convolution of dy, and each has its share of the taps; then the phases are put in their places.
    """
    kernel, sizes, dims = weight.shape[2:], x.shape[2:], range(x.ndim - 2)
    reach, stride, lows = window.reach(kernel), window.stride, [low for low, _ in window.padding]
    counts = [r // s + 1 for r, s in zip(reach, stride, strict=True)]
    spread = [(0, t * s - r - 1, d - 1) for t, s, r, d in zip(counts, stride, reach, window.dilation, strict=True)]
    zero = jnp.zeros((), weight.dtype)
    weight = lax.pad(weight, zero, [(0, 0, 0)] * 2 + spread)
    # c_out x c_in x (taps x stride), to (phases x c_in) x c_out x taps
    weight = weight.reshape(*weight.shape[:2], *(n for i in dims for n in (counts[i], stride[i])))
    weight = jnp.transpose(weight, (*(3 + 2 * i for i in dims), 1, 0, *(2 + 2 * i for i in dims)))
    weight = jnp.flip(weight.reshape(-1, dy.shape[1], *counts), [2 + i for i in dims])
    places = [max(-(-(n + low) // s), 1) for n, low, s in zip(sizes, lows, stride, strict=True)]
    padding = tuple((t - 1, n - m) for t, n, m in zip(counts, places, dy.shape[2:], strict=True))
    phases = _convolution(dy, weight, Placement((1,) * len(sizes), padding, (1,) * len(sizes)))
    phases = phases.reshape(x.shape[0], *stride, x.shape[1], *places)
    order = (0, x.ndim - 1, *(place for i in dims for place in (x.ndim + i, 1 + i)))
    columns = (m * s for m, s in zip(places, stride, strict=True))
    joined = row_major(jnp.transpose(phases, order)).reshape(*x.shape[:2], *columns)
    ends = [(-low, n + low - m, 0) for low, n, m in zip(lows, sizes, joined.shape[2:], strict=True)]
    return lax.pad(joined, zero, [(0, 0, 0)] * 2 + ends)


def _weight_gradient(x: Array, weight: Array, dy: Array, window: Placement) -> Array:
    if x.ndim < 5:
        return planar_weight_gradient(x, dy, weight.shape[2:], window)
    # One plane of the kernel after the other: the stack of planes is not needed, and not kept from forward on.
    planes, dy = map(folded, window.planes(x, weight.shape[2])), folded(dy)
    return jnp.stack([_weight_gradient(plane, weight[:, :, 0], dy, window.of_planes()) for plane in planes], axis=2)


def _by_planes(x: Array, weight: Array, window: Placement) -> Array:
    """Make channels of the planes that a window reads along its first dimension, the depth, and a batch of windows.

    That leaves a dimension less. Of four there are so two such steps.
    """
    stacked = jnp.concatenate(window.planes(x, weight.shape[2]), axis=1)
    kernel = jnp.concatenate([weight[:, :, i] for i in range(weight.shape[2])], axis=1)
    return unfolded(_as_products(folded(stacked), kernel, window.of_planes()), stacked.shape[2])
