"""Repartition: from one partition of a tensor to another, block by block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import GridBlocks, block_or_placeholder, common_dtype, owned_grid
from distdl_jax.functional.box_exchange import BoxPlan
from distdl_jax.functional.plan import ShapeDtypes, plan_and_run, taking_part
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.alike import derived, on_grids
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.messages import ExchangePlan
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.transports.agreement import compared
from distdl_jax.validation import checked_boolean


@dataclass(frozen=True)
class RepartitionPlan(BoxPlan):
    """A repartition from the owned to the needed blocks of `exchange`."""

    exchange: Exchange
    preserve_batch: bool

    def __post_init__(self) -> None:
        owned, needed = self.exchange.owned, self.exchange.needed
        if not needed.tiles or needed.extent != owned.extent:
            raise PlanError(
                f"The blocks of a repartition must cover the tensor, of shape {owned.extent}, and nothing outside, but "
                f"have the ranges {needed.ranges}."
            )

    def steps(self, worker: int) -> tuple[ExchangePlan, ...]:
        return (self.exchange.plan(worker),)

    @property
    def outputs(self) -> ShapeDtypes:
        return on_grids(GridBlocks(self.exchange.needed, self.dtype), derived(self.output, self.inputs))

    def output(self, worker: int) -> ShapeDtype:
        return block_or_placeholder(self.exchange.needed, worker, self.inputs[worker], self.dtype, self.preserve_batch)


def plan_repartition(
    shape_dtypes: ShapeDtypes, P_x: Partition, P_y: Partition, *, preserve_batch: bool = True
) -> RepartitionPlan:
    """Plan `repartition` from the shapes and dtypes on the workers of both partitions, and perhaps of more."""
    _check_dimensions(P_x, P_y)
    inputs = taking_part(shape_dtypes, P_x.ranks, P_y.ranks)
    owned = owned_grid("x", P_x, inputs)
    dtype = common_dtype("x", inputs, P_x.ranks)
    exchange = Exchange(owned, ProductGrid.balanced(owned.extent, P_y.shape, P_y.ranks))
    return RepartitionPlan("repartition", inputs, dtype, exchange, preserve_batch)


@compared
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

    **Raises:** `InvalidTypeError` where `preserve_batch` is not True or False; `InvalidArgumentError` where the
    partitions differ in the number of dimensions; `PlanError`, with a list of the shapes, where the blocks don't form a
    grid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition()
    ...     P_x, P_y = P.grid([2, 1]), P.grid([1, 2])
    ...     x = dj.TensorSpec((2, 3), P_x).block(jnp.arange(6).reshape(2, 3))
    ...     return x.tolist(), dj.functional.repartition(x, P_x, P_y).tolist()
    >>> dj.simulate(2, program)
    [([[0, 1, 2]], [[0, 1], [3, 4]]), ([[3, 4, 5]], [[2], [5]])]

    Source: DistDL documentation, "repartition"; Hewett and Grady (2020), generalised all-to-all.
    """
    check_partitions(P_x=P_x, P_y=P_y)
    preserve_batch = checked_boolean("preserve_batch", preserve_batch)
    _check_dimensions(P_x, P_y)
    team = tuple(sorted({*P_x.ranks, *P_y.ranks}))
    label = f"repartition from {P_x.describe()} to {P_y.describe()}"
    plan = partial(plan_repartition, P_x=P_x, P_y=P_y, preserve_batch=preserve_batch)
    return plan_and_run(P_x.world, team, label, plan, x)


def _check_dimensions(P_x: Partition, P_y: Partition) -> None:
    if P_x.dim != P_y.dim:
        raise InvalidArgumentError(
            f"`P_x` ({shape_text(P_x.shape)}) and `P_y` ({shape_text(P_y.shape)}) must have as many dimensions as the "
            "tensor, so both the same number; dimensions of one worker can be added without moving data."
        )
