"""Pooling over all features at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from distdl_jax.errors import PlanError
from distdl_jax.functional.block_checks import owned_grid
from distdl_jax.functional.plan import BlocksPlan, Computation, ShapeDtypes
from distdl_jax.functional.reductions import plan_reduction
from distdl_jax.nn.base.layer import ParameterFreeLayer
from distdl_jax.nn.shape.resample import check_feature_partitions
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.decomposition import index_of
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import World


@dataclass(frozen=True)
class GlobalPoolPlan(BlocksPlan):
    """A `reduction` of the `inputs` over the features of all workers; the output is the result, or empty."""

    inputs: ShapeDtypes = field(hash=False)
    reduction: Computation

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's block of the output."""
        result, output = self.reduction.run(world, x), self.output(world.rank)
        return result if result.shape == output.shape else tie(jnp.zeros(output.shape, output.dtype), result)


@dataclass(frozen=True)
class _GlobalPool(ParameterFreeLayer):
    """The base of both."""

    op: ClassVar[Literal["mean", "max"]]
    P_x: Partition
    copies: bool = False

    def __post_init__(self) -> None:
        check_feature_partitions(self.P_x)

    @property
    def _features(self) -> tuple[int, ...]:
        return tuple(range(2, self.P_x.dim))

    @property
    def _copied(self) -> tuple[int, ...]:
        return self._features if self.copies else ()

    def _formula(self, params: object, x: Array) -> Array:
        return (jnp.mean if self.op == "mean" else jnp.max)(x, self._features, keepdims=True)

    def _plan(self, x: ShapeDtypes, params: object) -> GlobalPoolPlan:
        extent = owned_grid("x", self.P_x, x).extent
        if 0 in extent[2:]:
            raise PlanError(f"`x` ({shape_text(extent)}) must have features.")
        reduction = plan_reduction(x, self.P_x, self.op, self._features)
        blocks = dict(reduction.outputs)
        if not self.copies:
            for rank, worker in enumerate(self.P_x.ranks):
                ends = [int(i == 0) for i in index_of(rank, self.P_x.shape)[2:]]
                blocks[worker] = ShapeDtype((*blocks[worker].shape[:2], *ends), blocks[worker].dtype)
        return GlobalPoolPlan(blocks, x, reduction)


@dataclass(frozen=True)
class DistributedGlobalAvgPool(_GlobalPool):
    """The mean over all features, N x C x 1 x ... x 1, of a tensor split in any dimensions.

    n_b n_c numbers of the block are summed over the workers along the features. The output is on P_x, so on the first
    of these workers, where `Flatten`, `Repartition` or a linear layer can use it. With `copies` all of them get it, for
    instance to multiply their own features; this is `dj.functional.mean`, whose gradient is the sum of the copies'
    cotangents. The mean of integers is a floating-point number.

    **Arguments:**

    - `P_x`: the partition of input and output, of 3 dimensions or more.
    - `copies`: whether all workers along the features get a copy of the output, not only the first.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([1, 1, 2])
    ...     x = dj.TensorSpec((1, 2, 3), P).block(jnp.arange(6.0).reshape(1, 2, 3))
    ...     return dj.nn.DistributedGlobalAvgPool(P, copies=True)(x).ravel().tolist()
    >>> dj.simulate(2, program)
    [[1.0, 4.0], [1.0, 4.0]]

    Source: PyTorch's AdaptiveAvgPool1d, 2d and 3d, of output size 1.
    """

    op = "mean"


@dataclass(frozen=True)
class DistributedGlobalMaxPool(_GlobalPool):
    """The maximum over all features, N x C x 1 x ... x 1, of a tensor split in any dimensions.

    Like `DistributedGlobalAvgPool`; tied elements share the gradient equally, as in `jnp.max`.

    **Arguments:**

    - `P_x`: the partition of input and output, of 3 dimensions or more.
    - `copies`: whether all workers along the features get a copy of the output, not only the first.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([1, 1, 2])
    ...     x = dj.TensorSpec((1, 2, 3), P).block(jnp.arange(6.0).reshape(1, 2, 3))
    ...     return dj.nn.DistributedGlobalMaxPool(P, copies=True)(x).ravel().tolist()
    >>> dj.simulate(2, program)
    [[2.0, 5.0], [2.0, 5.0]]

    Source: PyTorch's AdaptiveMaxPool1d, 2d and 3d, of output size 1.
    """

    op = "max"
