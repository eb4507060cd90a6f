"""One worker's convolution as a value, and XLA's convolution, called in a way that is correct on CPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.kernels.geometry import Placement, folded, unfolded
from distdl_jax.settings import current_settings

Direction = Literal["forward", "input_gradient", "weight_gradient"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

Shape = tuple[int, ...]

MOST_DIMS = 3
"""The largest number of feature dimensions for which XLA calls libraries."""


@dataclass(frozen=True)
class Problem:
    """One worker's convolution.

    - `x`, `weight`: the shapes, N x C x features and c_out x C/groups x kernel.
    """

    x: Shape
    weight: Shape
    window: Placement
    groups: int
    dtype: str
    channels_last: bool = False
    fast_math: bool = False

    @property
    def dims(self) -> int:
        """The number of feature dimensions."""
        return len(self.x) - 2

    @property
    def y(self) -> Shape:
        """The shape of the result."""
        outputs = self.window.outputs(self.x[2:], self.weight[2:])
        return self.x[0], self.weight[0], *(max(n, 0) for n in outputs)

    @property
    def is_empty(self) -> bool:
        """Whether the result has no entries, or there are no channels or taps."""
        return 0 in (*self.y, *self.weight, self.x[1])

    @property
    def flops(self) -> int:
        """Multiplications and additions in one direction, without those on padding."""
        if self.is_empty:
            return 0
        pairs = self.window.pairs(self.x[2:], self.weight[2:])
        return 2 * self.x[0] * math.prod(self.weight[:2]) * pairs

    @property
    def has_choice(self) -> bool:
        """Whether there is a choice of algorithms: on CPUs, unless it is empty or of integers."""
        fast = current_settings().fast_convolutions and jax.default_backend() == "cpu"
        return fast and jnp.issubdtype(self.dtype, jnp.inexact) and 0 not in (*self.x, *self.weight, *self.y)


def conv(
    x: Array,
    kernel: Array,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    *,
    x_dilation: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    groups: int = 1,
    channels_last: bool = False,
) -> Array:
    """Return XLA's convolution, `lax.conv_general_dilated`, of N x C x features with c_out x C/groups x kernel.

    - `channels_last`: N x features x C with kernel x C/groups x c_out.

    All convolutions of the library use this function. XLA's kernel for CPUs reads out of bounds if padding is negative
    at the low end and positive at the high end (openxla/xla#48713), and so do JAX's gradients if there is more padding
    than the kernel's reach. So the excess is padded, or cropped, beforehand. A convolution of four feature dimensions
    is a sum of three-dimensional ones, since no library that XLA calls supports four.
    """
    first, sizes = (1, kernel.shape[:-2]) if channels_last else (2, kernel.shape[2:])
    ones = (1,) * len(sizes)
    dilation, x_dilation = dilation or ones, x_dilation or ones
    if len(sizes) > MOST_DIMS and not channels_last:
        return _by_planes(x, kernel, Placement(tuple(stride), tuple(padding), tuple(dilation)), x_dilation, groups)
    before, left, spread = [(0, 0, 0)] * x.ndim, [], []
    along = zip(padding, sizes, stride, dilation, x_dilation, x.shape[first:], strict=False)
    for axis, ((low, high), taps, step, d, between, n) in enumerate(along, first):
        reach, n = d * (taps - 1), between * (n - 1) + 1 if n else 0
        if (outputs := (n + low + high - reach - 1) // step + 1) > 0:
            high = step * (outputs - 1) + reach + 1 - n - low  # up to the last entry read
        in_conv = min(max(low, 0), reach), min(max(high, 0), reach)
        if in_conv != (low, high):
            before[axis] = (low - in_conv[0], high - in_conv[1], between - 1)
        left.append(in_conv)
        spread.append(between if in_conv == (low, high) else 1)
    if any(map(any, before)):
        x = lax.pad(x, jnp.zeros((), x.dtype), before)
    features = "DHW"[-len(sizes) :]
    last = (f"N{features}C", f"{features}IO", f"N{features}C")
    return lax.conv_general_dilated(
        x,
        kernel,
        stride,
        left,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        dimension_numbers=last if channels_last else None,
        feature_group_count=groups,
    )


def _by_planes(x: Array, kernel: Array, window: Placement, x_dilation: Sequence[int], groups: int) -> Array:
    """Sum convolutions of one dimension less, one for each tap along the first dimension."""
    between = [(0, 0, x_dilation[0] - 1 if axis == 2 else 0) for axis in range(x.ndim)]
    x = lax.pad(x, jnp.zeros((), x.dtype), between) if x_dilation[0] > 1 else x
    planes, of_planes = window.planes(x, kernel.shape[2]), window.of_planes()

    def of_tap(tap: int) -> Array:
        return conv(
            folded(planes[tap]),
            kernel[:, :, tap],
            of_planes.stride,
            of_planes.padding,
            x_dilation=x_dilation[1:],
            dilation=of_planes.dilation,
            groups=groups,
        )

    return unfolded(reduce(jnp.add, map(of_tap, range(len(planes)))), planes[0].shape[2])
