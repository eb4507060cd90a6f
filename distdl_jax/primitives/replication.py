"""Broadcast and sum-reduce: copies of a subtensor on every worker of a team, and their sum back on its root.

Each is the other's adjoint. Source: the DistDL documentation, "broadcast" and "backends"; Hewett and Grady (2020).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from distdl_jax.backends.base import World
from distdl_jax.partition import Partition, check_partitions
from distdl_jax.plans.broadcasting import BroadcastRule, Team, teams_of_worker
from distdl_jax.primitives.handshake import (
    ShapeDtype,
    checked_kinds,
    common_shape_dtype,
    exchange_shape_dtypes,
    zero_volume_shape,
)
from distdl_jax.primitives.movement import move
from distdl_jax.primitives.team_operations import broadcast_in_team, reduce_in_team
from distdl_jax.primitives.tie import tie


@dataclass(frozen=True)
class _Task:
    """This worker's part in one team."""

    team: Team
    shape_dtype: ShapeDtype

    @property
    def tag(self) -> int:
        """The same on all workers of the team; below the least upper bound on tags that MPI guarantees."""
        return zlib.crc32(repr((self.team, self.shape_dtype)).encode()) % 32768


@dataclass(frozen=True)
class Replication:
    """One worker's part of a broadcast (`is_broadcast`) or a sum-reduction (otherwise) between a source and its copies.

    - `as_root`, `as_member`: the tasks in the team that this worker is the root of, and holds a copy in.
    - `root_first`: whether the team that it is the root of comes first in the order of all teams.
    - `source`, `copy`: what this worker holds on the source's side, and on the copies' side; zero-volume where it
      is in no such team.
    """

    world: World
    as_root: _Task | None
    as_member: _Task | None
    root_first: bool
    source: ShapeDtype
    copy: ShapeDtype
    differentiable: bool
    is_broadcast: bool

    def adjoint(self) -> Replication:
        return replace(self, is_broadcast=not self.is_broadcast)

    def batched(self, n: int) -> Replication:
        def task(task: _Task | None) -> _Task | None:
            return None if task is None else replace(task, shape_dtype=task.shape_dtype.batched(n))

        return replace(
            self,
            as_root=task(self.as_root),
            as_member=task(self.as_member),
            source=self.source.batched(n),
            copy=self.copy.batched(n),
        )

    def run(self, x: Array) -> Array:
        if self.is_broadcast:
            name, in_team = "broadcast", broadcast_in_team
            giving, getting, target = self.as_root, self.as_member, self.copy
        else:
            name, in_team = "sum_reduce", reduce_in_team
            giving, getting, target = self.as_member, self.as_root, self.source
        y, done = None, []
        with jax.named_scope(name):
            for task in self._tasks():
                mine = x if task == giving else None
                result = in_team(self.world, task.team.participants, mine, x, task.shape_dtype, task.tag)
                if task == getting:
                    y = result
                else:
                    done.append(result)
            if y is None:
                y = tie(jnp.zeros(target.shape, target.dtype), x)
            return tie(y, *done)

    def _tasks(self) -> list[_Task]:
        """This worker's tasks in the one order in which all workers go through the teams, so no cycle can form."""
        tasks = [self.as_root, self.as_member] if self.root_first else [self.as_member, self.as_root]
        return [task for task in dict.fromkeys(tasks) if task is not None]


def broadcast(
    x: Array,
    P_x: Partition,
    P_y: Partition,
    *,
    transpose_src: bool = False,
    transpose_dest: bool = False,
    preserve_batch: bool = True,
) -> Array:
    """Copy the subtensors of `x` from `P_x` to `P_y`, along the dimensions in which `P_x` has one worker.

    With P_x of shape p_0 x ... x p_{D-1} and P_y of shape q_0 x ... x q_{E-1}, D <= E, every p_d, counted from the
    last dimension, is 1 or equal to its q; missing dimensions of P_x count as 1. The worker of P_y at an index gets
    the subtensor of the worker of P_x at the same index, 0 where P_x has one worker. The adjoint sums what the
    copies' cotangents are back to where the subtensor came from: `sum_reduce(dy, P_y, P_x)`.

    **Arguments:**

    - `x`: this worker's subtensor where it is in P_x: any shape and dtype, which the workers that get it need not
      know. Elsewhere a zero-volume array, floating or complex exactly if the data is.
    - `P_x`, `P_y`: the partitions that the subtensors are on and go to. Their teams may be equal, overlap or not.
    - `transpose_src`, `transpose_dest`: count the worker (i, j) of P_x, or of P_y, as (j, i) (the index reversed).
    - `preserve_batch`: whether a zero-volume output keeps the first dimension of the worker's input.

    **Returns:** in P_y the copy; in P_x only, a zero-volume array of the data's dtype; in neither, `x`. Where both
    partitions are the same and no index moves, `x` itself, without communication.

    **Raises:** `InvalidArgumentError`, on every worker, where the shapes don't fit; `PlanError` where a placeholder
    is not of the data's kind.

    Source: DistDL documentation, "broadcast".
    """
    check_partitions(P_x=P_x, P_y=P_y)
    rule = BroadcastRule(P_x.shape, P_y.shape, transpose_src, transpose_dest)
    if P_x.ranks == P_y.ranks and rule.is_identity:
        return x
    plan = _plan(x, P_x, P_y, rule, preserve_batch, is_broadcast=True)
    return x if plan is None else move(plan, x)


