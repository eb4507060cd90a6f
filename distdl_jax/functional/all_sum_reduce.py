"""All-sum-reduce, the sum of a team's subtensors on each worker; and replicated values, with such a gradient."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, Self

import jax
import numpy as np
from jax import Array

from distdl_jax.errors import PlanError
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
from distdl_jax.transports.agreement import exchange_named_shapes, is_array
from distdl_jax.transports.world import Workers, World
from distdl_jax.validation import checked_axes
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

    @property
    def same_on(self) -> Workers:
        """The workers that have the same result."""
        return self.team

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


@dataclass(frozen=True)
class ReplicatedPlan(AllSumPlan):
    """A value replicated on each of `teams`: only its gradient moves, which is summed over the team."""

    name: str = field(default="tree", compare=False)

    def __post_init__(self) -> None:
        self._check(self.name, "hold copies of it")

    def _movement(self, team: Workers, differentiable: bool) -> Copy:
        return Copy(team, differentiable)


def plan_replicated(
    shape_dtypes: ShapeDtypes,
    P: Partition,
    axes: int | Sequence[int] | None = None,
    name: str = "tree",
    kind: type[ReplicatedPlan] = ReplicatedPlan,
) -> ReplicatedPlan:
    """Plan one leaf of `replicated` from the shapes and dtypes on the workers of P, or on some of its teams."""
    teams = teams_of(P, _along(P, axes), shape_dtypes)
    return kind(teams, taking_part(shape_dtypes, *teams), name)


def replicated(tree: Any, P: Partition, axes: int | Sequence[int] | None = None) -> Any:
    """Mark values as replicated on all workers of `P`, so that their gradient is the sum over the copies.

    A parameter that every worker uses with its own data, such as the scale of a normalisation, is one variable with
    many copies. JAX gives each worker the gradient of its own copy; the optimiser needs their sum, the same on all
    workers, to keep the copies equal. With P of shape p_0 x ... x p_{D-1}, workers with equal indices outside `axes`
    hold copies of one value:

        y_w = x_w,        the gradient on w = the sum of dy_u over all u that hold copies of x_w

    There is no communication in the forward pass. Apply it to parameters, where a function starts to use them, not to
    values computed from other workers' data: the gradient of the output of an `all_sum_reduce` or a `broadcast` is
    already summed.

    **Arguments:**

    - `tree`: a pytree of arrays of any shape and dtype, the same on all workers of a team; other leaves are unchanged.
      Anything outside P. The copies must be equal; their values are not compared.
    - `P`: the partition whose workers hold copies.
    - `axes`: the dimensions of P along which values are replicated. Default: all, for a single value.

    **Returns:** `tree`.

    **Raises:** `InvalidArgumentError` for a dimension that P doesn't have; `PlanError`, on every worker of a team,
    if leaves differ in shape or dtype between its workers.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().create_partition_inclusive([0])
    >>> float(jax.grad(lambda scale: (replicated(scale, P) * jax.numpy.arange(3.0)).sum())(2.0))
    3.0

    Source: Hewett and Grady (2020): the adjoint of a copy is a sum. `TensorSpec(..., replicated=...)` describes it.
    """
    check_partitions(P=P)
    return _copied(tree, P, _along(P, axes), ReplicatedPlan)


def _copied(tree: Any, P: Partition, along: tuple[int, ...], kind: type[ReplicatedPlan]) -> Any:
    """Return a tree of copies along dimensions of P, whose arrays are moved by plans of this kind."""
    team = P.create_allreduction_partition(along)
    if team.size <= 1:
        return tree
    paths_and_leaves, structure = jax.tree.flatten_with_path(tree)
    arrays = {f"tree{jax.tree_util.keystr(path)}": leaf for path, leaf in paths_and_leaves if is_array(leaf)}
    shapes = exchange_named_shapes(P.world, team.ranks, f"replicated on {P.describe()} along {along}", arrays)
    _check_names(shapes)
    plans = [
        plan_replicated({worker: of_worker[name] for worker, of_worker in shapes.items()}, P, along, name, kind)
        for name in arrays
    ]
    copies = iter([plan.run(P.world, x) for plan, x in zip(plans, arrays.values(), strict=True)])
    return jax.tree.unflatten(structure, [next(copies) if is_array(leaf) else leaf for _, leaf in paths_and_leaves])


def _along(P: Partition, axes: int | Sequence[int] | None) -> tuple[int, ...]:
    return tuple(range(P.dim)) if axes is None else checked_axes("axes", axes, P.shape)


def _check_names(shapes: Mapping[int, Mapping[str, ShapeDtype]]) -> None:
    """Reject trees that differ between the workers of a team."""
    first = min(shapes)
    for worker, of_worker in shapes.items():
        if different := sorted(of_worker.keys() ^ shapes[first].keys()):
            holder = worker if different[0] in of_worker else first
            raise PlanError(
                f"`tree` must have the same arrays on all workers that hold copies of it, but `{different[0]}` is on "
                f"worker {holder} and not on worker {worker + first - holder}."
            )


# --- from copies of a vector to blocks, and back ----------------------------------------------------------------------

# `all_sum_reduce` and `replicated` map blocks to blocks: in <x, y>, the sum over all workers, each copy counts. When
# every worker differentiates a function of copies alone, each of p backward passes begins with 1. So there a vector
# counts once, <s, t> = <s_w, t_w> on any worker w; and between such vectors and blocks
#     share s = (s, ..., s),    total x = x_0 + ... + x_{p-1},    <share s, x> = <s, total x>:
# each is the adjoint of the other, in derivatives of any order. (With the adjoint of `all_sum_reduce`, a gradient would
# be p times too large.)


class Share(Copy):
    """One worker's part of the map from a vector, of which all have copies, to a block on each worker."""

    def adjoint(self) -> AllSum:
        return Total(self.team, self.differentiable)


class Total(AllSum):
    """One worker's part of the map from blocks to their sum, of which all get copies."""

    def adjoint(self) -> Any:
        return Share(self.team, self.differentiable)


@dataclass(frozen=True)
class SharePlan(ReplicatedPlan):
    """A vector with copies on each of `teams`, as a block of each worker."""

    def _movement(self, team: Workers, differentiable: bool) -> Copy:
        return Share(team, differentiable)


@dataclass(frozen=True)
class TotalPlan(AllSumPlan):
    """The sum of the blocks of each of `teams`, as one vector with copies."""

    def _movement(self, team: Workers, differentiable: bool) -> Movement:
        return Total(team, differentiable)


def share(tree: Any, P: Partition) -> Any:
    """Return vectors of which all workers of P have copies as blocks, whose cotangents are summed."""
    return _copied(tree, P, _along(P, None), SharePlan)


def total_of_blocks(x: Array, P: Partition) -> Array:
    """Return the sum of the blocks of P's workers, which have equal shapes and dtypes, as copies of one vector."""
    block = ShapeDtype(x.shape, np.dtype(x.dtype))
    return TotalPlan((P.ranks,), dict.fromkeys(P.ranks, block)).run(P.world, x)
