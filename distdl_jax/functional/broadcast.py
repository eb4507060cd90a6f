"""Broadcast and sum-reduce between two partitions: adjoints of each other, with one plan for both.

Source: the DistDL documentation, "broadcast" and "backends"; Hewett and Grady (2020).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.all_sum_reduce import teams_alike
from distdl_jax.functional.block_checks import (
    check_kinds,
    check_placeholders,
    common_shape_dtype,
    is_differentiable,
    outside,
    zero_volume_shape,
)
from distdl_jax.functional.calls import function_call
from distdl_jax.functional.collectives import (
    LARGEST_TREE,
    broadcast_in_team,
    broadcast_operations,
    reduce_in_team,
    reduce_operations,
    tag_of,
    tied_zeros,
)
from distdl_jax.functional.plan import MovementPlan, ShapeDtypes, Unmoved, flags_text, plan_and_run, taking_part
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.alike import representatives
from distdl_jax.plans.broadcasting import BroadcastRule, Team
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.worker_ranks import positions
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import Workers, World
from distdl_jax.validation import checked_boolean
from distdl_jax.watchdog.programs.ir import Operation


@dataclass(frozen=True)
class _Task:
    """One worker's part in one team."""

    team: Team
    shape_dtype: ShapeDtype

    @property
    def tag(self) -> int:
        """The tag of the messages, the same on all workers of the team."""
        return tag_of(self.team, self.shape_dtype)

    def batched(self, n: int) -> _Task:
        return replace(self, shape_dtype=self.shape_dtype.batched(n))


@dataclass(frozen=True)
class Replication:
    """One worker's part of a broadcast (`is_broadcast`), or otherwise a sum-reduction, between a source and its copies.

    - `as_root`, `as_member`: the tasks in the team with this worker as root, and in the team in which it holds a copy.
    - `root_first`: whether the team of which it is the root comes first in the order of all teams.
    - `source`, `copy`: this worker's blocks on the source's side, and on the copies' side; zero-volume if it is in
      no such team.
    """

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
        return replace(
            self,
            as_root=self.as_root and self.as_root.batched(n),
            as_member=self.as_member and self.as_member.batched(n),
            source=self.source.batched(n),
            copy=self.copy.batched(n),
        )

    def run(self, world: World, x: Array) -> Array:
        if self.is_broadcast:
            name, in_team = "broadcast", broadcast_in_team
            giving, getting, target = self.as_root, self.as_member, self.copy
        else:
            name, in_team = "sum_reduce", reduce_in_team
            giving, getting, target = self.as_member, self.as_root, self.source
        y, done = None, []
        with jax.named_scope(name):
            for task in self._tasks():
                given = x if task == giving else None
                result = in_team(world, task.team.participants, given, x, task.shape_dtype, task.tag)
                if task == getting:
                    y = result
                else:
                    done.append(result)
            return tie(tied_zeros(target, x) if y is None else y, *done)

    def operations(self, worker: int, x: ShapeDtype) -> tuple[Operation, ...]:
        in_team = broadcast_operations if self.is_broadcast else reduce_operations
        return tuple(
            op for task in self._tasks() for op in in_team(task.team.participants, worker, task.shape_dtype, task.tag)
        )

    def _tasks(self) -> list[_Task]:
        """Return this worker's tasks in the global order of teams, so that no cycle can form."""
        tasks = [self.as_root, self.as_member] if self.root_first else [self.as_member, self.as_root]
        return [task for task in dict.fromkeys(tasks) if task is not None]


