"""Convolution and pooling of whole arrays in numpy, and their adjoints: straight from the definitions.

Arrays are N x C x features. On integers, kept in float64, everything is exact. Nothing here comes from the library.
"""

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

Sizes = Sequence[int]
Pairs = Sequence[tuple[int, int]]

NUMPY_MODES = {"zeros": "constant", "circular": "wrap", "reflect": "reflect", "replicate": "edge"}
OUTPUT, KERNEL = "wxyz", "abcd"  # subscripts


def pad(x: np.ndarray, pairs: Pairs, mode: str = "zeros", value: float = 0) -> np.ndarray:
    """The features of `x` with `pairs` around them."""
    options = {"constant_values": value} if mode == "zeros" else {}
    return np.pad(x, [(0, 0), (0, 0), *pairs], mode=NUMPY_MODES[mode], **options)


def pad_adjoint(dy: np.ndarray, shape: Sizes, pairs: Pairs, mode: str = "zeros") -> np.ndarray:
    """Every entry of the padding goes back to where it came from; `shape` are the unpadded features."""
    for d, (n, pair) in enumerate(zip(shape, pairs, strict=True)):
        options = {"constant_values": -1} if mode == "zeros" else {}
        sources = np.pad(np.arange(n), pair, mode=NUMPY_MODES[mode], **options)
        dy = scatter(dy, d + 2, sources, n)
    return dy


def scatter(dy: np.ndarray, axis: int, sources: np.ndarray, n: int) -> np.ndarray:
    """The adjoint of taking `sources` along an axis of length `n`; a source of -1 is nowhere."""
    dx = np.zeros((n, *np.moveaxis(dy, axis, 0).shape[1:]), dy.dtype)
    inside = sources >= 0
    np.add.at(dx, sources[inside], np.moveaxis(dy, axis, 0)[inside])
    return np.moveaxis(dx, 0, axis)


def outputs(sizes: Sizes, kernel: Sizes, stride: Sizes, dilation: Sizes) -> tuple[int, ...]:
    """The number of windows along each of the (padded) features."""
    return tuple((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(sizes, kernel, stride, dilation, strict=True))


def windows(x: np.ndarray, kernel: Sizes, stride: Sizes, dilation: Sizes) -> np.ndarray:
    """A view of shape (leading) x outputs x kernel: entry (j, k) is x[j * stride + k * dilation]."""
    lead = x.ndim - len(kernel)
    counts = outputs(x.shape[lead:], kernel, stride, dilation)
    steps = [s * b for s, b in zip(stride, x.strides[lead:], strict=True)]
    inner = [d * b for d, b in zip(dilation, x.strides[lead:], strict=True)]
    return as_strided(x, (*x.shape[:lead], *counts, *kernel), (*x.strides[:lead], *steps, *inner), writeable=False)


def windows_adjoint(dy: np.ndarray, shape: Sizes, kernel: Sizes, stride: Sizes, dilation: Sizes) -> np.ndarray:
    """Add the entries of all windows back to where they lie in an array of `shape`."""
    dims = len(kernel)
    dx = np.zeros(shape, dy.dtype)
    counts = dy.shape[dy.ndim - 2 * dims : dy.ndim - dims]
    for offset in product(*map(range, kernel)):
        place = tuple(
            slice(o * d, o * d + s * (m - 1) + 1, s)
            for o, d, s, m in zip(offset, dilation, stride, counts, strict=True)
        )
        dx[(..., *place)] += dy[(..., *offset)]
    return dx


def _grouped(x: np.ndarray, axis: int, groups: int) -> np.ndarray:
    x = np.ascontiguousarray(x)
    return x.reshape(*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])


def convolve(x: np.ndarray, w: np.ndarray, stride: Sizes, dilation: Sizes, groups: int) -> np.ndarray:
    """y[n, g, u, j] = sum of x[n, g, i, j * stride + k * dilation] * w[g, u, i, k] over i and k."""
    o, k = OUTPUT[: w.ndim - 2], KERNEL[: w.ndim - 2]
    view = windows(_grouped(x, 1, groups), w.shape[2:], stride, dilation)
    y = np.einsum(f"ngi{o}{k},gui{k}->ngu{o}", view, _grouped(w, 0, groups))
    return y.reshape(x.shape[0], w.shape[0], *y.shape[3:])


def convolve_adjoint(
    dy: np.ndarray, x: np.ndarray, w: np.ndarray, stride: Sizes, dilation: Sizes, groups: int
) -> tuple[np.ndarray, np.ndarray]:
    kernel = w.shape[2:]
    o, k = OUTPUT[: len(kernel)], KERNEL[: len(kernel)]
    gx, gw, gy = _grouped(x, 1, groups), _grouped(w, 0, groups), _grouped(dy, 1, groups)
    dw = np.einsum(f"ngi{o}{k},ngu{o}->gui{k}", windows(gx, kernel, stride, dilation), gy)
    spread = np.einsum(f"ngu{o},gui{k}->ngi{o}{k}", gy, gw)
    dx = windows_adjoint(spread, gx.shape, kernel, stride, dilation)
    return dx.reshape(x.shape), dw.reshape(w.shape)


def max_pool(x: np.ndarray, kernel: Sizes, stride: Sizes, dilation: Sizes) -> np.ndarray:
    return windows(x, kernel, stride, dilation).max(axis=tuple(range(-len(kernel), 0)))


def max_pool_adjoint(dy: np.ndarray, x: np.ndarray, kernel: Sizes, stride: Sizes, dilation: Sizes) -> np.ndarray:
    """Each window's cotangent goes to its first largest entry, row-major."""
    view = windows(np.ascontiguousarray(x), kernel, stride, dilation)
    flat = view.reshape(*dy.shape, prod(kernel))
    chosen = np.arange(prod(kernel)) == flat.argmax(axis=-1)[..., None]
    return windows_adjoint((dy[..., None] * chosen).reshape(view.shape), x.shape, kernel, stride, dilation)


def sum_pool(x: np.ndarray, kernel: Sizes, stride: Sizes) -> np.ndarray:
    return windows(x, kernel, stride, (1,) * len(kernel)).sum(axis=tuple(range(-len(kernel), 0)))


def sum_pool_adjoint(dy: np.ndarray, shape: Sizes, kernel: Sizes, stride: Sizes) -> np.ndarray:
    spread = np.broadcast_to(dy.reshape(*dy.shape, *(1,) * len(kernel)), (*dy.shape, *kernel))
    return windows_adjoint(spread, shape, kernel, stride, (1,) * len(kernel))
