"""Roll: a split tensor shifted round along dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
from jax import Array

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.block_checks import common_dtype, owned_grid
from distdl_jax.functional.box_exchange import BoxPlan
from distdl_jax.functional.plan import ShapeDtypes, plan_and_run, taking_part
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.messages import ExchangePlan
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.transports.agreement import compared
from distdl_jax.validation import checked_axes, checked_integers

Sizes = int | Sequence[int]


@dataclass(frozen=True)
class RollPlan(BoxPlan):
    """A roll: each worker needs the entries that come to lie in its block, from wherever they are."""

    exchange: Exchange

    def steps(self, worker: int) -> tuple[ExchangePlan, ...]:
        return (self.exchange.plan(worker),)

    def output(self, worker: int) -> ShapeDtype:
        return ShapeDtype(self.inputs[worker].shape, self.dtype)


def plan_roll(shape_dtypes: ShapeDtypes, P_x: Partition, shift: Sizes, axis: Sizes) -> RollPlan:
    """Plan `roll` from the shapes and dtypes on the workers of P_x, and perhaps of more."""
    shifts = checked_shifts(shift, axis, P_x)
    inputs = taking_part(shape_dtypes, P_x.ranks)
    owned = owned_grid("x", P_x, inputs)
    needed = []
    for d, (ranges, n) in enumerate(zip(owned.ranges, owned.extent, strict=True)):
        by = shifts.get(d, 0) % n if n else 0
        needed.append(tuple((start - by, stop - by) for start, stop in ranges))
    periodic = [d in shifts for d in range(P_x.dim)]
    exchange = Exchange(owned, ProductGrid(P_x.ranks, tuple(needed)), periodic)
    return RollPlan("roll", inputs, common_dtype("x", inputs, P_x.ranks), exchange)


@compared
def roll(x: Array, P_x: Partition, shift: Sizes, axis: Sizes) -> Array:
    """Shift a tensor on `P_x` round along `axis`: `jnp.roll` of the whole, `torch.roll`.

    With n entries along a dimension, entry i comes to lie at (i + shift) mod n. What leaves a worker's block travels to
    the worker on whose block it comes to lie, straight, also where several dimensions are shifted; nothing else moves.
    The adjoint shifts back.

    **Arguments:**

    - `x`: this worker's block, of as many dimensions as P_x; blocks may be uneven and empty. Zero-volume outside P_x.
    - `P_x`: the partition.
    - `shift`: by how much, an integer, or one for each of `axis`; negative ones shift towards 0, and any may be more
      than n.
    - `axis`: the dimension, or several; negative ones count from the end. Of one that is named twice the shifts add up.

    **Returns:** this worker's block, of x's shape and dtype; outside P_x, `x`.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, where `shift` or `axis` are no integers,
    don't fit each other, or name a dimension that P_x doesn't have; `PlanError` where the blocks don't form a grid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> dj.functional.roll(jnp.arange(5), P, 2, 0).tolist()
    [3, 4, 0, 1, 2]

    Source: numpy's roll.
    """
    check_partitions(P_x=P_x)
    shifts = checked_shifts(shift, axis, P_x)
    label = f"roll by {shifts} on {P_x.describe()}"
    plan = partial(plan_roll, P_x=P_x, shift=tuple(shifts.values()), axis=tuple(shifts))
    with jax.named_scope("roll"):
        return plan_and_run(P_x.world, tuple(sorted(P_x.ranks)), label, plan, x)


def checked_shifts(shift: Sizes, axis: Sizes, P_x: Partition) -> dict[int, int]:
    """Return the shift along each dimension, ascending, that is named."""
    by, along = checked_integers("shift", shift, or_one=True), checked_integers("axis", axis, or_one=True)
    if len(by) != len(along) and 1 not in (len(by), len(along)):
        raise InvalidArgumentError(
            f"`shift` (={by}) and `axis` (={along}) must be as many, or one of the two an integer."
        )
    number = max(len(by), len(along)) if by and along else 0
    found: dict[int, int] = {}
    for one, d in zip(by * (number // max(len(by), 1)), along * (number // max(len(along), 1)), strict=True):
        (place,) = checked_axes("axis", d, P_x.shape)
        found[place] = found.get(place, 0) + one
    return dict(sorted(found.items()))