@dataclass(frozen=True)
class ReplicationPlan(MovementPlan):
    """A broadcast (`is_broadcast`), or otherwise a sum-reduction, between a source and its copies.

    - `rule`: the source of each copy, by indices in the two teams.
    - `source`, `copies`: the world ranks of the two partitions.
    - `inputs`: the shapes and dtypes of the blocks on both.
    - `preserve_batch`: whether a zero-volume output keeps the first dimension of the worker's input.
    """

    rule: BroadcastRule
    source: Workers
    copies: Workers
    inputs: ShapeDtypes = field(hash=False)
    is_broadcast: bool
    preserve_batch: bool

    def __post_init__(self) -> None:
        if not self.is_broadcast and len({self.inputs[worker] for worker in representatives(self.inputs)}) > 1:
            # Every worker checks all teams, so that all raise the same error.
            for root in self.source:
                members = self._team(root).members
                common_shape_dtype("x", {worker: self.inputs[worker] for worker in members})
        check_kinds("x", self.inputs, self._dtype)
        check_placeholders("x", self.inputs, self.source if self.is_broadcast else self.copies)

    @property
    def _dtype(self) -> np.dtype:
        return self.inputs[(self.source if self.is_broadcast else self.copies)[0]].dtype

    @cached_property
    def _places(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """From the workers of the source, and of the copies, to their indices there."""
        return positions(self.source), positions(self.copies)

    @cached_property
    def _teams(self) -> dict[int, Team]:
        """The requested teams, by the root's world rank."""
        return {}

    def _team(self, root: int) -> Team:
        if root not in self._teams:
            places = self.rule.destinations(self._places[0][root])
            is_all = len(places) == len(self.copies)  # then they are in order
            members = self.copies if is_all else tuple([self.copies[place] for place in places])
            self._teams[root] = Team(root, members)
        return self._teams[root]

    def _root_of(self, worker: int) -> int | None:
        """Return the root of the team in which `worker` holds a copy; None if there is none."""
        place = self._places[1].get(worker)
        return None if place is None else self.source[self.rule.source_of(place)]

    def _moved(self, root: int) -> ShapeDtype:
        """Return the common subtensor of the team of `root`."""
        return self.inputs[root if self.is_broadcast else self._team(root).members[0]]

    @property
    def alike(self) -> Iterable[Workers]:
        if any(self._root_of(root) != root for root in self.source):  # workers may be in two teams
            return super().alike
        teams: list[tuple[Workers, Hashable]] = []
        for root in self.source:
            team, moved = self._team(root).participants, self._moved(root)
            if len(team) > LARGEST_TREE:
                teams.append((team, moved))
            else:
                teams += [((worker,), (len(team), place, moved)) for place, worker in enumerate(team)]
        return teams_alike(teams)

    def output(self, worker: int) -> ShapeDtype:
        as_root, as_member = (worker if worker in self._places[0] else None), self._root_of(worker)
        giving, getting = (as_root, as_member) if self.is_broadcast else (as_member, as_root)
        if getting is not None:
            return self._moved(getting)
        assert giving is not None  # a participating worker is in one of the two partitions
        return ShapeDtype(zero_volume_shape(self.inputs[worker].shape, self.preserve_batch), self._moved(giving).dtype)

    @property
    def outputs(self) -> ShapeDtypes:
        moved: dict[int, ShapeDtype] = {}  # team by team: among 100,000 workers, a root is soon found
        for root in self.source:
            moved |= dict.fromkeys(self._team(root).members if self.is_broadcast else (root,), self._moved(root))
        return {worker: moved[worker] if worker in moved else self.output(worker) for worker in self.workers}

    def part(self, worker: int) -> Replication | None:
        if worker not in self.inputs:
            return None
        root = self._root_of(worker)
        as_root = _Task(self._team(worker), self._moved(worker)) if worker in self._places[0] else None
        as_member = None if root is None else _Task(self._team(root), self._moved(root))
        before, after = self.inputs[worker], self.output(worker)
        return Replication(
            as_root,
            as_member,
            root_first=as_root is not None and root is not None and self.source.index(worker) < self.source.index(root),
            source=before if self.is_broadcast else after,
            copy=after if self.is_broadcast else before,
            differentiable=is_differentiable(self._dtype),
            is_broadcast=self.is_broadcast,
        )


def broadcast_rule(
    P_x: Partition, P_y: Partition, transpose_src: bool = False, transpose_dest: bool = False
) -> BroadcastRule:
    """Return the rule by which `P_x` broadcasts to `P_y`."""
    src, dest = checked_boolean("transpose_src", transpose_src), checked_boolean("transpose_dest", transpose_dest)
    return BroadcastRule(P_x.shape, P_y.shape, src, dest)


def sum_rule(
    P_x: Partition, P_y: Partition, transpose_src: bool = False, transpose_dest: bool = False
) -> BroadcastRule:
    """Return the broadcast from `P_y` to `P_x` whose adjoint is their sum-reduction."""
    src, dest = checked_boolean("transpose_src", transpose_src), checked_boolean("transpose_dest", transpose_dest)
    try:
        return broadcast_rule(P_y, P_x, dest, src)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"To sum from P_x to P_y, P_y must broadcast to P_x. {error}") from None


def plan_replication(
    shape_dtypes: ShapeDtypes,
    P_x: Partition,
    P_y: Partition,
    *,
    is_broadcast: bool,
    transpose_src: bool = False,
    transpose_dest: bool = False,
    preserve_batch: bool = True,
) -> MovementPlan:
    """Plan a broadcast or a sum-reduction from the shapes and dtypes on at least the workers of both."""
    rule = (broadcast_rule if is_broadcast else sum_rule)(P_x, P_y, transpose_src, transpose_dest)
    inputs = taking_part(shape_dtypes, P_x.ranks, P_y.ranks)
    if P_x.ranks == P_y.ranks and rule.is_identity:
        return Unmoved(inputs)
    source, copies = (P_x.ranks, P_y.ranks) if is_broadcast else (P_y.ranks, P_x.ranks)
    return ReplicationPlan(rule, source, copies, inputs, is_broadcast, preserve_batch)


plan_broadcast = partial(plan_replication, is_broadcast=True)
plan_sum_reduce = partial(plan_replication, is_broadcast=False)


