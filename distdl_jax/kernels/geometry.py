"""How a kernel lies on the data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.plans.windows import Pairs


@dataclass(frozen=True)
class Placement:
    """How a kernel lies on x: stride, zero padding (low, high) and dilation, one entry for each feature dimension."""

    stride: tuple[int, ...]
    padding: Pairs
    dilation: tuple[int, ...]

    def reach(self, kernel: Sequence[int]) -> tuple[int, ...]:
        """How far the first and the last tap are apart."""
        return tuple(dilation * (k - 1) for dilation, k in zip(self.dilation, kernel, strict=True))

    def outputs(self, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """The number of outputs along each dimension."""
        return tuple(
            (n + sum(padding) - reach - 1) // stride + 1
            for n, padding, reach, stride in zip(sizes, self.padding, self.reach(kernel), self.stride, strict=True)
        )

    def padding_read(self, sizes: Sequence[int], kernel: Sequence[int], outputs: Sequence[int]) -> Pairs:
        """The padding, less than none where there are rows at the end that no window reads."""
        along = zip(self.padding, self.stride, self.reach(kernel), sizes, outputs, strict=True)
        return tuple((low, stride * (m - 1) + reach + 1 - n - low) for (low, _), stride, reach, n, m in along)

    def of_input_gradient(self, sizes: Sequence[int], kernel: Sequence[int], outputs: Sequence[int]) -> Placement:
        """With stride 1: how the reversed kernel lies on the result's cotangent, for the gradient of an input."""
        along = zip(self.reach(kernel), self.padding, sizes, outputs, strict=True)
        return replace(self, padding=tuple((reach - low, n - m + low) for reach, (low, _), n, m in along))

    def unpadded(self) -> Placement:
        """The same on an input that has its padding."""
        return replace(self, padding=((0, 0),) * len(self.padding))

    def met_by_taps(self, x: Array, kernel: Sequence[int]) -> list[Array]:
        """For each tap of the kernel, in row-major order, what of x it meets: an array of the outputs' sizes."""
        lengths = [s * (m - 1) + 1 for s, m in zip(self.stride, self.outputs(x.shape[2:], kernel), strict=True)]
        x = padded(x, self.padding)
        met = []
        for tap in itertools.product(*map(range, kernel)):
            starts = [dilation * i for dilation, i in zip(self.dilation, tap, strict=True)]
            stops = (start + length for start, length in zip(starts, lengths, strict=True))
            met.append(x[(..., *map(slice, starts, stops, self.stride))])
        return met

    def with_row(self) -> Placement:
        """The same with one more dimension, in front, of which there is one row."""
        return Placement((1, *self.stride), ((0, 0), *self.padding), (1, *self.dilation))


def padded(x: Array, padding: Sequence[tuple[int, int]]) -> Array:
    """`x` with zeros around it along the features, or with so much less of it."""
    if not any(map(any, padding)):
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 2 + [(low, high, 0) for low, high in padding])
