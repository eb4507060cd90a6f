"""The placement of a kernel on the data, and the memory order of data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

Pairs = tuple[tuple[int, int], ...]
"""(low, high) for each feature dimension."""


@dataclass(frozen=True)
class Placement:
    """The placement of a kernel on x: stride, zero padding (low, high) and dilation, per feature dimension."""

    stride: tuple[int, ...]
    padding: Pairs
    dilation: tuple[int, ...]

    def reach(self, kernel: Sequence[int]) -> tuple[int, ...]:
        """Return the distance between the first and the last tap."""
        return tuple(dilation * (k - 1) for dilation, k in zip(self.dilation, kernel, strict=True))

    def outputs(self, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """Return the number of outputs along each dimension."""
        return tuple(
            (n + sum(padding) - reach - 1) // stride + 1
            for n, padding, reach, stride in zip(sizes, self.padding, self.reach(kernel), self.stride, strict=True)
        )

    def pairs(self, sizes: Sequence[int], kernel: Sequence[int]) -> int:
        """Return the number of pairs of an output and a tap that meet an entry of the input, not its padding."""
        return math.prod(
            sum(max(0, min(m, (n - 1 + low - d * tap) // s + 1) - max(0, -(-(low - d * tap) // s))) for tap in range(k))
            for n, k, m, s, (low, _), d in zip(
                sizes, kernel, self.outputs(sizes, kernel), self.stride, self.padding, self.dilation, strict=True
            )
        )

    def padding_read(self, sizes: Sequence[int], kernel: Sequence[int], outputs: Sequence[int]) -> Pairs:
        """Return the padding; it is negative if no window reads the last rows."""
        along = zip(self.padding, self.stride, self.reach(kernel), sizes, outputs, strict=True)
        return tuple((low, stride * (m - 1) + reach + 1 - n - low) for (low, _), stride, reach, n, m in along)

    def unpadded(self) -> Placement:
        """Return the same placement on an input that includes its padding."""
        return replace(self, padding=((0, 0),) * len(self.padding))

    def met_by_taps(self, x: Array, kernel: Sequence[int]) -> list[Array]:
        """Return the entries of x that each tap meets, in row-major order: arrays of the outputs' sizes."""
        lengths = [max(s * (m - 1) + 1, 0) for s, m in zip(self.stride, self.outputs(x.shape[2:], kernel), strict=True)]
        x = padded(x, self.padding)
        met = []
        for tap in itertools.product(*map(range, kernel)):
            starts = [dilation * i for dilation, i in zip(self.dilation, tap, strict=True)]
            stops = (start + length for start, length in zip(starts, lengths, strict=True))
            met.append(x[(..., *map(slice, starts, stops, self.stride))])
        return met

    def planes(self, x: Array, taps: int) -> list[Array]:
        """Return, for each of the `taps` along the first dimension, the planes of x that it meets, one per output."""
        x = padded(x, (self.padding[0], *((0, 0),) * (x.ndim - 3)))
        dilation, stride = self.dilation[0], self.stride[0]
        outputs = (x.shape[2] - dilation * (taps - 1) - 1) // stride + 1
        starts = (dilation * i for i in range(taps))
        return [lax.slice_in_dim(x, start, start + stride * (outputs - 1) + 1, stride, axis=2) for start in starts]

    def of_planes(self) -> Placement:
        """Return the same placement without the first dimension."""
        return Placement(self.stride[1:], self.padding[1:], self.dilation[1:])

    def with_row(self) -> Placement:
        """Return the same placement with one more leading dimension, of length one."""
        return Placement((1, *self.stride), ((0, 0), *self.padding), (1, *self.dilation))


def padded(x: Array, padding: Sequence[tuple[int, int]]) -> Array:
    """Return `x` with zeros around the features, or cropped if padding is negative."""
    if not any(map(any, padding)):
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 2 + [(low, high, 0) for low, high in padding])


def channels_first(x: Array, is_weight: bool) -> Array:
    """Return N x features x C as N x C x features, or a weight kernel x C x c_out as c_out x C x kernel."""
    if is_weight:
        return jnp.transpose(x, (x.ndim - 1, x.ndim - 2, *range(x.ndim - 2)))
    return jnp.moveaxis(x, -1, 1)


def channels_last(x: Array, is_weight: bool) -> Array:
    """Return the x of which this is `channels_first(x)`."""
    return jnp.transpose(x, (*range(2, x.ndim), 1, 0)) if is_weight else jnp.moveaxis(x, 1, -1)


def folded(x: Array) -> Array:
    """Return N x C x depth x features as (N depth) x C x features."""
    x = jnp.swapaxes(x, 1, 2)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def unfolded(x: Array, depth: int) -> Array:
    """Return the x of which this is `folded(x)`."""
    return jnp.swapaxes(x.reshape(len(x) // depth, depth, *x.shape[1:]), 1, 2)


@jax.jit  # without it, untraced inputs must be JAX arrays: numpy's would be rejected
def row_major(x: Array) -> Array:
    """Write `x` in row-major order before it is used, and its cotangent likewise.

    XLA gives the output of a convolution the order that the convolution prefers, and operations fused with it inherit
    that: slices and reductions of such an array can take ten times as long. It also fuses a transposition with the
    following work into one loop, which can take five times as long as the two.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def between_layers(x: Array) -> Array:
    """Return `row_major(x)` on a CPU, where layers use that order; elsewhere leave the choice to the compiler."""
    return row_major(x) if jax.default_backend() == "cpu" else x
