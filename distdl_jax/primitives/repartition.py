"""Repartition: from one partition of a tensor to another, block by block."""

from __future__ import annotations

from jax import Array

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.partition import Partition, check_partitions
from distdl_jax.plans.broadcasting import shape_text
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.boxes import (
    BoxMovement,
    common_dtype,
    is_differentiable,
    owned_grid,
    run_boxes,
)
from distdl_jax.primitives.handshake import exchange_shape_dtypes, zero_volume_shape


def repartition(x: Array, P_x: Partition, P_y: Partition, *, preserve_batch: bool = True) -> Array:
    """Move a tensor of D dimensions from `P_x` (p_0 x ... x p_{D-1}) to `P_y` (q_0 x ... x q_{D-1}).

    Every worker of P_y gets its balanced block of the tensor: along a dimension of length n over q workers, the first
    n mod q hold one more than the rest. The blocks on P_x may be unbalanced; the same partition twice rebalances
    them, and is the identity, without messages, where they are balanced. From a partition of one worker this is
    scatter, to one it is gather. The adjoint is the movement back, onto the blocks as they were.

    **Arguments:**

    - `x`: this worker's block where it is in P_x: D dimensions, one dtype on all of P_x; workers with the same index
      in a dimension hold the same length there. Blocks may be empty. Elsewhere a zero-volume array, floating or
      complex exactly if the data is.
    - `P_x`, `P_y`: partitions of as many dimensions as the tensor; equal teams, permuted, overlapping or disjoint.
    - `preserve_batch`: whether a zero-volume output keeps the first dimension of the worker's input.

    **Returns:** in P_y the balanced block; in P_x only, a zero-volume array of the data's dtype; in neither, `x`.

    **Raises:** `InvalidArgumentError` where the partitions differ in the number of dimensions; `PlanError`, with a
    list of the shapes, where the blocks don't form a grid.

    Source: DistDL documentation, "repartition"; Hewett and Grady (2020), generalised all-to-all.
    """
    check_partitions(P_x=P_x, P_y=P_y)
    if P_x.dim != P_y.dim:
        raise InvalidArgumentError(
            f"`P_x` ({shape_text(P_x.shape)}) and `P_y` ({shape_text(P_y.shape)}) must have as many dimensions as the "
            "tensor, so both the same number; dimensions of one worker can be added without moving data."
        )
    world = P_x.world
    union = P_x.create_partition_union(P_y)
    if not union.active:
        return x
    team = tuple(sorted(union.ranks))
    purpose = f"repartition from {P_x.describe()} to {P_y.describe()}"
    shape_dtypes = exchange_shape_dtypes(world, team, purpose, "x", x)
    owned = owned_grid("x", P_x, {worker: shape_dtype.shape for worker, shape_dtype in shape_dtypes.items()})
    dtype = common_dtype("x", shape_dtypes, P_x.ranks)
    step = Exchange(owned, ProductGrid.balanced(owned.extent, P_y.shape, P_y.ranks)).plan(world.rank)
    mine = shape_dtypes[world.rank]
    shape = step.out_shape if P_y.active else zero_volume_shape(mine.shape, preserve_batch)
    plan = BoxMovement("repartition", world, team, (step,), mine, ShapeDtype(shape, dtype), is_differentiable(dtype))
    return run_boxes(plan, x)
