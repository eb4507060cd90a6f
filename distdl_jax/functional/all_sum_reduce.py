"""All-sum-reduce: the sum of a team's subtensors on each worker; and copies, whose gradient is such a sum."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Self

import jax
from jax import Array

from distdl_jax.functional.block_checks import common_shape_dtype, is_differentiable, outside
from distdl_jax.functional.calls import function_call
from distdl_jax.functional.collectives import allreduce_in_team, allreduce_operations
from distdl_jax.functional.movement import Movement
from distdl_jax.functional.plan import MovementPlan, ShapeDtypes, plan_and_run, taking_part
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.alike import representatives, workers_of
from distdl_jax.plans.broadcasting import reduction_axes, reduction_teams
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.worker_ranks import union
from distdl_jax.transports.world import Workers, World
from distdl_jax.watchdog.programs.ir import Operation


@dataclass(frozen=True)
class TeamMovement:
    """One worker's part of an elementwise movement in `team` (world ranks), whose adjoint is the sum over the team."""

    team: Workers
    differentiable: bool

    def adjoint(self) -> AllSum:
        return AllSum(self.team, self.differentiable)

    def batched(self, n: int) -> Self:
        return self


class AllSum(TeamMovement):
    """One worker's part of an all-sum-reduction."""

    def run(self, world: World, x: Array) -> Array:
        with jax.named_scope("all_sum_reduce"):
            return allreduce_in_team(world, self.team, x)

    def operations(self, worker: int, x: ShapeDtype) -> tuple[Operation, ...]:
        return allreduce_operations(self.team, x)


@dataclass(frozen=True)
class AllSumPlan(MovementPlan):
    """An all-sum-reduction over each of `teams` of world ranks; `inputs` are the shapes and dtypes of their blocks."""

    teams: tuple[Workers, ...]
    inputs: ShapeDtypes = field(hash=False)

    def __post_init__(self) -> None:
        self._check("x", "are summed")

    def _check(self, name: str, who: str) -> None:
        """Reject inputs that differ within a team."""
        if len({self.inputs[worker] for worker in representatives(self.inputs)}) > 1:
            for team in self.teams:
                if len(team) > 1:
                    common_shape_dtype(name, {worker: self.inputs[worker] for worker in team}, who)

    @cached_property
    def team_of(self) -> dict[int, Workers]:
        """From each worker to its team."""
        return {worker: team for team in self.teams for worker in team}

    def output(self, worker: int) -> ShapeDtype:
        return self.inputs[worker]

    @property
    def alike(self) -> Iterable[Workers]:
        # All workers of a team are equivalent, and so are teams of one size with blocks of one shape.
        return teams_alike((team, self.inputs[team[0]]) for team in self.teams)

    def part(self, worker: int) -> Movement | None:
        team = self.teams[0] if len(self.teams) == 1 else self.team_of.get(worker, ())
        if worker not in team:
            return None
        return self._movement(team, is_differentiable(self.inputs[worker].dtype)) if len(team) > 1 else None

    def _movement(self, team: Workers, differentiable: bool) -> Movement:
        return AllSum(team, differentiable)


def plan_all_sum_reduce(
    shape_dtypes: ShapeDtypes,
    P_x: Partition,
    axes_reduce: int | Sequence[int] | None = None,
    axes_keep: int | Sequence[int] | None = None,
) -> AllSumPlan:
    """Plan `all_sum_reduce` from the shapes and dtypes on the workers of P_x, or on those of some of its teams."""
    teams = teams_of(P_x, reduction_axes(P_x.shape, axes_reduce, axes_keep), shape_dtypes)
    return AllSumPlan(teams, taking_part(shape_dtypes, *teams))


def teams_alike(teams: Iterable[tuple[Workers, Hashable]]) -> Iterable[Workers]:
    """Return the workers of teams with the kind of their blocks, grouped by equivalent teams."""
    by_kind: dict[Hashable, list[Workers]] = {}
    for team, kind in teams:
        by_kind.setdefault((len(team), kind), []).append(team)
    return (alike[0] if len(alike) == 1 else tuple(chain.from_iterable(alike)) for alike in by_kind.values())


def teams_of(P_x: Partition, axes: tuple[int, ...], known: ShapeDtypes) -> tuple[Workers, ...]:
    """Return the teams along `axes`, by world rank, with a worker in `known`."""
    teams = reduction_teams(P_x.ranks, P_x.shape, axes)
    if workers_of(known) == union(P_x.ranks):
        return teams
    return tuple(team for team in teams if any(worker in known for worker in team))


@function_call
def all_sum_reduce(
    x: Array,
    P_x: Partition,
    axes_reduce: int | Sequence[int] | None = None,
    axes_keep: int | Sequence[int] | None = None,
) -> Array:
    """Sum the subtensors of `x` along dimensions of `P_x`, with the result on every worker.

    With P_x of shape p_0 x ... x p_{D-1}, workers with equal indices outside `axes_reduce` form a team, and each of
    them gets the sum over its team. The operator is its own adjoint. Along no dimension, or dimensions of one worker,
    it is the identity, without communication.

    **Arguments:**

    - `x`: this worker's subtensor: any shape and dtype, the same within a team. Half precisions are summed in
      float32 and rounded once; the sum of booleans is their "or". Zero-volume outside P_x.
    - `P_x`: the partition.
    - `axes_reduce`, `axes_keep`: dimensions to sum along, or to keep; exactly one of the two.

    **Returns:** an array like `x`; outside P_x, `x` itself.

    **Raises:** `InvalidArgumentError`, on every worker, for a dimension that P_x doesn't have; `PlanError`, on every
    worker of a team, if shapes or dtypes differ within it.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([2, 2])
    ...     return int(dj.functional.all_sum_reduce(jnp.int32(10**P.rank), P, axes_reduce=0))
    >>> dj.simulate(4, program)
    [101, 1010, 101, 1010]

    Source: DistDL documentation, "backends"; Hewett and Grady (2020), all-sum-reduce.
    """
    check_partitions(P_x=P_x)
    team = P_x.create_allreduction_partition(axes_reduce, axes_keep)
    if team.size <= 1:
        return x if P_x.active else outside(P_x.world, x)
    plan = partial(plan_all_sum_reduce, P_x=P_x, axes_reduce=axes_reduce, axes_keep=axes_keep)
    along = reduction_axes(P_x.shape, axes_reduce, axes_keep)
    return plan_and_run(f"all_sum_reduce along {along}", plan, x, P_x, team=team.ranks)


class Copy(TeamMovement):
    """One worker's copy of a value that is replicated over the team."""

    def run(self, world: World, x: Array) -> Array:
        return x

    def operations(self, worker: int, x: ShapeDtype) -> tuple[Operation, ...]:
        return ()
