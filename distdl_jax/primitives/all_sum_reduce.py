"""All-sum-reduce: the sum of a team's subtensors, on every worker of the team."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from distdl_jax.backends.base import World
from distdl_jax.partition import Partition, check_partitions
from distdl_jax.primitives.handshake import common_shape_dtype, exchange_shape_dtypes
from distdl_jax.primitives.movement import move
from distdl_jax.primitives.team_operations import allreduce_in_team


@dataclass(frozen=True)
class AllSum:
    """One worker's part of an all-sum-reduction: `team` are the world ranks that are summed over."""

    world: World
    team: tuple[int, ...]
    differentiable: bool

    def adjoint(self) -> AllSum:
        return self

    def batched(self, n: int) -> AllSum:
        return self

    def run(self, x: Array) -> Array:
        with jax.named_scope("all_sum_reduce"):
            return allreduce_in_team(self.world, self.team, x)


def all_sum_reduce(
    x: Array,
    P_x: Partition,
    axes_reduce: int | Sequence[int] | None = None,
    axes_keep: int | Sequence[int] | None = None,
) -> Array:
    """Sum the subtensors of `x` along dimensions of `P_x`, and leave the sum on every worker.

    With P_x of shape p_0 x ... x p_{D-1}, the workers that agree in every index outside `axes_reduce` form one team,
    and each of them gets the sum over its team. The operator is its own adjoint. Along no dimension, or dimensions
    of one worker, it is the identity, without communication.

    **Arguments:**

    - `x`: this worker's subtensor: any shape and dtype, the same within a team. Half precisions are summed in
      float32 and rounded once; the sum of truth values is their "or". Zero-volume outside P_x.
    - `P_x`: the partition.
    - `axes_reduce`, `axes_keep`: dimensions to sum along, or to keep; exactly one of the two.

    **Returns:** an array like `x`; outside P_x, `x` itself.

    **Raises:** `InvalidArgumentError`, on every worker, if a dimension is not one of P_x's; `PlanError`, on every
    worker of a team, if shapes or dtypes differ within it.

    Source: DistDL documentation, "backends"; Hewett and Grady (2020), all-sum-reduce.
    """
    check_partitions(P_x=P_x)
    team = P_x.create_allreduction_partition(axes_reduce, axes_keep)
    if team.size <= 1:
        return x
    purpose = f"all_sum_reduce on {P_x.describe()}"
    shape_dtype = common_shape_dtype("x", exchange_shape_dtypes(P_x.world, team.ranks, purpose, "x", x))
    return move(AllSum(P_x.world, team.ranks, bool(jnp.issubdtype(shape_dtype.dtype, jnp.inexact))), x)
