"""All-gather and reduce-scatter along dimensions of a partition: each other's adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from jax import Array

from distdl_jax.errors import PlanError
from distdl_jax.partition import Partition, check_partitions
from distdl_jax.plans.broadcasting import reduction_team
from distdl_jax.plans.decomposition import ProductGrid, Range, balanced_ranges
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.messages import ExchangePlan
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.block_checks import common_dtype, owned_grid
from distdl_jax.primitives.box_exchange import BoxPlan
from distdl_jax.primitives.plan import ShapeDtypes, plan_and_run, taking_part
from distdl_jax.validation import checked_axes
from distdl_jax.world import Workers


@dataclass(frozen=True)
class GatherPlan(BoxPlan):
    """An all-gather (`gathers`) from blocks to blocks with the whole extent along `axes`, or a reduce-scatter back.

    - `blocks`: the small blocks, on P_x: those to gather, or to scatter the sum to.
    - `axes`: the dimensions to gather, or to sum and to scatter, along.
    """

    blocks: ProductGrid
    axes: tuple[int, ...]
    gathers: bool

    @property
    def copies(self) -> bool:
        return self.gathers

    @property
    def adds(self) -> bool:
        return not self.gathers

    @cached_property
    def _exchanges(self) -> dict[int, Exchange]:
        return {}

    def team(self, worker: int) -> Workers:
        cells = reduction_team(self.blocks.shape, self.axes, self.blocks.cell_of[worker])
        return tuple(self.blocks.ranks[cell] for cell in cells)

    def steps(self, worker: int) -> tuple[ExchangePlan, ...]:
        """Return the one exchange of `worker`; each team has its own small grid."""
        cell, team = self.blocks.cell_of[worker], self.team(worker)
        if team[0] not in self._exchanges:
            own, whole = [], []
            for d, ((start, stop), ranges) in enumerate(zip(self.blocks.box(cell), self.blocks.ranges, strict=True)):
                own.append(ranges if d in self.axes else ((0, stop - start),))
                whole.append((((0, ranges[-1][1]),) * len(ranges)) if d in self.axes else ((0, stop - start),))
            self._exchanges[team[0]] = Exchange(ProductGrid(team, tuple(own)), ProductGrid(team, tuple(whole)))
        step = self._exchanges[team[0]].plan(worker)
        return (step if self.gathers else step.reverse(),)

    def output(self, worker: int) -> ShapeDtype:
        lengths = [stop - start for start, stop in self.blocks.box(self.blocks.cell_of[worker])]
        if self.gathers:
            lengths = [self.blocks.extent[d] if d in self.axes else n for d, n in enumerate(lengths)]
        return ShapeDtype(tuple(lengths), self.dtype)


def plan_all_gather(shape_dtypes: ShapeDtypes, P_x: Partition, axes: int | Sequence[int]) -> GatherPlan:
    """Plan `all_gather` from the shapes and dtypes on the workers of P_x, and perhaps of more."""
    gathered = checked_axes("axes", axes, P_x.shape)
    inputs = taking_part(shape_dtypes, P_x.ranks)
    blocks = owned_grid("x", P_x, inputs)
    return GatherPlan("all_gather", inputs, common_dtype("x", inputs, P_x.ranks), blocks, gathered, gathers=True)


def plan_reduce_scatter(shape_dtypes: ShapeDtypes, P_x: Partition, axes: int | Sequence[int]) -> GatherPlan:
    """Plan `reduce_scatter` from the shapes and dtypes on the workers of P_x, and perhaps of more."""
    scattered = checked_axes("axes", axes, P_x.shape)
    inputs = taking_part(shape_dtypes, P_x.ranks)
    terms = owned_grid("x", P_x, inputs)
    ranges: list[tuple[Range, ...]] = list(terms.ranges)
    for d in scattered:
        lengths = [stop - start for start, stop in terms.ranges[d]]
        if len(set(lengths)) > 1:
            raise PlanError(
                f"`x` must have the same length in dimension {d} on all workers that are summed, but the lengths are "
                f"{lengths}."
            )
        ranges[d] = balanced_ranges(lengths[0], P_x.shape[d])
    dtype, blocks = common_dtype("x", inputs, P_x.ranks), ProductGrid(P_x.ranks, tuple(ranges))
    return GatherPlan("reduce_scatter", inputs, dtype, blocks, scattered, gathers=False)


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
    gathered = checked_axes("axes", axes, P_x.shape)
    label = f"all_gather along {gathered} on {P_x.describe()}"
    return plan_and_run(P_x.world, P_x.ranks, label, partial(plan_all_gather, P_x=P_x, axes=gathered), x)


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
    scattered = checked_axes("axes", axes, P_x.shape)
    label = f"reduce_scatter along {scattered} on {P_x.describe()}"
    return plan_and_run(P_x.world, P_x.ranks, label, partial(plan_reduce_scatter, P_x=P_x, axes=scattered), x)
