"""Flattening, and back: N x C x features to N x F, in the order of the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import Array

from distdl_jax.backends.base import Workers, World
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.nn.layer import ParameterFreeLayer, purpose_of
from distdl_jax.partition import CartesianPartition, Partition, check_partitions
from distdl_jax.plans.decomposition import ProductGrid, balanced_sizes, checked_integers, ranges_of_sizes
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.primitives.handshake import exchange_shape_dtypes
from distdl_jax.primitives.held import common_dtype, owned_grid
from distdl_jax.primitives.plan import Plan, ShapeDtypes, taking_part
from distdl_jax.primitives.repartition import RepartitionPlan, plan_repartition
from distdl_jax.primitives.tie import tie


@dataclass(frozen=True)
class ReshapingPlan(Plan):
    """A repartition to whole channels, a reshaping of each worker's block, and a repartition to the output.

    - `reshaped`: by world rank, the shape of the block between the two, of those that hold one.
    """

    before: RepartitionPlan
    reshaped: Mapping[int, tuple[int, ...]] = field(hash=False)
    after_it: RepartitionPlan

    @cached_property
    def workers(self) -> Workers:
        return tuple(sorted({*self.before.workers, *self.after_it.workers}))

    def output(self, worker: int) -> ShapeDtype:
        return self.after_it.output(worker) if worker in self.after_it.workers else self.before.output(worker)

    def run(self, world: World, x: Array) -> Array:
        """What this worker, which holds `x`, holds afterwards."""
        x = self.before.run(world, x)
        if (shape := self.reshaped.get(world.rank)) is not None:
            x = x.reshape(shape) if x.size else tie(jnp.zeros(shape, x.dtype), x)
        return self.after_it.run(world, x)


def _lines(P: Partition) -> CartesianPartition:
    """The workers of `P` in two dimensions: along the batch, and all others."""
    return P.create_cartesian_topology_partition((P.shape[0], math.prod(P.shape[1:])))


@dataclass(frozen=True, init=False)
class Flatten(ParameterFreeLayer):
    """From N x C x features on P_x to N x F on P_y, F = C times the features, in the order of the whole tensor.

    Where features are split, a repartition splits the channels instead, so that each worker has a stretch of F; another
    one makes balanced blocks of these. Where the features are whole and the stretches balanced, nothing moves.

    **Arguments:**

    - `P_x`: the partition of x, of as many dimensions, 2 or more; any may be split, and blocks be of any length.
    - `P_y`: that of the output, P_n x P_f. Default: all of P_x, its dimensions after the first as one.

    **Raises:** `InvalidArgumentError`, on every worker, where partitions don't fit; `PlanError` where x doesn't.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().create_partition_inclusive([0]).create_cartesian_topology_partition([1, 1, 1])
    >>> Flatten(P)(jnp.ones((2, 3, 4))).shape
    (2, 12)
    """

    P_x: Partition
    P_y: Partition

    def __init__(self, P_x: Partition, P_y: Partition | None = None) -> None:
        check_partitions(P_x=P_x, **({} if P_y is None else {"P_y": P_y}))
        if P_x.dim < 2:
            raise InvalidArgumentError(f"`P_x` ({shape_text(P_x.shape)}) must have 2 dimensions or more.")
        if P_y is not None and P_y.dim != 2:
            raise InvalidArgumentError(f"`P_y` ({shape_text(P_y.shape)}) must have 2 dimensions: batch, and features.")
        vars(self).update(P_x=P_x, P_y=_lines(P_x) if P_y is None else P_y)

    def plan(self, x: ShapeDtypes, params: object = None) -> ReshapingPlan:
        """What the layer makes of what all of its workers hold: without a message, and the same on every worker.

        **Raises:** `PlanError` where x doesn't fit.
        """
        x = taking_part(x, self.P_x.ranks, self.P_y.ranks)
        lines = _lines(self.P_x)
        whole = self.P_x
        if math.prod(self.P_x.shape[2:]) > 1:
            whole = self.P_x.create_cartesian_topology_partition((*lines.shape, *(1,) * (self.P_x.dim - 2)))
            before = plan_repartition(x, self.P_x, whole)
        else:
            before = _unmoved(x, self.P_x)
        held = before.after(x)
        reshaped = {worker: (n, math.prod(rest)) for worker in whole.ranks for n, *rest in [held[worker].shape]}
        flat = held | {worker: ShapeDtype(shape, held[worker].dtype) for worker, shape in reshaped.items()}
        return ReshapingPlan(before, reshaped, plan_repartition(flat, lines, self.P_y))

    def _apply(self, x: Array) -> Array:
        """This worker's block of the output on P_y; elsewhere in P_x a zero-volume array."""
        return _run(self, x)


