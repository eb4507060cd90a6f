"""Fourier transforms of one worker's block, along dimensions that it holds as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.functional.collectives import accumulation_dtype
from distdl_jax.functional.packing import joined_slices

AT_ONCE = 3
"""Along how many dimensions jax.numpy transforms in one call."""


def as_real(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which data of `dtype` is transformed: inexact, and single precision or more."""
    wide = accumulation_dtype(dtype)
    return wide if jnp.issubdtype(wide, jnp.inexact) else np.dtype(jnp.promote_types(wide, np.float32))


def as_complex(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the frequencies of data of `dtype`."""
    return np.dtype(jnp.promote_types(as_real(dtype), np.complex64))


def real_part(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the real parts of numbers of `dtype`, in which they are transformed."""
    return np.zeros(0, as_complex(dtype)).real.dtype


@dataclass(frozen=True)
class Transform:
    """A transform along dimensions.

    - `sizes`: pairs of a dimension, and its length afterwards.
    - `halved`: the dimension, here or on another grid, of which there are frequencies from 0 on, of real data.
    - `before`: pairs of a dimension, and the length to which it is cut off, or filled up with zeros, at the end, before
      the transform: jnp's `n` and `s`.
    """

    sizes: tuple[tuple[int, int], ...]
    halved: int | None = None
    norm: str | None = None
    before: tuple[tuple[int, int], ...] = ()

    def lengths(self) -> dict[int, int]:
        return dict(self.sizes)

    def _resized(self, x: Array) -> Array:
        for axis, n in self.before:
            x = lax.slice_in_dim(x, 0, min(n, x.shape[axis]), axis=axis)
            x = jnp.pad(x, [(0, n - m if a == axis else 0) for a, m in enumerate(x.shape)])
        return x


@dataclass(frozen=True)
class Forward(Transform):
    """Frequencies along dimensions, of which the lowest are kept: 0, 1, ..., -2, -1."""

    def dtype(self, dtype: np.dtype) -> np.dtype:
        return as_complex(dtype)

    def __call__(self, x: Array) -> Array:
        x = self._resized(x).astype(as_real(np.dtype(x.dtype)))
        sizes = dict(self.sizes)
        axes = [a for a in sizes if a != self.halved]
        if self.halved in sizes and not jnp.iscomplexobj(x):
            others, axes = axes[: AT_ONCE - 1], axes[AT_ONCE - 1 :]
            x = jnp.fft.rfftn(x, axes=(*others, self.halved), norm=self.norm)
        elif self.halved in sizes:
            axes.append(self.halved)
        x = _at_once(jnp.fft.fftn, x, axes, self.norm)
        for a, n in self.sizes:
            x = lowest(x, a, n, from_0=a == self.halved)
        return x


@dataclass(frozen=True)
class Inverse(Transform):
    """The way back from frequencies along dimensions, of which those that were not kept are 0.

    With `halved` the result is real; of its frequencies the length may take fewer than there are.

    - `last`: whether all other dimensions have been transformed when these are.
    """

    last: bool = True

    def dtype(self, dtype: np.dtype) -> np.dtype:
        return real_part(dtype) if self.last and self.halved is not None else as_complex(dtype)

    def __call__(self, x: Array) -> Array:
        x = self._resized(x).astype(as_complex(np.dtype(x.dtype)))
        sizes = dict(self.sizes)
        axes = [a for a in sizes if a != self.halved]
        for a in axes:
            x = with_zeros(x, a, sizes[a])
        if self.halved in sizes and self.last:
            others, last = axes[AT_ONCE - 1 :], (*axes[: AT_ONCE - 1], self.halved)
            x = _at_once(jnp.fft.ifftn, x, others, self.norm)
            real: Array = jnp.fft.irfftn(x, [sizes[a] for a in last], last, self.norm)
            return real
        if self.halved in sizes:
            # Re(sum over all frequencies) = Re(f_0 + 2 f_1 + 2 f_2 + ...), f_{n/2} once, whatever else is transformed.
            n = sizes[self.halved]
            x = lowest(x, self.halved, min(x.shape[self.halved], n // 2 + 1), from_0=True)
            present = x.shape[self.halved]
            times = np.full(present, 2, x.real.dtype)
            times[0] = 1
            if n % 2 == 0 and present == n // 2 + 1:
                times[-1] = 1
            x = x * times.reshape(-1, *(1,) * (x.ndim - self.halved - 1))
            widths = [(0, n - present if a == self.halved else 0) for a in range(x.ndim)]
            x, axes = jnp.pad(x, widths), [*axes, self.halved]
        x = _at_once(jnp.fft.ifftn, x, axes, self.norm)
        return x.real if self.last and self.halved is not None else x


def _at_once(transform: Callable[..., Array], x: Array, axes: list[int], norm: str | None) -> Array:
    for start in range(0, len(axes), AT_ONCE):
        x = transform(x, axes=tuple(axes[start : start + AT_ONCE]), norm=norm)
    return x


def lowest(x: Array, axis: int, n: int, *, from_0: bool = False) -> Array:
    """Return the `n` lowest frequencies of all along `axis`: 0, 1, ..., -1, or, `from_0`, the first n."""
    if n == x.shape[axis]:
        return x
    negative = 0 if from_0 else n // 2
    return joined_slices([(x, 0, n - negative), (x, x.shape[axis] - negative, x.shape[axis])], axis)


def with_zeros(x: Array, axis: int, n: int) -> Array:
    """Return `n` frequencies along `axis`: the lowest from `x`, and the others 0."""
    m = x.shape[axis]
    if n == m:
        return x
    between = jnp.zeros((*x.shape[:axis], n - m, *x.shape[axis + 1 :]), x.dtype)
    return joined_slices([(x, 0, m - m // 2), (between, 0, n - m), (x, m - m // 2, m)], axis)
