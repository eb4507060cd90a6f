"""All-gather and reduce-scatter along dimensions of a partition: each other's adjoint."""

from __future__ import annotations

from collections.abc import Sequence

from jax import Array

from distdl_jax.errors import PlanError
from distdl_jax.partition import Partition, check_partitions
from distdl_jax.plans.broadcasting import reduction_team
from distdl_jax.plans.decomposition import ProductGrid, Range, balanced_ranges, index_of
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.boxes import (
    BoxMovement,
    checked_axes,
    common_dtype,
    is_differentiable,
    owned_grid,
    run_boxes,
)
from distdl_jax.primitives.handshake import exchange_shape_dtypes


def all_gather(x: Array, P_x: Partition, axes: int | Sequence[int]) -> Array:
    """Give every worker the blocks of all workers along `axes`, put side by side.

    With P_x of shape p_0 x ... x p_{D-1} and a tensor of n_0 x ... x n_{D-1}, the result has the whole n_d in the
    dimensions of `axes`, and this worker's own block in the others. The adjoint sums the cotangents of the copies
    back onto the blocks: `reduce_scatter`, onto blocks of the sizes that they had.

    **Arguments:**

    - `x`: this worker's block, of D dimensions; blocks may be uneven and empty. Zero-volume outside P_x.
    - `P_x`: the partition.
    - `axes`: the dimensions to gather along.

    **Returns:** the gathered block; outside P_x, `x`.

    **Raises:** `InvalidArgumentError` for a dimension that P_x doesn't have; `PlanError` where the blocks of the
    workers that gather together don't form a grid.

    Source: Hewett and Grady (2020); the newer DistDL's layer of the same name.
    """
    check_partitions(P_x=P_x)
    gathered = checked_axes(axes, P_x.dim)
    if not P_x.active:
        return x
    purpose = f"all_gather along {gathered} on {P_x.describe()}"
    shape_dtypes = exchange_shape_dtypes(P_x.world, P_x.ranks, purpose, "x", x)
    owned = owned_grid("x", P_x, {worker: shape_dtype.shape for worker, shape_dtype in shape_dtypes.items()})
    return _run("all_gather", x, P_x, gathered, owned, shape_dtypes)


def reduce_scatter(x: Array, P_x: Partition, axes: int | Sequence[int]) -> Array:
    """Sum the workers' blocks along `axes`, and leave each worker its balanced block of the sum.

    With P_x of shape p_0 x ... x p_{D-1}: the workers that agree in every index outside `axes` hold terms of the same
    shape; each gets, of their sum, its balanced block along every dimension of `axes`. The adjoint is `all_gather`.

    **Arguments:**

    - `x`: this worker's term, of D dimensions. Zero-volume outside P_x. Half precisions are summed in float32.
    - `P_x`: the partition.
    - `axes`: the dimensions to sum, and to scatter, along.

    **Returns:** this worker's block of the sum; outside P_x, `x`.

    **Raises:** `InvalidArgumentError` for a dimension that P_x doesn't have; `PlanError` where the terms of a sum
    differ in shape.

    Source: Hewett and Grady (2020); the newer DistDL's layer of the same name.
    """
    check_partitions(P_x=P_x)
    scattered = checked_axes(axes, P_x.dim)
    if not P_x.active:
        return x
    purpose = f"reduce_scatter along {scattered} on {P_x.describe()}"
    shape_dtypes = exchange_shape_dtypes(P_x.world, P_x.ranks, purpose, "x", x)
    blocks = owned_grid("x", P_x, {worker: shape_dtype.shape for worker, shape_dtype in shape_dtypes.items()})
    ranges: list[tuple[Range, ...]] = list(blocks.ranges)
    for d in scattered:
        lengths = {stop - start for start, stop in blocks.ranges[d]}
        if len(lengths) > 1:
            raise PlanError(
                f"`x` must have the same length in dimension {d} on all workers that are summed, but the lengths are "
                f"{[stop - start for start, stop in blocks.ranges[d]]}."
            )
        ranges[d] = balanced_ranges(lengths.pop(), P_x.shape[d])
    return _run("reduce_scatter", x, P_x, scattered, ProductGrid(P_x.ranks, tuple(ranges)), shape_dtypes)


def _run(
    name: str,
    x: Array,
    P_x: Partition,
    axes: tuple[int, ...],
    blocks: ProductGrid,
    shape_dtypes: dict[int, ShapeDtype],
) -> Array:
    """Between `blocks` and the same with the whole extent in `axes`: a team at a time, with its own small grid."""
    rank = P_x.rank
    assert rank is not None  # the callers have returned on workers outside P_x
    dtype = common_dtype("x", shape_dtypes, P_x.ranks)
    team = tuple(P_x.ranks[place] for place in reduction_team(P_x.shape, axes, rank))
    index = index_of(rank, P_x.shape)
    own, whole = [], []
    for d, ranges in enumerate(blocks.ranges):
        length = ranges[index[d]][1] - ranges[index[d]][0]
        own.append(ranges if d in axes else ((0, length),))
        whole.append((((0, ranges[-1][1]),) * len(ranges)) if d in axes else ((0, length),))
    step = Exchange(ProductGrid(team, tuple(own)), ProductGrid(team, tuple(whole))).plan(P_x.world.rank)
    if name == "reduce_scatter":
        step = step.reverse()
    plan = BoxMovement(
        name,
        P_x.world,
        team,
        (step,),
        shape_dtypes[P_x.world.rank],
        ShapeDtype(step.out_shape, dtype),
        is_differentiable(dtype),
        copies=name == "all_gather",
        adds=name == "reduce_scatter",
    )
    return run_boxes(plan, x)
