"""Reshaping a split tensor, and rearranging it: splitting its dimensions, reordering the factors, and joining some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import block_or_placeholder, common_dtype, owned_grid, zero_volume_shape
from distdl_jax.functional.box_exchange import BoxPlan
from distdl_jax.functional.calls import function_call
from distdl_jax.functional.collectives import tied_zeros
from distdl_jax.functional.plan import Computation, ShapeDtypes, plan_and_run, taking_part
from distdl_jax.partitions.partition import CartesianPartition, Partition, check_partitions
from distdl_jax.plans.alike import derived
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.messages import ExchangePlan
from distdl_jax.plans.reshaping import Reshaping
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.transports.world import World
from distdl_jax.validation import checked_integers


@dataclass(frozen=True)
class _FlatPlan(BoxPlan):
    """The exchange of blocks that are flat in each group of dimensions; other workers keep their blocks."""

    reshaping: Reshaping

    def steps(self, worker: int) -> tuple[ExchangePlan, ...]:
        return (self.reshaping.plan(worker),)

    def output(self, worker: int) -> ShapeDtype:
        if worker in self.reshaping.needed.cell_of:
            return ShapeDtype(self.reshaping.out_shape(worker), self.dtype)
        return ShapeDtype(zero_volume_shape(self.inputs[worker].shape, True), self.dtype)


@dataclass(frozen=True)
class ReshapePlan(Computation):
    """A reshape: one movement, `moved`, between two free local reshapes.

    - `inputs`: the shapes and dtypes of the workers' blocks.
    """

    inputs: ShapeDtypes = field(hash=False)
    moved: _FlatPlan

    def output(self, worker: int) -> ShapeDtype:
        return block_or_placeholder(self.moved.reshaping.needed, worker, self.inputs[worker], self.moved.dtype)

    def computed(self, world: World, x: Array) -> Array:
        y = self.moved.run(world, _reshaped(x, self.moved.inputs[world.rank].shape))
        return _reshaped(y, self.output(world.rank).shape)


def _reshaped(x: Array, shape: tuple[int, ...]) -> Array:
    if x.shape == shape:
        return x
    return x.reshape(shape) if x.size else tied_zeros(ShapeDtype(shape, x.dtype), x)


def plan_reshape(shape_dtypes: ShapeDtypes, P_x: Partition, P_y: Partition, shape: Sequence[int]) -> ReshapePlan:
    """Plan `reshape` from the shapes and dtypes on at least the workers of both partitions."""
    inputs = taking_part(shape_dtypes, P_x.ranks, P_y.ranks)
    owned, dtype = owned_grid("x", P_x, inputs), common_dtype("x", inputs, P_x.ranks)
    extent = _resolved(checked_shape(shape, P_y), owned.extent)
    reshaping = Reshaping(owned, ProductGrid.balanced(extent, P_y.shape, P_y.ranks))

    def flat_block(worker: int) -> ShapeDtype:
        block = inputs[worker]
        return ShapeDtype(reshaping.in_shape(worker), block.dtype) if worker in owned.cell_of else block

    # Equal blocks are equal when flat: one is computed for each shape, unless there are placeholders among them.
    every_owns = len(inputs) == len(owned.ranks)
    flat = derived(flat_block, inputs) if every_owns else {worker: flat_block(worker) for worker in inputs}
    return ReshapePlan(inputs, _FlatPlan("reshape", flat, dtype, reshaping))


@function_call
def reshape(x: Array, P_x: Partition, P_y: Partition, shape: int | Sequence[int]) -> Array:
    """Reshape a tensor on `P_x`, in row-major order, to one of `shape` on `P_y`: `jnp.reshape` of the whole tensor.

    Every worker of P_y gets its balanced block; the blocks on P_x may be unbalanced. It is one movement of the entries
    that change workers; if there are none, there is no communication. The adjoint is the reverse movement, onto the
    original blocks.

    **Arguments:**

    - `x`: this worker's block if it is in P_x, with as many dimensions as P_x; elsewhere a zero-volume array, floating
      or complex if and only if the data is.
    - `P_x`, `P_y`: any partitions, with as many dimensions as x and as `shape`; equal, overlapping or disjoint teams.
    - `shape`: the shape of the whole output, or its length; one number may be -1, to be computed.

    **Returns:** in P_y the balanced block; in P_x only, a zero-volume array of the data's dtype; in neither, `x`.

    **Raises:** `InvalidArgumentError` if `shape` doesn't fit P_y; `PlanError`, on every worker of both, if it
    doesn't have as many elements as x, or blocks don't form a grid.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().create_partition_inclusive([0])
    >>> lines, flat = (P.grid(shape) for shape in ([1, 1], [1]))
    >>> reshape(jax.numpy.arange(6.0).reshape(2, 3), lines, flat, -1).shape
    (6,)
    """
    check_partitions(P_x=P_x, P_y=P_y)
    lengths = checked_shape(shape, P_y)
    plan = partial(plan_reshape, P_x=P_x, P_y=P_y, shape=lengths)
    with jax.named_scope("reshape"):
        return plan_and_run(f"reshape to {lengths}", plan, x, P_x, P_y)


def checked_shape(shape: Any, P_y: Partition) -> tuple[int, ...]:
    """Return the argument `shape`: a length for each dimension of `P_y`, of which one may be -1."""
    lengths = checked_integers("shape", shape, or_one=True)
    if len(lengths) != P_y.dim or min(lengths, default=0) < -1 or lengths.count(-1) > 1:
        raise InvalidArgumentError(
            f"`shape` (={lengths}) must hold a length, 0 or more, for each dimension of `P_y` "
            f"({shape_text(P_y.shape)}); one of them may be -1."
        )
    return lengths


def _resolved(lengths: tuple[int, ...], extent: tuple[int, ...]) -> tuple[int, ...]:
    known, total = prod(n for n in lengths if n != -1), prod(extent)
    if -1 in lengths and known and total % known == 0:
        return tuple(total // known if n == -1 else n for n in lengths)
    if -1 in lengths or known != total:
        raise PlanError(f"`shape` (={lengths}) must have as many elements as `x` (of shape {extent}), {total}.")
    return lengths


OVER_WORKERS = -1
"""Among the factors of a dimension, the one that is split over its workers; its length follows from the others."""


class Rule(NamedTuple):
    """The rearrangement of a tensor's dimensions.

    - `factors`: the lengths into which each is split, row-major; one of them is OVER_WORKERS.
    - `order`: the order of all the factors afterwards.
    - `groups`: the number of factors, in that order, that each dimension of the result joins.
    - `name`: the argument with the factors, for errors.
    """

    factors: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    groups: tuple[int, ...]
    name: str

    def lengths(self, extent: tuple[int, ...]) -> list[int]:
        """Return the lengths of all factors of a tensor of shape `extent`."""
        lengths: list[int] = []
        for d, (n, parts) in enumerate(zip(extent, self.factors, strict=True)):
            known = prod(m for m in parts if m != OVER_WORKERS)
            if n % known:
                raise PlanError(
                    f"`{self.name}` must divide `x` (of shape {shape_text(extent)}), but dimension {d} is not a "
                    f"multiple of {known}."
                )
            lengths += (n // known if m == OVER_WORKERS else m for m in parts)
        return lengths

    def joined(self, lengths: Sequence[int]) -> list[int]:
        """Return the products, in the result's dimensions, of numbers given for the factors in the order afterwards."""
        return [prod(lengths[start:stop]) for start, stop in pairwise(accumulate(self.groups, initial=0))]

    def partitions(self, P_x: Partition) -> tuple[CartesianPartition, CartesianPartition, CartesianPartition]:
        """Return the partitions of the factors of a tensor on `P_x`, before and afterwards, and of the result."""
        shape = [p if m == OVER_WORKERS else 1 for p, parts in zip(P_x.shape, self.factors, strict=True) for m in parts]
        ranks = np.reshape(P_x.ranks, shape).transpose(self.order)
        team = P_x.of_workers(P_x.world, ranks.ravel().tolist())
        return (
            P_x.create_cartesian_topology_partition(shape),
            team.create_cartesian_topology_partition(ranks.shape),
            team.create_cartesian_topology_partition(self.joined(ranks.shape)),
        )


