"""One worker's `lax.reduce_window` for max, min and sum, over any dimensions, and what JAX's derivatives of it call.

They are computed as poolings in which all dimensions are feature dimensions. Ties go to the first entry of a window, as
in lax, and so do several NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.kernels.dtypes import extreme
from distdl_jax.kernels.geometry import Pairs, Placement
from distdl_jax.kernels.pooling import (
    Windows,
    by_slices,
    gather_from_largest,
    max_pool,
    padded_with,
    scatter_to_largest,
    sum_pool,
)

Selected = Literal["max", "min"]


def reduce_window(
    x: Array,
    reducer: Literal["max", "min", "sum"],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Pairs,
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
) -> Array:
    """Return the maximum, minimum or sum of each window, a NaN if it contains one, in the dtype of x.

    Arguments are those of lax's primitives: one for each dimension of x. The initial value, which also pads, is the
    reducer's identity. Half precision is summed in float32, and rounded once.
    """
    if reducer == "min":
        x = _opposite(x)
    identity = np.zeros((), x.dtype) if reducer == "sum" else extreme(np.dtype(x.dtype), largest=False)
    x = _with_gaps(x, identity, base_dilation)
    window = _placement(window_strides, padding, window_dilation)
    if reducer == "sum":
        return sum_pool(x[None, None], tuple(window_dimensions), window)[0, 0].astype(x.dtype)
    y = max_pool(x[None, None], tuple(window_dimensions), window)[0, 0]
    return _opposite(y) if reducer == "min" else y


def select_and_scatter_add(
    source: Array,
    operand: Array,
    select: Selected,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Pairs,
) -> Array:
    """Return, for each entry of `operand`, the sum of `source` over the windows whose first maximum or minimum it is.

    It is the gradient of `reduce_window`, as JAX writes it.
    """
    window, kernel = _placement(window_strides, padding, None), tuple(window_dimensions)
    if not by_slices(kernel, window):
        return lax.select_and_scatter_add_p.bind(
            source,
            operand,
            select_prim=_SELECT[select],
            window_dimensions=kernel,
            window_strides=window.stride,
            padding=window.padding,
        )
    x = _selected(operand, select, window)
    scattered = scatter_to_largest(source[None, None], x, Windows(kernel, window.unpadded(), x.shape))[0, 0]
    cropped = tuple((-low, -high) for low, high in window.padding)
    return padded_with(scattered[None, None], np.zeros((), source.dtype), cropped)[0, 0]


def select_and_gather_add(
    tangents: Array,
    operand: Array,
    select: Selected,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Pairs,
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
) -> Array:
    """Return, for each window, the entry of `tangents` where `operand` has its first maximum or minimum.

    It is the derivative of `reduce_window` in a direction, as JAX writes it, and the adjoint of
    `select_and_scatter_add`.
    """
    window, kernel = _placement(window_strides, padding, window_dilation), tuple(window_dimensions)
    if not by_slices(kernel, window):
        return lax.select_and_gather_add_p.bind(
            tangents,
            operand,
            select_prim=_SELECT[select],
            window_dimensions=kernel,
            window_strides=window.stride,
            padding=window.padding,
            base_dilation=tuple(base_dilation or (1,) * operand.ndim),
            window_dilation=window.dilation,
        )
    zero = np.zeros((), tangents.dtype)
    t = padded_with(_with_gaps(tangents, zero, base_dilation)[None, None], zero, window.padding)
    x = _selected(operand, select, window, base_dilation)
    return gather_from_largest(t, x, Windows(kernel, window.unpadded(), x.shape))[0, 0]


_SELECT = {"max": lax.ge_p, "min": lax.le_p}


def _placement(stride: Sequence[int], padding: Pairs, dilation: Sequence[int] | None) -> Placement:
    return Placement(tuple(stride), tuple(padding), tuple(dilation or (1,) * len(stride)))


def _selected(operand: Array, select: Selected, window: Placement, base_dilation: Sequence[int] | None = None) -> Array:
    """Return the array whose maxima are selected, with its padding, as one sample of one channel."""
    operand = _opposite(operand) if select == "min" else operand
    least = extreme(np.dtype(operand.dtype), largest=False)
    return padded_with(_with_gaps(operand, least, base_dilation)[None, None], least, window.padding)


def _opposite(x: Array) -> Array:
    """Return an array of x's dtype in the opposite order."""
    return -x if jnp.issubdtype(x.dtype, jnp.inexact) else ~x


def _with_gaps(x: Array, value: np.ndarray, dilation: Sequence[int] | None) -> Array:
    if dilation is None or set(dilation) <= {1}:
        return x
    return lax.pad(x, value, [(0, 0, each - 1) for each in dilation])
