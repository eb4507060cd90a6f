"""Repartition of a tensor, all-to-all and roll: one exchange from owned to needed blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import GridBlocks, block_or_placeholder, common_dtype, owned_grid
from distdl_jax.functional.box_exchange import BoxPlan
from distdl_jax.functional.calls import function_call
from distdl_jax.functional.plan import ShapeDtypes, flags_text, plan_and_run, taking_part
from distdl_jax.partitions.partition import CartesianPartition, Partition, check_partitions
from distdl_jax.plans.alike import derived, on_grids
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.messages import ExchangePlan
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.validation import checked_axes, checked_axis, checked_boolean, checked_integers


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
    """Plan `repartition` from the shapes and dtypes on at least the workers of both partitions."""
    _check_dimensions(P_x, P_y)
    inputs = taking_part(shape_dtypes, P_x.ranks, P_y.ranks)
    owned = owned_grid("x", P_x, inputs)
    dtype = common_dtype("x", inputs, P_x.ranks)
    exchange = Exchange(owned, ProductGrid.balanced(owned.extent, P_y.shape, P_y.ranks))
    return RepartitionPlan("repartition", inputs, dtype, exchange, preserve_batch)


@function_call
def repartition(x: Array, P_x: Partition, P_y: Partition, *, preserve_batch: bool = True) -> Array:
    """Move a tensor of D dimensions from `P_x` (p_0 x ... x p_{D-1}) to `P_y` (q_0 x ... x q_{D-1}).

    Every worker of P_y gets its balanced block of the tensor: along a dimension of length n over q workers, the first n
    mod q workers hold one entry more than the rest. The blocks on P_x may be unbalanced; using the same partition twice
    rebalances them, and is the identity, without messages, if they are balanced. From a partition of one worker this is
    scatter, to one it is gather. The adjoint is the reverse movement, onto the original blocks.

    **Arguments:**

    - `x`: this worker's block if it is in P_x: D dimensions, one dtype on all of P_x; workers with the same index in a
      dimension hold the same length there. Blocks may be empty. Elsewhere a zero-volume array, floating or complex if
      and only if the data is.
    - `P_x`, `P_y`: partitions with as many dimensions as the tensor; equal, permuted, overlapping or disjoint teams.
    - `preserve_batch`: whether a zero-volume output keeps the first dimension of the worker's input.

    **Returns:** in P_y the balanced block; in P_x only, a zero-volume array of the data's dtype; in neither, `x`.

    **Raises:** `InvalidTypeError` if `preserve_batch` is not True or False; `InvalidArgumentError` if the partitions
    differ in the number of dimensions; `PlanError`, with a list of the shapes, if the blocks don't form a grid.

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
    plan = partial(plan_repartition, P_x=P_x, P_y=P_y, preserve_batch=preserve_batch)
    return plan_and_run(f"repartition{flags_text(preserve_batch=(preserve_batch, True))}", plan, x, P_x, P_y)


def _check_dimensions(P_x: Partition, P_y: Partition) -> None:
    if P_x.dim != P_y.dim:
        raise InvalidArgumentError(
            f"`P_x` ({shape_text(P_x.shape)}) and `P_y` ({shape_text(P_y.shape)}) must have as many dimensions as the "
            "tensor, so both the same number; dimensions of one worker can be added without moving data."
        )


def plan_all_to_all(shape_dtypes: ShapeDtypes, P_x: Partition, split_axis: int, concat_axis: int) -> RepartitionPlan:
    """Plan `all_to_all` from the shapes and dtypes on at least the workers of P_x."""
    P_y = all_to_all_partition(P_x, split_axis, concat_axis)
    return replace(plan_repartition(shape_dtypes, P_x, P_y), name="all_to_all")


def all_to_all_partition(P_x: Partition, split_axis: int, concat_axis: int) -> CartesianPartition:
    """Return the partition of the output of `all_to_all`: the workers of P_x on another grid.

    **Raises:** `InvalidArgumentError` for a dimension that P_x doesn't have, or one dimension twice.
    """
    check_partitions(P_x=P_x)
    split, concat = (
        checked_axis("split_axis", split_axis, P_x.shape),
        checked_axis("concat_axis", concat_axis, P_x.shape),
    )
    if split == concat:
        raise InvalidArgumentError(
            f"`split_axis` (={split_axis}) and `concat_axis` (={concat_axis}) must be two different dimensions of the "
            f"partition ({shape_text(P_x.shape)})."
        )
    others = np.delete(np.arange(P_x.dim), concat)
    place = int(np.searchsorted(others, split))
    # Directly after those along `split` already, to merge with them into one dimension.
    order = np.insert(others, place + 1, concat)
    ranks = np.arange(P_x.size).reshape(P_x.shape).transpose(order).ravel()
    shape = list(P_x.shape)
    shape[split], shape[concat] = shape[split] * shape[concat], 1
    return P_x.grid(shape, ranks.tolist())


