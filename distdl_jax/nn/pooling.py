"""Distributed max and average pooling."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.lib.stride_tricks import sliding_window_view

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.nn.layer import ParameterFreeLayer
from distdl_jax.nn.local.pool import Window, largest, least, total
from distdl_jax.nn.windows import Pairs, SlidingPlan, SlidingWindows, padding_pairs, per_feature
from distdl_jax.partition import Partition
from distdl_jax.plans.broadcasting import shape_text
from distdl_jax.plans.decomposition import index_of
from distdl_jax.primitives.handshake import exchange_shape_dtypes
from distdl_jax.primitives.tie import tie

Sizes = int | tuple[int, ...]


@dataclass(frozen=True)
class DistributedPool(ParameterFreeLayer):
    """A pooling over windows of a tensor whose batch, channels and features may all be split.

    With P_x of shape P_n x P_c x P_{D-1} x ... x P_0 and x of n_b x n_c x n_{D-1} x ... x n_0, the output has
    floor((n + low + high - dilation * (kernel - 1) - 1) / stride) + 1 entries along each feature dimension, in
    balanced blocks on P_x. Only the feature dimensions need their neighbours' data. Blocks of x may be unbalanced,
    empty, or smaller than the kernel. Use the classes for 1, 2 or 3 dimensions.

    **Arguments:**

    - `P_x`: the partition of input and output.
    - `kernel_size`, `stride`: an integer, or one for each feature dimension. The stride is the kernel size by default.
    - `padding`: as in the convolutions, "same" excepted where the stride is not 1.

    A pooling has no parameters: call it with the input alone, or with `{}` and the input.

    **Raises:** `InvalidArgumentError`, on every worker, where arguments don't fit; when applied, `PlanError` where x
    doesn't.

    Source: DistDL documentation, "convolution" (windows); Hewett and Grady (2020), pooling layers.
    """

    dims: ClassVar[int]

    P_x: Partition
    kernel_size: Sizes
    stride: Sizes | None = None
    padding: int | str | tuple[int | tuple[int, int], ...] = 0

    def __post_init__(self) -> None:
        kernel = per_feature("kernel_size", self.kernel_size, self.dims)
        stride = kernel if self.stride is None else per_feature("stride", self.stride, self.dims)
        padding = padding_pairs(self.padding, kernel, stride, self._dilation)
        for name, value in (("kernel_size", kernel), ("stride", stride), ("padding", padding)):
            object.__setattr__(self, name, value)
        windows = self._windows
        if not isinstance(self.P_x, Partition):
            raise InvalidTypeError(f"`P_x` (={self.P_x!r}) must be a partition.")
        if self.P_x.dim != self.dims + 2:
            raise InvalidArgumentError(
                f"`P_x` ({shape_text(self.P_x.shape)}) must have {self.dims + 2} dimensions: batch, channels, and "
                f"{self.dims} of features."
            )
        for k, d, pair in zip(windows.kernel, windows.dilation, windows.padding, strict=True):
            if max(pair) > d * (k - 1):
                raise InvalidArgumentError(
                    f"`padding` (={windows.padding}) must be at most {d * (k - 1)} where the kernel is {k} and the "
                    f"dilation {d}, or windows would hold padding alone."
                )

    @property
    def _dilation(self) -> tuple[int, ...]:
        return (1,) * self.dims

    @cached_property
    def _windows(self) -> SlidingWindows:
        return SlidingWindows(self.kernel_size, self.stride, self._dilation, self.padding)  # type: ignore[arg-type]

    @property
    def _window(self) -> Window:
        return Window(self._windows.kernel, self._windows.stride, self._windows.dilation)

    def _apply(self, x: Array) -> Array:
        """This worker's block of the output, from its block on P_x; outside P_x, `x`."""
        if self.P_x.rank is None:
            return x
        with jax.named_scope(type(self).__name__):
            purpose = f"{type(self).__name__} on {self.P_x.describe()}, kernel {self.kernel_size}"
            shape_dtypes = exchange_shape_dtypes(self.P_x.world, tuple(sorted(self.P_x.ranks)), purpose, "x", x)
            plan = SlidingPlan(self.P_x, self._windows, shape_dtypes)
            index = index_of(self.P_x.rank, self.P_x.shape)[2:]
            block = plan.exchange(x)
            counts = [stop - start for start, stop in plan.outputs(index)]
            shape = (*block.shape[:2], *counts)
            if 0 in shape:
                return tie(jnp.zeros(shape, x.dtype), block)
            return self._pool(block, plan.padding(index))

    @abstractmethod
    def _pool(self, x: Array, padding: Pairs) -> Array:
        """The windows of this worker's outputs, over the block that they read and the `padding` around it."""


def _padded(x: Array, value: np.ndarray, padding: Pairs) -> Array:
    if not any(map(any, padding)):
        return x
    return lax.pad(x, value, [(0, 0, 0), (0, 0, 0), *((low, high, 0) for low, high in padding)])


@dataclass(frozen=True)
class DistributedMaxPool(DistributedPool):
    """`DistributedPool` that takes the maximum of each window; `dilation` spreads a window's entries, as in PyTorch."""

    dilation: Sizes = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "dilation", per_feature("dilation", self.dilation, self.dims))
        super().__post_init__()

    @property
    def _dilation(self) -> tuple[int, ...]:
        return per_feature("dilation", self.dilation, self.dims)

    def _pool(self, x: Array, padding: Pairs) -> Array:
        return largest(_padded(x, least(x.dtype), padding), self._window)


@dataclass(frozen=True)
class DistributedAvgPool(DistributedPool):
    """`DistributedPool` that takes the mean of each window, of its entries inside the tensor or, with
    `count_include_pad`, the padding's zeros too, as in PyTorch."""

    count_include_pad: bool = True

    def _pool(self, x: Array, padding: Pairs) -> Array:
        sums = total(_padded(x, np.zeros((), x.dtype), padding), self._window)
        if self.count_include_pad:
            return sums / math.prod(self._windows.kernel)
        return sums / self._entries(x.shape[2:], padding).astype(x.dtype)

    def _entries(self, shape: Sequence[int], padding: Pairs) -> np.ndarray:
        """How many entries of each window over a block with the features' `shape` are not `padding`."""
        counts = np.ones((1,) * (self.dims + 2))
        for d, (n, (low, high)) in enumerate(zip(shape, padding, strict=True)):
            inside = np.pad(np.ones(n), (low, high))
            along = sliding_window_view(inside, self._windows.kernel[d])[:: self._windows.stride[d]].sum(axis=1)
            counts = counts * along.reshape(-1, *(1,) * (self.dims - d - 1))
        return counts


class DistributedMaxPool1d(DistributedMaxPool):
    """`DistributedMaxPool` of N x C x n_0 tensors."""

    dims = 1


class DistributedMaxPool2d(DistributedMaxPool):
    """`DistributedMaxPool` of N x C x n_1 x n_0 tensors."""

    dims = 2


class DistributedMaxPool3d(DistributedMaxPool):
    """`DistributedMaxPool` of N x C x n_2 x n_1 x n_0 tensors."""

    dims = 3


class DistributedAvgPool1d(DistributedAvgPool):
    """`DistributedAvgPool` of N x C x n_0 tensors."""

    dims = 1


class DistributedAvgPool2d(DistributedAvgPool):
    """`DistributedAvgPool` of N x C x n_1 x n_0 tensors."""

    dims = 2


class DistributedAvgPool3d(DistributedAvgPool):
    """`DistributedAvgPool` of N x C x n_2 x n_1 x n_0 tensors."""

    dims = 3
