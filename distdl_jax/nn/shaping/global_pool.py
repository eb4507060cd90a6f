"""Pooling over all features at once."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import PlanError
from distdl_jax.kernels.pooling import least
from distdl_jax.layer.layer import ParameterFreeLayer
from distdl_jax.nn.pooling import check_ordered
from distdl_jax.nn.shaping.resample import check_feature_partitions
from distdl_jax.partition import Partition
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.all_reduce import plan_all_reduce
from distdl_jax.primitives.block_checks import common_dtype, owned_grid
from distdl_jax.primitives.collectives import accumulation_dtype, mean_dtype
from distdl_jax.primitives.plan import BlocksPlan, ShapeDtypes
from distdl_jax.tracing.materialize import materialize
from distdl_jax.tracing.tie import tie
from distdl_jax.world import World


@dataclass(frozen=True)
class GlobalPoolPlan(BlocksPlan):
    """A reduction over the features of all workers; the output, one long there, is a block on the first of them.

    - `count`: the number of features. - `reduction`: the plan that reduces the workers' own reductions.
    """

    count: int
    reduction: Any

    def finish(self, world: World, mine: Array) -> Array:
        """Return the output, from what this worker's features reduce to, n x c."""
        total, output = self.reduction.run(world, mine), self.output(world.rank)
        if output.size == 0:
            return tie(jnp.zeros(output.shape, output.dtype), total)
        return total.reshape(output.shape).astype(output.dtype)


class _GlobalPool(ParameterFreeLayer):
    """The base of both."""

    op: ClassVar[Literal["sum", "max"]]
    P_x: Partition

    def _plan(self, x: ShapeDtypes, params: object) -> GlobalPoolPlan:
        dtype, grid = common_dtype("x", x, self.P_x.ranks), owned_grid("x", self.P_x, x)
        if 0 in grid.extent[2:]:
            raise PlanError(f"`x` must have features, but is {dtype}{list(grid.extent)}.")
        wide, output = self._dtypes(dtype)
        blocks = {worker: ShapeDtype(block.shape[:2], wide) for worker, block in x.items()}
        reduction = plan_all_reduce(blocks, self.P_x, self.op, tuple(range(2, self.P_x.dim)))
        blocks = {
            worker: ShapeDtype((*x[worker].shape[:2], *(int(i == 0) for i in grid.index(cell)[2:])), output)
            for worker, cell in grid.cell_of.items()
        }
        return GlobalPoolPlan(blocks, math.prod(grid.extent[2:]), reduction)

    def _run(self, plan: GlobalPoolPlan, params: object, x: Array) -> Array:
        block = self._own(x, tuple(range(2, x.ndim)), plan.count)
        return plan.finish(self.P_x.world, block)

    @abstractmethod
    def _dtypes(self, dtype: np.dtype) -> tuple[np.dtype, np.dtype]:
        """Return the dtypes of the reduction and of the output, from the dtype of x."""

    @abstractmethod
    def _own(self, x: Array, axes: tuple[int, ...], count: int) -> Array:
        """Reduce this worker's features, to n x c; the whole tensor has `count` features."""


@dataclass(frozen=True)
class DistributedGlobalAvgPool(_GlobalPool):
    """The mean over all features, N x C x 1 x ... x 1, of a tensor of which everything may be split.

    n_b n_c numbers of the block are summed over the workers along the features. The output is on P_x, so on the first
    of these; `Flatten`, `Repartition` or a linear layer take it from there. The mean of integers is a floating-point
    number.

    **Arguments:** `P_x`: the partition of input and output, of 3 dimensions or more.

    Source: PyTorch's AdaptiveAvgPool1d, 2d and 3d, of output size 1.
    """

    op = "sum"
    P_x: Partition

    def __post_init__(self) -> None:
        check_feature_partitions(self.P_x)

    def _dtypes(self, dtype: np.dtype) -> tuple[np.dtype, np.dtype]:
        mean = mean_dtype(dtype)
        return accumulation_dtype(mean), mean

    def _own(self, x: Array, axes: tuple[int, ...], count: int) -> Array:
        wide, _ = self._dtypes(np.dtype(x.dtype))
        return jnp.sum(x, axes, dtype=wide) / np.asarray(count, wide)


@dataclass(frozen=True)
class DistributedGlobalMaxPool(_GlobalPool):
    """The largest of all features, N x C x 1 x ... x 1, of a tensor of which everything may be split.

    As `DistributedGlobalAvgPool`; elements that tie share the gradient equally within a worker's block, and workers
    share it equally.

    **Arguments:** `P_x`: the partition of input and output, of 3 dimensions or more.

    Source: PyTorch's AdaptiveMaxPool1d, 2d and 3d, of output size 1.
    """

    op = "max"
    P_x: Partition

    def __post_init__(self) -> None:
        check_feature_partitions(self.P_x)

    def _dtypes(self, dtype: np.dtype) -> tuple[np.dtype, np.dtype]:
        check_ordered(dtype)
        return dtype, dtype

    def _own(self, x: Array, axes: tuple[int, ...], count: int) -> Array:
        if not x.size:
            return tie(jnp.full(x.shape[:2], least(np.dtype(x.dtype)), x.dtype), x)
        rows = x.reshape(*x.shape[:2], -1)
        return _largest(rows) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.max(rows, 2)


@jax.custom_jvp
def _largest(x: Array) -> Array:
    """Return the largest element of each row of n x c x features."""
    return jnp.max(x, 2)


@_largest.defjvp
def _largest_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Share the cotangent equally between elements that tie."""
    # XLA may compute x twice, rounded in two ways, and then none is as large as the largest, where the derivative of
    # jnp.max divides by 0: so the first one counts in any case.
    (x,), (dx,) = primals, tangents
    y = _largest(x)
    first = jnp.arange(x.shape[2]) == jnp.argmax(x, 2, keepdims=True)
    are_largest = materialize((x == y[..., None]) | first).astype(x.dtype)
    return y, jnp.sum(dx * are_largest, 2) / jnp.sum(are_largest, 2)