def sum_reduce(
    x: Array,
    P_x: Partition,
    P_y: Partition,
    *,
    transpose_src: bool = False,
    transpose_dest: bool = False,
    preserve_batch: bool = True,
) -> Array:
    """Sum the subtensors of `x` on `P_x` onto `P_y`, along the dimensions in which `P_y` has one worker.

    The broadcast from P_y to P_x read backwards, and its adjoint: with P_y of shape q_0 x ... x q_{E-1}, E <= D,
    every q, counted from the last dimension, is 1 or equal to P_x's size there. The worker of P_y at an index gets
    the sum over the workers of P_x that agree with it in every dimension in which P_y has more than one worker. The
    adjoint of this is `broadcast(dy, P_y, P_x)`.

    **Arguments:**

    - `x`: this worker's subtensor where it is in P_x, of the same shape and dtype as all that it is summed with;
      elsewhere a zero-volume array, floating or complex exactly if the data is. Half precisions are summed in
      float32 and rounded once; the sum of truth values is their "or".
    - `P_x`, `P_y`: the partitions that the terms are on and the sums go to. A worker of P_y need not be a source.
    - `transpose_src`, `transpose_dest`: count the worker (i, j) of P_x, or of P_y, as (j, i) (the index reversed).
    - `preserve_batch`: whether a zero-volume output keeps the first dimension of the worker's input.

    **Returns:** in P_y the sum; in P_x only, a zero-volume array of the data's dtype; in neither, `x`.

    **Raises:** `InvalidArgumentError`, on every worker, where the shapes don't fit; `PlanError` where the terms of a
    sum differ in shape or dtype, or a placeholder is not of the data's kind.

    Source: DistDL documentation, "broadcast" and "backends".
    """
    check_partitions(P_x=P_x, P_y=P_y)
    try:
        rule = BroadcastRule(P_y.shape, P_x.shape, transpose_dest, transpose_src)
    except ValueError as error:
        raise type(error)(f"To sum from P_x to P_y, P_y must broadcast to P_x. {error}") from None
    if P_x.ranks == P_y.ranks and rule.is_identity:
        return x
    plan = _plan(x, P_y, P_x, rule, preserve_batch, is_broadcast=False)
    return x if plan is None else move(plan, x)


def _plan(
    x: Any,
    P_source: Partition,
    P_copies: Partition,
    rule: BroadcastRule,
    preserve_batch: bool,
    is_broadcast: bool,
) -> Replication | None:
    """This worker's plan; None where it is in neither partition. Collective in the union of both, at trace time."""
    world = P_source.world
    union = P_source.create_partition_union(P_copies)
    if not union.active:
        return None
    P_x, P_y = (P_source, P_copies) if is_broadcast else (P_copies, P_source)
    purpose = f"{'broadcast' if is_broadcast else 'sum_reduce'} from {P_x.describe()} to {P_y.describe()}"
    shape_dtypes = exchange_shape_dtypes(world, tuple(sorted(union.ranks)), purpose, "x", x)
    holders = P_source.ranks if is_broadcast else P_copies.ranks
    # Every worker checks all teams, so that all raise the same where one does not fit.
    teams = {
        rank: Team(rank, tuple(P_copies.ranks[i] for i in rule.destinations(place)))
        for place, rank in enumerate(P_source.ranks)
    }
    of_team = {
        rank: common_shape_dtype(
            "x", {worker: shape_dtypes[worker] for worker in ((rank,) if is_broadcast else team.members)}
        )
        for rank, team in teams.items()
    }
    dtype = shape_dtypes[holders[0]].dtype
    checked_kinds("x", shape_dtypes, dtype)
    as_root, as_member = teams_of_worker(rule, P_source.ranks, P_copies.ranks, world.rank)
    root_task = None if as_root is None else _Task(as_root, of_team[as_root.root])
    member_task = None if as_member is None else _Task(as_member, of_team[as_member.root])
    mine = shape_dtypes[world.rank]
    task = root_task or member_task
    nothing = ShapeDtype(zero_volume_shape(mine.shape, preserve_batch), task.shape_dtype.dtype if task else dtype)
    target_task = member_task if is_broadcast else root_task
    target = nothing if target_task is None else target_task.shape_dtype
    root_first = (
        as_root is not None
        and as_member is not None
        and P_source.ranks.index(as_root.root) < P_source.ranks.index(as_member.root)
    )
    return Replication(
        world,
        root_task,
        member_task,
        root_first,
        source=mine if is_broadcast else target,
        copy=target if is_broadcast else mine,
        differentiable=bool(jnp.issubdtype(dtype, jnp.inexact)),
        is_broadcast=is_broadcast,
    )
