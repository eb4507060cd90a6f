"""Max and average pooling over 1 to 4 feature dimensions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.lib.stride_tricks import sliding_window_view

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.plan import Plan, ShapeDtypes
from distdl_jax.functional.sliding_windows import WindowsPlan, plan_windows
from distdl_jax.kernels.dtypes import extreme, mean_dtype
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.pooling import max_pool, sum_pool
from distdl_jax.nn.base.dimensions import in_dimensions
from distdl_jax.nn.base.input_checks import check_features
from distdl_jax.nn.base.layer import ParameterFreeLayer
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.alike import derived
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.windows import Pairs, WindowSpec, window_spec
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import Workers
from distdl_jax.validation import Padding, Sizes


def check_ordered(dtype: np.dtype) -> None:
    """Reject data without an order."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise PlanError(f"`x` must hold real numbers, which have an order, but is {dtype}.")


@dataclass(frozen=True)
class PoolingPlan(Plan):
    """The plan of a pooling.

    - `fetch`: gives each worker the entries that its windows read.
    - `dtype`: of the output.
    - `takes_largest`: whether it is max pooling, whose derivative depends on x.
    """

    fetch: WindowsPlan
    dtype: np.dtype
    takes_largest: bool

    @property
    def workers(self) -> Workers:
        return self.fetch.workers

    def output(self, worker: int) -> ShapeDtype:
        counts = self.fetch.output_counts(self.fetch.index(worker))
        return ShapeDtype((*self.fetch.output(worker).shape[:2], *counts), self.dtype)

    @property
    def outputs(self) -> ShapeDtypes:
        return derived(self.output, self.fetch.alike)

    def padding(self, worker: int) -> Pairs:
        """Return the padding (low, high) around the block that `worker` fetches, per feature dimension."""
        return self.fetch.padding(self.fetch.index(worker))


@dataclass(frozen=True)
class DistributedPool(ParameterFreeLayer):
    """The base of the poolings, of any number of dimensions; see `DistributedMaxPool2d` and `DistributedAvgPool2d`.

    - `dims`: the number of feature dimensions."""

    dims: ClassVar[int]

    P_x: Partition
    kernel_size: Sizes
    stride: Sizes | None = None
    padding: Padding = 0

    def __post_init__(self) -> None:
        windows = self._windows
        # The fields, normalised so that equal layers compare equal.
        self._store(kernel_size=windows.kernel, stride=windows.stride, padding=windows.padding)
        check_features(self.P_x, self.dims)
        for k, d, pair in zip(windows.kernel, windows.dilation, windows.padding, strict=True):
            if max(pair) > d * (k - 1):
                raise InvalidArgumentError(
                    f"`padding` (={windows.padding}) must be at most {d * (k - 1)} for a kernel of {k} and a dilation "
                    f"of {d}, or windows would hold only padding."
                )

    @cached_property
    def _windows(self) -> WindowSpec:
        stride = self.kernel_size if self.stride is None else self.stride
        return window_spec(self.dims, self.kernel_size, stride, self.padding, self._dilation)

    @property
    def _dilation(self) -> Sizes:
        return 1

    def _plan(self, x: ShapeDtypes, params: object) -> PoolingPlan:
        fetch = plan_windows(x, self.P_x, self._windows)
        return PoolingPlan(fetch, self._dtype(fetch.movement.dtype), isinstance(self, DistributedMaxPool))

    def _run(self, plan: PoolingPlan, params: object, x: Array) -> Array:
        world = self.P_x.world
        block, output = plan.fetch.run(world, x), plan.output(world.rank)
        if output.size == 0:
            return tie(jnp.zeros(output.shape, output.dtype), block)
        placement = plan.fetch.placement(plan.fetch.index(world.rank))
        return self._pool(block, placement).astype(output.dtype)

    def _over_windows(self, x: Array, start: Any, operation: Callable[..., Array]) -> Array:
        """Return an operation over the windows of a whole array."""
        windows, ones = self._windows, (1, 1)
        options = (*ones, *windows.kernel), (*ones, *windows.stride), ((0, 0), (0, 0), *windows.padding)
        return lax.reduce_window(x, start, operation, *options, window_dilation=(*ones, *windows.dilation))

    def _dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype of the output, from the dtype of x."""
        return dtype

    @abstractmethod
    def _pool(self, x: Array, placement: Placement) -> Array:
        """Pool the block `x`, with windows at the given `placement`."""


@dataclass(frozen=True)
class DistributedMaxPool(DistributedPool):
    """The base of the max poolings."""

    dilation: Sizes = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._store(dilation=self._windows.dilation)

    @property
    def _dilation(self) -> Sizes:
        return self.dilation

    def _dtype(self, dtype: np.dtype) -> np.dtype:
        check_ordered(dtype)
        return dtype

    def _formula(self, params: object, x: Array) -> Array:
        start = extreme(self._dtype(np.dtype(x.dtype)), largest=False)
        return self._over_windows(x, np.asarray(start, x.dtype), lax.max)

    def _pool(self, x: Array, placement: Placement) -> Array:
        return max_pool(x, self._windows.kernel, placement)


@dataclass(frozen=True)
class DistributedAvgPool(DistributedPool):
    """The base of the average poolings."""

    count_include_pad: bool = True

    def _dtype(self, dtype: np.dtype) -> np.dtype:
        return mean_dtype(dtype)

    def _formula(self, params: object, x: Array) -> Array:
        x = x.astype(mean_dtype(np.dtype(x.dtype)))
        zero = np.zeros((), x.dtype)
        counts: Any = math.prod(self._windows.kernel)
        if not self.count_include_pad:
            counts = self._over_windows(jnp.ones((1, 1, *x.shape[2:]), x.dtype), zero, lax.add)
        return self._over_windows(x, zero, lax.add) / counts

    def _pool(self, x: Array, placement: Placement) -> Array:
        x = x.astype(mean_dtype(np.dtype(x.dtype)))  # a sum of bytes may not fit in a byte
        sums = sum_pool(x, self._windows.kernel, placement)
        if self.count_include_pad:
            return sums / math.prod(self._windows.kernel)
        return sums / self._entries(x.shape[2:], placement.padding).astype(sums.dtype)

    def _entries(self, shape: Sequence[int], padding: Pairs) -> np.ndarray:
        """Count the entries of each window that are not `padding`, over a block with the features' `shape`."""
        counts = np.ones((1,) * (self.dims + 2))
        for d, (n, (low, high)) in enumerate(zip(shape, padding, strict=True)):
            inside = np.pad(np.ones(n), (low, high))
            along = sliding_window_view(inside, self._windows.kernel[d])[:: self._windows.stride[d]].sum(axis=1)
            counts = counts * along.reshape(-1, *(1,) * (self.dims - d - 1))
        return counts