@dataclass(frozen=True)
class Rearrangement(Computation):
    """Two reshapes, each a movement if blocks change, with a transposition of blocks between them.

    - `inputs`: the shapes and dtypes of the workers' blocks.
    """

    inputs: ShapeDtypes = field(hash=False)
    split: ReshapePlan
    order: tuple[int, ...]
    join: ReshapePlan

    def output(self, worker: int) -> ShapeDtype:
        return self.join.output(worker)

    def computed(self, world: World, x: Array) -> Array:
        return self.join.run(world, self.split.run(world, x).transpose(self.order))


def plan_rearrangement(shape_dtypes: ShapeDtypes, P_x: Partition, rule: Rule) -> Rearrangement:
    """Plan the application of `rule` to the tensor on P_x: every worker gets its balanced block of the result."""
    inputs = taking_part(shape_dtypes, P_x.ranks)
    lengths = rule.lengths(owned_grid("x", P_x, inputs).extent)
    before, after, P_y = rule.partitions(P_x)
    split = plan_reshape(inputs, P_x, before, lengths)
    turned = {
        worker: ShapeDtype(tuple(block.shape[d] for d in rule.order), block.dtype)
        for worker, block in split.outputs.items()
    }
    shape = rule.joined([lengths[d] for d in rule.order])
    return Rearrangement(inputs, split, rule.order, plan_reshape(turned, after, P_y, shape))
