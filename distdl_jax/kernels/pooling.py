"""The largest entry, or the sum, of each window: what one worker of a distributed pooling computes.

The entries of the windows are strided slices of x, one slice for each place in a window. Their maximum is one loop for
XLA, and so is its gradient. On a CPU that takes a fifth to a tenth of the time of `lax.reduce_window`, whose gradient
is a scatter; large windows, which would be as many slices, and other devices keep to that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.kernels.layout import between_layers
from distdl_jax.plans.windows import Pairs, WindowSpec

MOST_SLICES = 64
"""The largest window whose entries are taken by slices."""


def largest(x: Array, windows: WindowSpec) -> Array:
    """The largest entry of each window, NaN where there is one; its cotangent goes to the first such entry.

    `lax.reduce_window` gives a NaN's cotangent to some other entry of the window.
    """
    x = _padded(x, least(x.dtype), windows.padding)
    if _by_slices(windows):
        return between_layers(_largest(between_layers(x), windows, x.shape))
    return lax.reduce_window(x, least(x.dtype), lax.max, padding="VALID", **_in_full(windows))


def total(x: Array, windows: WindowSpec) -> Array:
    """The sum of each window."""
    zero = np.zeros((), x.dtype)
    x = _padded(x, zero, windows.padding)
    if _by_slices(windows):
        return between_layers(_total(between_layers(x), windows, x.shape))
    return lax.reduce_window(x, zero, lax.add, padding="VALID", **_in_full(windows))


def _padded(x: Array, value: np.ndarray, padding: Pairs) -> Array:
    if not any(map(any, padding)):
        return x
    return lax.pad(x, value, [(0, 0, 0), (0, 0, 0), *((low, high, 0) for low, high in padding)])


def _by_slices(windows: WindowSpec) -> bool:
    """Whether the entries are taken by slices."""
    few = math.prod(windows.kernel) <= MOST_SLICES and jax.default_backend() == "cpu"
    return few or set(windows.dilation) != {1}  # JAX does not differentiate dilated windows


def _in_full(windows: WindowSpec) -> dict[str, tuple[int, ...]]:
    """The arguments of `lax.reduce_window` for N x C x features."""
    return {"window_dimensions": (1, 1, *windows.kernel), "window_strides": (1, 1, *windows.stride)}


def least(dtype: np.dtype) -> np.ndarray:
    """What no number of the dtype is smaller than."""
    if dtype == np.bool_:
        return np.zeros((), dtype)
    return np.asarray(-jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _largest(x: Array, windows: WindowSpec, shape: tuple[int, ...]) -> Array:
    return reduce(jnp.maximum, _entries(x, windows))


def _largest_forward(x: Array, windows: WindowSpec, shape: tuple[int, ...]) -> tuple[Array, Array]:
    return _largest(x, windows, shape), x


def _largest_backward(windows: WindowSpec, shape: tuple[int, ...], x: Array, dy: Array) -> tuple[Array]:
    first = between_layers(_first_largest(_entries(x, windows)))  # worked out once, not for each entry of x
    firsts, dys = _moved(first, -1, windows, shape), _moved(dy, 0, windows, shape)
    return (_added(lambda i, q: jnp.where(firsts[q] == i, dys[q], 0), windows, shape, dy.dtype),)


def _first_largest(entries: list[Array]) -> Array:
    """The number of each window's first largest entry, by comparing entries in pairs, then the pairs, and so on.

    They are not compared with y: the compiler may work x out again here, rounded otherwise, and then none equals y. By
    selects, since it would take maxima of entries for those that made y.
    """
    left = [(entry, jnp.full(entry.shape, i, jnp.int32)) for i, entry in enumerate(entries)]
    while len(left) > 1:
        pairs = []
        for (one, i), (other, j) in zip(left[::2], left[1::2], strict=False):
            later = ~((one >= other) | (one != one))  # a NaN is the largest
            pairs.append((jnp.where(later, other, one), jnp.where(later, j, i)))
        left = pairs + left[len(left) // 2 * 2 :]
    return left[0][1]


_largest.defvjp(_largest_forward, _largest_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _total(x: Array, windows: WindowSpec, shape: tuple[int, ...]) -> Array:
    return reduce(jnp.add, _entries(x, windows))


def _total_backward(windows: WindowSpec, shape: tuple[int, ...], _: None, dy: Array) -> tuple[Array]:
    dys = _moved(dy, 0, windows, shape)
    return (_added(lambda _, q: dys[q], windows, shape, dy.dtype),)


_total.defvjp(lambda x, windows, shape: (_total(x, windows, shape), None), _total_backward)


def _offsets(windows: WindowSpec) -> list[tuple[int, ...]]:
    """Where the entries of a window are in x, from where the window starts, in row-major order."""
    places = product(*map(range, windows.kernel))
    return [tuple(i * d for i, d in zip(place, windows.dilation, strict=True)) for place in places]


def _entries(x: Array, windows: WindowSpec) -> list[Array]:
    """For each place in a window, the entries of x that all windows have there."""
    reach = _offsets(windows)[-1]
    room = [n - far for n, far in zip(x.shape[2:], reach, strict=True)]
    stops = ([start + n for start, n in zip(starts, room, strict=True)] for starts in _offsets(windows))
    strides = (1, 1, *windows.stride)
    return [
        lax.slice(x, (0, 0, *starts), (*x.shape[:2], *stop), strides)
        for starts, stop in zip(_offsets(windows), stops, strict=True)
    ]


def _whole_strides(windows: WindowSpec) -> list[tuple[int, ...]]:
    """How many whole strides each entry of a window is from where the window starts."""
    return [tuple(o // s for o, s in zip(offset, windows.stride, strict=True)) for offset in _offsets(windows)]


def _moved(values: Array, fill: int, windows: WindowSpec, shape: tuple[int, ...]) -> dict[tuple[int, ...], Array]:
    """`values`, one for each window, moved on by so many windows, by these; `fill` where there is none.

    As many windows as there are strides in x's `shape`.
    """
    farthest = _whole_strides(windows)[-1]
    count = [-(-n // s) for n, s in zip(shape[2:], windows.stride, strict=True)]
    rest = [(far, m - n, 0) for far, m, n in zip(farthest, count, values.shape[2:], strict=True)]
    wide = lax.pad(values, np.asarray(fill, values.dtype), [(0, 0, 0), (0, 0, 0), *rest])

    def moved(by: tuple[int, ...]) -> Array:
        starts = [far - q for far, q in zip(farthest, by, strict=True)]
        stops = [start + m for start, m in zip(starts, count, strict=True)]
        return lax.slice(wide, (0, 0, *starts), (*shape[:2], *stops))

    return {by: moved(by) for by in dict.fromkeys(_whole_strides(windows))}


def _added(
    given: Callable[[int, tuple[int, ...]], Array], windows: WindowSpec, shape: tuple[int, ...], dtype: np.dtype
) -> Array:
    """The adjoint of taking the windows' entries: what they give to those of x, added up; an array of its `shape`.

    `given(i, q)`: what the i-th entries of the windows give, moved on by q windows. Entries of x that are at the same
    place between two strides are added up as one array, and only then put between the others: with a pad for each
    entry of the window, XLA asks for each number of x and each pad whether there is anything.
    """
    phases: dict[tuple[int, ...], Array] = {}
    for i, (offset, by) in enumerate(zip(_offsets(windows), _whole_strides(windows), strict=True)):
        place = tuple(o % s for o, s in zip(offset, windows.stride, strict=True))
        phases[place] = phases[place] + given(i, by) if place in phases else given(i, by)
    count = [-(-n // s) for n, s in zip(shape[2:], windows.stride, strict=True)]
    nothing = jnp.zeros((*shape[:2], *count), dtype)
    places = [max(along) + 1 for along in zip(*phases, strict=True)]  # between windows that are apart there are none
    pieces = [phases.get(place, nothing) for place in product(*map(range, places))]
    for d in reversed(range(len(count))):
        n, s = places[d], windows.stride[d]
        pieces = [_in_turn(pieces[first : first + n], 2 + d, s) for first in range(0, len(pieces), n)]
    return lax.slice(pieces[0], (0,) * len(shape), shape)


def _in_turn(pieces: list[Array], axis: int, stride: int) -> Array:
    """The first entry of each along `axis`, and zeros up to `stride` entries, then the second of each, and so on."""
    if stride == 1:
        return pieces[0]
    stacked = jnp.stack(pieces, axis + 1)
    rest = [(0, stride - len(pieces) if d == axis + 1 else 0, 0) for d in range(stacked.ndim)]
    stacked = lax.pad(stacked, jnp.zeros((), stacked.dtype), rest) if len(pieces) < stride else stacked
    return stacked.reshape(*stacked.shape[:axis], stride * stacked.shape[axis], *stacked.shape[axis + 2 :])