_POOL = """
    y[n, c, j] = $formula

| tensor | global shape | partition |
|---|---|---|
| x | n_b x n_c x $n | P_x: P_n x P_c x $P |
| y | n_b x n_c x $m | P_x |

Along each feature dimension m = floor((n + low + high - $extent) / stride) + 1. Batch, channels and features may all be
split; along split features halos are exchanged, with any number of neighbours. Blocks of x may be uneven, empty, or
smaller than the kernel; blocks of y are balanced along the features. y has the dtype of x$dtype. A worker outside P_x
passes a zero-volume tensor, and gets it back.

A pooling has no parameters: call it with the input only, or with `{}` and the input.

**Arguments:**

- `P_x`: the partition of x and y.
- `kernel_size`: an integer, or one for each feature dimension.
- `stride`: an integer, or one for each feature dimension. Default: the kernel size.
- `padding`: an integer, one for each feature dimension, a list with a pair (low, high) for each, "same" (with a stride
  of 1) or "valid"; less than the extent of a window.
$argument

**Raises:** on every worker, `InvalidArgumentError` if arguments are invalid$flags. When applied, `PlanError` if x
doesn't fit.

>>> import distdl_jax as dj
>>> P = dj.planning_world(4).grid([1, 1, $grid])
>>> layer = $name(P, kernel_size=2)
>>> layer.output_spec(dj.TensorSpec((5, 3, $lengths), P)).block_shapes
$blocks

Source: DistDL documentation, "convolution" (windows); Hewett and Grady (2020), pooling layers.
"""
_BLOCKS = (
    "{0: (5, 3, 1), 1: (5, 3, 1), 2: (5, 3, 1), 3: (5, 3, 1)}",
    "{0: (5, 3, 2, 2), 1: (5, 3, 2, 2), 2: (5, 3, 2, 2), 3: (5, 3, 2, 2)}",
    "{0: (5, 3, 2, 2, 2), 1: (5, 3, 2, 2, 2), 2: (5, 3, 2, 2, 2), 3: (5, 3, 2, 2, 2)}",
    "{0: (5, 3, 2, 4, 1, 3), 1: (5, 3, 2, 4, 1, 3), 2: (5, 3, 2, 4, 1, 3), 3: (5, 3, 2, 4, 1, 3)}",
)
_max_pool = in_dimensions(
    _POOL,
    formula="max over t of x[n, c, stride j + dilation t - low]",
    extent="dilation (kernel - 1) - 1",
    dtype=", which is real",
    argument="- `dilation`: an integer, or one for each feature dimension: the distance between entries of a window.",
    flags="",
    blocks=_BLOCKS,
)
_avg_pool = in_dimensions(
    _POOL,
    formula="mean over t of x[n, c, stride j + t - low]",
    extent="kernel",
    dtype="; for integers it is a floating-point number",
    argument="""
- `count_include_pad`: whether zeros of the padding count in the mean, as in PyTorch; otherwise it is the mean of the
  entries inside the tensor.
""",
    flags="; `InvalidTypeError` if a flag is not True or False",
    blocks=_BLOCKS,
)


@_max_pool
class DistributedMaxPool1d(DistributedMaxPool):
    """A max pooling over 1 feature dimension of a split tensor: PyTorch's MaxPool1d, block for block."""

    dims = 1


@_max_pool
class DistributedMaxPool2d(DistributedMaxPool):
    """A max pooling over 2 feature dimensions of a split tensor: PyTorch's MaxPool2d, block for block."""

    dims = 2


@_max_pool
class DistributedMaxPool3d(DistributedMaxPool):
    """A max pooling over 3 feature dimensions of a split tensor: PyTorch's MaxPool3d, block for block."""

    dims = 3


@_max_pool
class DistributedMaxPool4d(DistributedMaxPool):
    """A max pooling over 4 feature dimensions of a split tensor, e.g. space and time."""

    dims = 4


@_avg_pool
class DistributedAvgPool1d(DistributedAvgPool):
    """An average pooling over 1 feature dimension of a split tensor: PyTorch's AvgPool1d, block for block."""

    dims = 1


@_avg_pool
class DistributedAvgPool2d(DistributedAvgPool):
    """An average pooling over 2 feature dimensions of a split tensor: PyTorch's AvgPool2d, block for block."""

    dims = 2


@_avg_pool
class DistributedAvgPool3d(DistributedAvgPool):
    """An average pooling over 3 feature dimensions of a split tensor: PyTorch's AvgPool3d, block for block."""

    dims = 3


@_avg_pool
class DistributedAvgPool4d(DistributedAvgPool):
    """An average pooling over 4 feature dimensions of a split tensor, e.g. space and time."""

    dims = 4
