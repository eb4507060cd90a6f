"""The plan of functions that split dimensions, reorder them, and join some: windows, and pixels that are shuffled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from jax import Array

from distdl_jax.errors import PlanError
from distdl_jax.functional.block_checks import owned_grid
from distdl_jax.functional.plan import Plan, ShapeDtypes, taking_part
from distdl_jax.functional.reshape import ReshapePlan, plan_reshape
from distdl_jax.partitions.partition import CartesianPartition, Partition
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.tracing.world import Workers, World

OVER_WORKERS = -1
"""Of the factors of a dimension, the one that its workers share; its length follows from the others."""


class Rule(NamedTuple):
    """What becomes of a tensor's dimensions.

    - `factors`: the lengths into which each is split, row-major; one of them is OVER_WORKERS.
    - `order`: of all the factors, afterwards.
    - `groups`: how many of them, in that order, each dimension of the result joins.
    - `name`: the argument that says the factors, for errors.
    """

    factors: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    groups: tuple[int, ...]
    name: str

    def lengths(self, extent: tuple[int, ...]) -> list[int]:
        """Return the lengths of all factors of a tensor of shape `extent`."""
        found: list[int] = []
        for d, (n, parts) in enumerate(zip(extent, self.factors, strict=True)):
            known = prod(m for m in parts if m != OVER_WORKERS)
            if n % known:
                raise PlanError(
                    f"`{self.name}` must divide `x` (of shape {shape_text(extent)}), but dimension {d} is no multiple "
                    f"of {known}."
                )
            found += (n // known if m == OVER_WORKERS else m for m in parts)
        return found

    def joined(self, lengths: Sequence[int]) -> list[int]:
        """Return the products, in the result's dimensions, of numbers that the factors have in the order afterwards."""
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
class Rearrangement(Plan):
    """Two reshapes, each a movement where blocks are to be others, and a transposition of blocks between them.

    - `inputs`: the shapes and dtypes of the workers' blocks.
    """

    inputs: ShapeDtypes = field(hash=False)
    split: ReshapePlan
    order: tuple[int, ...]
    join: ReshapePlan

    @cached_property
    def workers(self) -> Workers:
        return tuple(sorted(self.inputs))

    def output(self, worker: int) -> ShapeDtype:
        return self.join.output(worker)

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's block afterwards, given its block `x`."""
        if world.rank not in self.inputs:
            return x
        return self.join.run(world, self.split.run(world, x).transpose(self.order))


def plan_rearrangement(shape_dtypes: ShapeDtypes, P_x: Partition, rule: Rule) -> Rearrangement:
    """Plan what `rule` says of the tensor on P_x: every worker gets its balanced block of the result."""
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