@function_call
def all_to_all(x: Array, P_x: Partition, split_axis: int, concat_axis: int) -> Array:
    """Split `x` along `split_axis` over the workers with blocks along `concat_axis`, and concatenate those.

    With p workers along `concat_axis` of P_x and q along `split_axis` (usually 1), the output has the whole length
    along `concat_axis`, and is in balanced blocks over q p workers along `split_axis`: the worker at (i, j) there is
    number i p + j. It is `jax.lax.all_to_all(..., tiled=True)` along the workers of `concat_axis`, for blocks of any
    length. As a global tensor, it is a repartition from P_x to `nn.AllToAll(P_x, split_axis,
    concat_axis).output_partition`. The adjoint is the reverse movement.

    *Tokens and experts*: let each worker have a buffer of experts x slots x features for its tokens. Concatenated,
    these are one tensor with split slots. `all_to_all(buffer, P_x, split_axis=0, concat_axis=1)`, with P_x 1 x p x 1,
    gives each worker all slots of its experts.

    **Arguments:**

    - `x`: this worker's block on P_x, of any dtype; blocks may be uneven and empty. Zero-volume outside P_x.
    - `P_x`: the partition, with as many dimensions as the tensor.
    - `split_axis`: the dimension that is split afterwards. Negative ones count from the end.
    - `concat_axis`: the dimension that is split before, and whole afterwards.

    **Returns:** this worker's block of the output; outside P_x, `x`.

    **Raises:** `InvalidArgumentError`, on every worker, for a dimension that P_x doesn't have, or one dimension twice;
    `PlanError`, on every worker of P_x, if the blocks don't form a grid, or differ in dtype.

    A worker sends a share of (p - 1) / p of its block, in p - 1 messages. If q is above 1 and doesn't divide the length
    evenly, some of it is sent to workers at other indices along `split_axis`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([1, 2])
    ...     x = dj.TensorSpec((2, 3), P).block(jnp.arange(6).reshape(2, 3))
    ...     return x.tolist(), dj.functional.all_to_all(x, P, split_axis=0, concat_axis=1).tolist()
    >>> dj.simulate(2, program)
    [([[0, 1], [3, 4]], [[0, 1, 2]]), ([[2], [5]], [[3, 4, 5]])]

    Source: MPI's all-to-all, as in `jax.lax.all_to_all`; Hewett and Grady (2020), generalised all-to-all.
    """
    P_y = all_to_all_partition(P_x, split_axis, concat_axis)
    plan = partial(plan_all_to_all, P_x=P_x, split_axis=split_axis, concat_axis=concat_axis)
    ways = f"from dimension {concat_axis % P_x.dim} to {split_axis % P_x.dim}"
    return plan_and_run(f"all_to_all {ways},", plan, x, P_x, P_y)


Sizes = int | Sequence[int]


@dataclass(frozen=True)
class RollPlan(BoxPlan):
    """A roll: each worker needs the entries that are shifted into its block, from wherever they are."""

    exchange: Exchange

    def steps(self, worker: int) -> tuple[ExchangePlan, ...]:
        return (self.exchange.plan(worker),)

    def output(self, worker: int) -> ShapeDtype:
        return ShapeDtype(self.inputs[worker].shape, self.dtype)


def plan_roll(shape_dtypes: ShapeDtypes, P_x: Partition, shift: Sizes, axis: Sizes) -> RollPlan:
    """Plan `roll` from the shapes and dtypes on at least the workers of P_x."""
    shifts = checked_shifts(shift, axis, P_x)
    inputs = taking_part(shape_dtypes, P_x.ranks)
    owned = owned_grid("x", P_x, inputs)
    needed = []
    for d, (ranges, n) in enumerate(zip(owned.ranges, owned.extent, strict=True)):
        by = shifts.get(d, 0) % n if n else 0
        needed.append(tuple((start - by, stop - by) for start, stop in ranges))
    periodic = tuple(d in shifts for d in range(P_x.dim))
    exchange = Exchange(owned, ProductGrid(P_x.ranks, tuple(needed)), periodic)
    return RollPlan("roll", inputs, common_dtype("x", inputs, P_x.ranks), exchange)


@function_call
def roll(x: Array, P_x: Partition, shift: Sizes, axis: Sizes) -> Array:
    """Shift a tensor on `P_x` cyclically along `axis`: `jnp.roll` of the whole tensor, `torch.roll`.

    With n entries along a dimension, entry i moves to (i + shift) mod n. Entries that leave a worker's block are sent
    directly to their new owner, also if several dimensions are shifted; nothing else moves. The adjoint shifts back.

    **Arguments:**

    - `x`: this worker's block, with as many dimensions as P_x; blocks may be uneven and empty. Zero-volume outside P_x.
    - `P_x`: the partition.
    - `shift`: an integer, or one for each of `axis`; negative ones shift towards 0, and any may exceed n.
    - `axis`: the dimension, or several; negative ones count from the end. Shifts along a repeated dimension add up.

    **Returns:** this worker's block, of x's shape and dtype; outside P_x, `x`.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if `shift` or `axis` are not integers,
    differ in number, or name a dimension that P_x doesn't have; `PlanError` if the blocks don't form a grid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> dj.functional.roll(jnp.arange(5), P, 2, 0).tolist()
    [3, 4, 0, 1, 2]

    Source: numpy's roll.
    """
    check_partitions(P_x=P_x)
    shifts = checked_shifts(shift, axis, P_x)
    plan = partial(plan_roll, P_x=P_x, shift=tuple(shifts.values()), axis=tuple(shifts))
    with jax.named_scope("roll"):
        return plan_and_run(f"roll by {shifts}", plan, x, P_x)


def checked_shifts(shift: Sizes, axis: Sizes, P_x: Partition) -> dict[int, int]:
    """Return the total shift along each named dimension, ascending."""
    by, along = checked_integers("shift", shift, or_one=True), checked_integers("axis", axis, or_one=True)
    if len(by) != len(along) and 1 not in (len(by), len(along)):
        raise InvalidArgumentError(
            f"`shift` (={by}) and `axis` (={along}) must have the same length, or one of them be an integer."
        )
    number = max(len(by), len(along)) if by and along else 0
    shifts: dict[int, int] = {}
    for shift_by, d in zip(by * (number // max(len(by), 1)), along * (number // max(len(along), 1)), strict=True):
        (place,) = checked_axes("axis", d, P_x.shape)
        shifts[place] = shifts.get(place, 0) + shift_by
    return dict(sorted(shifts.items()))