@dataclass(frozen=True, init=False)
class Unflatten(ParameterFreeLayer):
    """From N x F on P_x to N x C x features on P_y, in the order of the whole tensor: the way back from `Flatten`.

    **Arguments:**

    - `P_x`: the partition of x, P_n x P_f.
    - `P_y`: that of the output, of as many dimensions as it has, 2 or more.
    - `shape`: C and the features of the whole tensor; F is their product.

    **Raises:** `InvalidArgumentError`, on every worker, where arguments don't fit; `PlanError` where x doesn't.
    """

    P_x: Partition
    P_y: Partition
    shape: tuple[int, ...]

    def __init__(self, P_x: Partition, P_y: Partition, shape: Sequence[int]) -> None:
        check_partitions(P_x=P_x, P_y=P_y)
        lengths = checked_integers("shape", shape)
        if P_x.dim != 2:
            raise InvalidArgumentError(f"`P_x` ({shape_text(P_x.shape)}) must have 2 dimensions: batch, and features.")
        if P_y.dim != len(lengths) + 1 or not lengths or min(lengths) < 1:
            raise InvalidArgumentError(
                f"`shape` (={tuple(shape)}) must be channels and features, each 1 or more, one for each dimension of "
                f"`P_y` ({shape_text(P_y.shape)}) after the batch."
            )
        vars(self).update(P_x=P_x, P_y=P_y, shape=lengths)

    def plan(self, x: ShapeDtypes, params: object = None) -> ReshapingPlan:
        """What the layer makes of what all of its workers hold: without a message, and the same on every worker.

        **Raises:** `PlanError` where x doesn't fit.
        """
        x = taking_part(x, self.P_x.ranks, self.P_y.ranks)
        dtype, owned = common_dtype("x", x, self.P_x.ranks), owned_grid("x", self.P_x, x)
        each, lines = math.prod(self.shape[1:]), _lines(self.P_y)
        if owned.extent[1] != self.shape[0] * each:
            raise PlanError(
                f"`x` (of shape {owned.extent}) must have {self.shape[0] * each} features, {shape_text(self.shape)}."
            )
        channels = balanced_sizes(self.shape[0], lines.shape[1])
        rows = ranges_of_sizes(balanced_sizes(owned.extent[0], lines.shape[0]))
        target = ProductGrid(lines.ranks, (rows, ranges_of_sizes([c * each for c in channels])))
        before = RepartitionPlan("repartition", x, dtype, Exchange(owned, target), True)
        held, rest = before.after(x), self.shape[1:]
        reshaped = {w: (held[w].shape[0], held[w].shape[1] // each, *rest) for w in lines.ranks}
        full = held | {worker: ShapeDtype(shape, dtype) for worker, shape in reshaped.items()}
        whole = self.P_y.create_cartesian_topology_partition((*lines.shape, *(1,) * len(rest)))
        return ReshapingPlan(before, reshaped, plan_repartition(full, whole, self.P_y))

    def _apply(self, x: Array) -> Array:
        """This worker's block of the output on P_y; elsewhere in P_x a zero-volume array."""
        return _run(self, x)


def _unmoved(x: ShapeDtypes, P_x: Partition) -> RepartitionPlan:
    """The blocks of P_x as they are, balanced or not."""
    owned = owned_grid("x", P_x, x)
    held = taking_part(x, P_x.ranks)
    return RepartitionPlan("repartition", held, common_dtype("x", x, P_x.ranks), Exchange(owned, owned), True)


def _run(layer: Flatten | Unflatten, x: Array) -> Array:
    team = tuple(sorted({*layer.P_x.ranks, *layer.P_y.ranks}))
    if layer.P_x.world.rank not in team:
        return x
    with jax.named_scope(type(layer).__name__):
        return layer.plan(exchange_shape_dtypes(layer.P_x.world, team, purpose_of(layer), "x", x)).run(
            layer.P_x.world, x
        )
