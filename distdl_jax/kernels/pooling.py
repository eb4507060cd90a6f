"""One worker's pooling: the maximum, or the sum, of each window.

The windows' entries are strided slices of x, one for each tap. XLA computes their maximum in one loop, and likewise its
gradient. On a CPU that takes a fifth to a tenth of the time of `lax.reduce_window`, whose gradient is a scatter; large
windows, which would need too many slices, and other devices use `lax.reduce_window`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.kernels.dtypes import accumulation_dtype, extreme, in_own_width
from distdl_jax.kernels.geometry import Pairs, Placement, between_layers

MOST_SLICES = 64
"""The largest window that is computed by slices."""


def max_pool(x: Array, kernel: tuple[int, ...], window: Placement) -> Array:
    """Return the maximum of each window, NaN if it contains one; its cotangent goes to the first such entry.

    `lax.reduce_window` sends a NaN's cotangent to some other entry of the window.
    """
    least = extreme(x.dtype, largest=False)
    x = padded_with(x, least, window.padding)
    if by_slices(kernel, window):
        return between_layers(_largest(between_layers(x), Windows(kernel, window.unpadded(), x.shape)))
    return lax.reduce_window(x, least, lax.max, (1, 1, *kernel), (1, 1, *window.stride), "VALID")


def sum_pool(x: Array, kernel: tuple[int, ...], window: Placement) -> Array:
    """Return the sum of each window, of half precision in float32."""
    x = padded_with(x, np.zeros((), x.dtype), window.padding)
    if by_slices(kernel, window):
        y = _total(between_layers(x), Windows(kernel, window.unpadded(), x.shape))
        return between_layers(y) if y.dtype == x.dtype else y  # float32 is rounded in the same loop
    x = _wide(x)
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, (1, 1, *kernel), (1, 1, *window.stride), "VALID")


def padded_with(x: Array, value: np.ndarray, padding: Pairs) -> Array:
    if not any(map(any, padding)):
        return x
    if _is_half(x.dtype):
        return _half_padded(x, float(value), padding)
    return lax.pad(x, value, [(0, 0, 0), (0, 0, 0), *((low, high, 0) for low, high in padding)])


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _half_padded(x: Array, value: float, padding: Pairs) -> Array:
    """Pad as integers, which have no derivative."""
    return _from_bits(padded_with(_bits(x), np.asarray(value, x.dtype).view(np.int16), padding), x.dtype)


_half_padded.defvjp(
    lambda x, value, padding: (_half_padded(x, value, padding), None),
    lambda value, padding, _, dy: (_half_padded(dy, 0.0, tuple((-low, -high) for low, high in padding)),),
)


def by_slices(kernel: tuple[int, ...], window: Placement) -> bool:
    few = math.prod(kernel) <= MOST_SLICES and jax.default_backend() == "cpu"
    return few or set(window.dilation) != {1}  # JAX does not differentiate dilated windows


@dataclass(frozen=True)
class Windows:
    """The windows over an array of `shape`, N x C x features, including its padding."""

    kernel: tuple[int, ...]
    placement: Placement
    shape: tuple[int, ...]

    def entries(self, x: Array) -> list[Array]:
        """Return, for each tap, the entries of x in all windows."""
        return self.placement.met_by_taps(x, self.kernel)

    @property
    def stride(self) -> tuple[int, ...]:
        """The stride along each feature dimension."""
        return self.placement.stride

    @property
    def offsets(self) -> list[tuple[int, ...]]:
        """The positions of the taps relative to the start of the window, in row-major order."""
        taps = product(*map(range, self.kernel))
        return [tuple(i * d for i, d in zip(tap, self.placement.dilation, strict=True)) for tap in taps]

    @property
    def whole_strides(self) -> list[tuple[int, ...]]:
        """The number of whole strides between the start of the window and each tap."""
        return [tuple(o // s for o, s in zip(offset, self.stride, strict=True)) for offset in self.offsets]

    @property
    def overlap(self) -> bool:
        """Whether an entry can be in several windows."""
        places = {tuple(o % s for o, s in zip(offset, self.stride, strict=True)) for offset in self.offsets}
        return len(places) < math.prod(self.kernel)

    @property
    def counts(self) -> list[int]:
        """The number of strides in x along each feature dimension."""
        return [-(-n // s) for n, s in zip(self.shape[2:], self.stride, strict=True)]


def _wide(x: Array) -> Array:
    """Convert half precision to float32: XLA on a CPU would otherwise round after each operation."""
    return x.astype(accumulation_dtype(np.dtype(x.dtype)))


def _is_half(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 16


def _bits(x: Array) -> Array:
    """Return half precision as integers: XLA converts it to float32 and back even where it is only moved."""
    return lax.bitcast_convert_type(x, np.int16) if _is_half(x.dtype) else x


def _from_bits(bits: Array, dtype: np.dtype) -> Array:
    return lax.bitcast_convert_type(bits, dtype) if _is_half(dtype) else bits


def _ordered(x: Array) -> Array:
    """Return integers in the order of x's numbers, if it is of half precision; NaN is the largest.

    XLA would convert each number to float32, which took up to thirteen times as long as float32's own maxima.
    """
    if not _is_half(x.dtype):
        return x
    bits, infinity = _bits(x), np.asarray(np.inf, x.dtype).view(np.int16)
    magnitude = bits & np.int16(0x7FFF)
    signed = jnp.where(bits < 0, -magnitude, magnitude)
    return jnp.where(magnitude > infinity, np.int16(0x7FFF), signed)


def _ordered_once(x: Array, windows: Windows) -> Array:
    """Return `_ordered(x)`, computed once, not for each window, if windows overlap."""
    return between_layers(_ordered(x)) if windows.overlap and _is_half(x.dtype) else _ordered(x)


def _summands(dy: Array, windows: Windows, dtype: np.dtype) -> Array:
    """Return what `_scatter_sum` sums to numbers of `dtype`: the numbers themselves, if windows don't overlap."""
    return _wide(dy) if windows.overlap else _bits(dy.astype(dtype))