def _run(
    x: Array, P_x: Partition, P_y: Partition, is_broadcast: bool, src: bool, dest: bool, preserve_batch: bool
) -> Array:
    """Broadcast or sum-reduce `x` from P_x to P_y; without agreement between workers if nothing moves."""
    check_partitions(P_x=P_x, P_y=P_y)
    preserve_batch = checked_boolean("preserve_batch", preserve_batch)
    rule = (broadcast_rule if is_broadcast else sum_rule)(P_x, P_y, src, dest)
    if P_x.ranks == P_y.ranks and rule.is_identity:
        return x if P_x.active else outside(P_x.world, x)
    options: dict[str, Any] = {"transpose_src": src, "transpose_dest": dest, "preserve_batch": preserve_batch}
    plan = partial(plan_replication, P_x=P_x, P_y=P_y, is_broadcast=is_broadcast, **options)
    flags = flags_text(**{name: (flag, name == "preserve_batch") for name, flag in options.items()})
    return plan_and_run(("broadcast" if is_broadcast else "sum_reduce") + flags, plan, x, P_x, P_y)


@function_call
def broadcast(
    x: Array,
    P_x: Partition,
    P_y: Partition,
    *,
    transpose_src: bool = False,
    transpose_dest: bool = False,
    preserve_batch: bool = True,
) -> Array:
    """Copy the subtensors of `x` from `P_x` to `P_y`, along dimensions with one worker in `P_x`.

    With P_x of shape p_0 x ... x p_{D-1} and P_y of shape q_0 x ... x q_{E-1}, D <= E, every p_d, counted from the last
    dimension, is 1 or equal to its q; missing dimensions of P_x count as 1. The worker of P_y at an index gets the
    subtensor of the worker of P_x at the same index, with 0 in dimensions of one worker. The adjoint sums the
    cotangents of the copies back onto their source: `sum_reduce(dy, P_y, P_x)`.

    **Arguments:**

    - `x`: this worker's subtensor if it is in P_x: any shape and dtype, which the receiving workers need not know.
      Elsewhere a zero-volume array, floating or complex if and only if the data is.
    - `P_x`, `P_y`: the source and target partitions. Their teams may be equal, overlap or be disjoint.
    - `transpose_src`, `transpose_dest`: count the worker (i, j) of P_x, or of P_y, as (j, i) (the index reversed).
    - `preserve_batch`: whether a zero-volume output keeps the first dimension of the worker's input.

    **Returns:** in P_y the copy; in P_x only, a zero-volume array of the data's dtype; in neither, `x`. If both
    partitions are the same and no index moves, `x` itself, without communication.

    **Raises:** `InvalidTypeError` if a flag is not True or False; `InvalidArgumentError`, on every worker, if the
    shapes don't fit; `PlanError` if a placeholder is not of the data's kind.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition()
    ...     P_x, P_y = P.grid([1, 2]), P.grid([2, 2])
    ...     x = jnp.full(1, 10 * P_x.rank) if P_x.active else dj.zero_volume_tensor(dtype=int)
    ...     return dj.functional.broadcast(x, P_x, P_y).tolist()
    >>> dj.simulate(4, program)
    [[0], [10], [0], [10]]

    Source: DistDL documentation, "broadcast".
    """
    return _run(x, P_x, P_y, True, transpose_src, transpose_dest, preserve_batch)


@function_call
def sum_reduce(
    x: Array,
    P_x: Partition,
    P_y: Partition,
    *,
    transpose_src: bool = False,
    transpose_dest: bool = False,
    preserve_batch: bool = True,
) -> Array:
    """Sum the subtensors of `x` on `P_x` onto `P_y`, along dimensions with one worker in `P_y`.

    The adjoint of the broadcast from P_y to P_x: with P_y of shape q_0 x ... x q_{E-1}, E <= D, every q, counted from
    the last dimension, is 1 or equal to P_x's size there. The worker of P_y at an index gets the sum over the workers
    of P_x with the same index in all dimensions with several workers in P_y. Its adjoint is `broadcast(dy, P_y, P_x)`.

    **Arguments:**

    - `x`: this worker's subtensor if it is in P_x, of the same shape and dtype as the other terms of its sum; elsewhere
      a zero-volume array, floating or complex if and only if the data is. Half precisions are summed in float32 and
      rounded once; the sum of booleans is their "or".
    - `P_x`, `P_y`: the partitions of the terms and of the sums. A worker of P_y need not be in P_x.
    - `transpose_src`, `transpose_dest`: count the worker (i, j) of P_x, or of P_y, as (j, i) (the index reversed).
    - `preserve_batch`: whether a zero-volume output keeps the first dimension of the worker's input.

    **Returns:** in P_y the sum; in P_x only, a zero-volume array of the data's dtype; in neither, `x`.

    **Raises:** `InvalidTypeError` if a flag is not True or False; `InvalidArgumentError`, on every worker, if the
    shapes don't fit; `PlanError` if the terms of a sum differ in shape or dtype, or a placeholder is not of the
    data's kind.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition()
    ...     x = jnp.array([10**P.rank])
    ...     return dj.functional.sum_reduce(x, P.grid([2, 2]), P.grid([1, 2])).tolist()
    >>> dj.simulate(4, program)
    [[101], [1010], [[]], [[]]]

    Source: DistDL documentation, "broadcast" and "backends".
    """
    return _run(x, P_x, P_y, False, transpose_src, transpose_dest, preserve_batch)