def _rounded(x: Array, dtype: np.dtype) -> Array:
    """Return `_bits(x.astype(dtype))`, or x if it is that. In one loop with the sums it would not be vectorised."""
    is_rounded = x.dtype == (np.int16 if _is_half(dtype) else dtype)
    return x if is_rounded else _bits(between_layers(x).astype(dtype))


def _in_order(numbers: Array, dtype: np.dtype) -> Array:
    """Return the numbers of `dtype` whose `_ordered` these are."""
    if not _is_half(dtype):
        return numbers
    bits = jnp.where(numbers < 0, -numbers | np.int16(-0x8000), numbers)
    return _from_bits(bits, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _largest(x: Array, windows: Windows) -> Array:
    return _in_order(reduce(jnp.maximum, windows.entries(_ordered_once(x, windows))), x.dtype)


def _largest_backward(windows: Windows, x: Array, dy: Array) -> tuple[Array]:
    first = between_layers(
        _first_largest(windows.entries(_ordered_once(x, windows)))
    )  # computed once, not for each entry of x
    firsts, dys = _moved(first, -1, windows), _moved(_summands(dy, windows, dy.dtype), 0, windows)
    return (_scatter_sum(lambda i, q: jnp.where(firsts[q] == i, dys[q], 0), windows, dy.dtype),)


def _first_largest(entries: list[Array]) -> Array:
    """Return the number of each window's first maximum, by comparing entries in pairs, then the pairs, and so on.

    They are not compared with y: the compiler may recompute x here with different rounding, so that none equals y. By
    selects, since XLA would reuse maxima of entries for those that made y.
    """
    left = [(entry, jnp.full(entry.shape, i, jnp.int32)) for i, entry in enumerate(entries)]
    while len(left) > 1:
        pairs = []
        for (one, i), (other, j) in zip(left[::2], left[1::2], strict=False):
            later = ~((one >= other) | (one != one))  # a NaN is the largest
            pairs.append((jnp.where(later, other, one), jnp.where(later, j, i)))
        left = pairs + left[len(left) // 2 * 2 :]
    return left[0][1]


_largest.defvjp(in_own_width(lambda x, windows: (_largest(x, windows), x)), in_own_width(_largest_backward))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def scatter_to_largest(dy: Array, x: Array, windows: Windows) -> Array:
    """Return the sum of `dy` over the windows whose first maximum an entry of x is."""
    return _largest_backward(windows, x, dy)[0]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def gather_from_largest(t: Array, x: Array, windows: Windows) -> Array:
    """Return, for each window, the entry of `t` at the first maximum of x."""
    first = between_layers(_first_largest(windows.entries(_ordered_once(x, windows))))
    found, *others = windows.entries(_bits(t))
    for i, entries in enumerate(others, 1):
        found = jnp.where(first == i, entries, found)
    return _from_bits(found, t.dtype)


for _function, _adjoint in ((scatter_to_largest, gather_from_largest), (gather_from_largest, scatter_to_largest)):
    _function.defvjp(
        in_own_width(lambda values, x, windows, function=_function: (function(values, x, windows), x)),
        in_own_width(lambda windows, x, dy, adjoint=_adjoint: (adjoint(dy, x, windows), jnp.zeros_like(x))),
    )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _total(x: Array, windows: Windows) -> Array:
    return reduce(jnp.add, windows.entries(_wide(x)))


def _total_backward(windows: Windows, dtype_of_x: Array, dy: Array) -> tuple[Array]:
    dys = _moved(_summands(dy, windows, dtype_of_x.dtype), 0, windows)
    return (_scatter_sum(lambda _, q: dys[q], windows, dtype_of_x.dtype),)


_total.defvjp(
    in_own_width(lambda x, windows: (_total(x, windows), jnp.zeros(0, x.dtype))), in_own_width(_total_backward)
)


def _moved(values: Array, fill: int, windows: Windows) -> dict[tuple[int, ...], Array]:
    """Return `values`, one for each window, by each shift, in windows: shifted by it, and padded with `fill`.

    Each array has as many windows as there are strides in x.
    """
    farthest, counts = windows.whole_strides[-1], windows.counts
    rest = [(far, m - n, 0) for far, m, n in zip(farthest, counts, values.shape[2:], strict=True)]
    wide = lax.pad(values, np.asarray(fill, values.dtype), [(0, 0, 0), (0, 0, 0), *rest])

    def moved(by: tuple[int, ...]) -> Array:
        starts = [far - q for far, q in zip(farthest, by, strict=True)]
        stops = [start + m for start, m in zip(starts, counts, strict=True)]
        return lax.slice(wide, (0, 0, *starts), (*windows.shape[:2], *stops))

    return {by: moved(by) for by in dict.fromkeys(windows.whole_strides)}


def _scatter_sum(given: Callable[[int, tuple[int, ...]], Array], windows: Windows, dtype: np.dtype) -> Array:
    """Compute the adjoint of `Windows.entries`: for each entry of x, the sum of the windows' contributions.

    `given(i, q)` is the windows' contribution to their i-th entries, shifted by q windows; sums have its dtype, and are
    rounded to `dtype` in the end. Entries of x at the same
    position relative to the stride are summed as one array, and only then interleaved: with a pad for each tap, XLA
    would test each number of x against each pad.
    """
    phases: dict[tuple[int, ...], Array] = {}
    for i, (offset, by) in enumerate(zip(windows.offsets, windows.whole_strides, strict=True)):
        place = tuple(o % s for o, s in zip(offset, windows.stride, strict=True))
        phases[place] = phases[place] + given(i, by) if place in phases else given(i, by)
    shape, counts = windows.shape, windows.counts
    nothing = jnp.zeros_like(next(iter(phases.values())))
    places = [max(along) + 1 for along in zip(*phases, strict=True)]  # for windows far from each other there are none
    pieces = [_rounded(phases.get(place, nothing), dtype) for place in product(*map(range, places))]
    for d in reversed(range(len(counts))):
        n, s = places[d], windows.stride[d]
        pieces = [_interleaved(pieces[first : first + n], 2 + d, s) for first in range(0, len(pieces), n)]
    return _from_bits(lax.slice(pieces[0], (0,) * len(shape), shape), dtype)


def _interleaved(pieces: list[Array], axis: int, stride: int) -> Array:
    """Interleave pieces along `axis`: first entries, with zeros up to `stride` entries, then second ones, ..."""
    if stride == 1:
        return pieces[0]
    stacked = jnp.stack(pieces, axis + 1)
    rest = [(0, stride - len(pieces) if d == axis + 1 else 0, 0) for d in range(stacked.ndim)]
    stacked = lax.pad(stacked, jnp.zeros((), stacked.dtype), rest) if len(pieces) < stride else stacked
    return stacked.reshape(*stacked.shape[:axis], stride * stacked.shape[axis], *stacked.shape[axis + 2 :])
