"""All workers of a plan in one process: what each of them does, carried out on numpy arrays.

The parts are the library's own, also those of the adjoint; exchanges run in the simulator, under the rules of blocking
messages. What each worker holds in the end is compared with what the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from simulator import simulate

import distdl_jax as dj
from distdl_jax.functional.all_sum_reduce import AllSum
from distdl_jax.functional.box_exchange import BoxMovement
from distdl_jax.functional.broadcast import Replication
from distdl_jax.functional.movement import Movement
from distdl_jax.functional.plan import MovementPlan, Plan
from distdl_jax.plans.shape_dtype import ShapeDtype

Blocks = dict[int, np.ndarray]


def shape_dtypes(blocks: Mapping[int, Any]) -> dict[int, ShapeDtype]:
    """Return the shapes and dtypes of arrays."""
    return {worker: ShapeDtype(block.shape, block.dtype) for worker, block in blocks.items()}


def planned(size: int, plan: Callable[[dj.Partition], Plan]) -> Plan:
    """Return the plan that each of `size` workers makes from its partition of all of them: the same on all."""
    plans = [plan(dj.planning_world(size, rank)) for rank in range(size)]
    assert all(each == plans[0] and hash(each) == hash(plans[0]) for each in plans)
    assert all(each.outputs == plans[0].outputs for each in plans)
    return plans[0]


def play(plan: MovementPlan, blocks: Blocks) -> Blocks:
    """Return all workers' blocks after a movement; a worker that takes no part keeps its block."""
    assert {worker: of for worker, of in shape_dtypes(blocks).items() if worker in plan.workers} == _inputs(plan)
    result = carry_out({worker: plan.part(worker) for worker in blocks}, blocks)
    assert shape_dtypes(result) == plan.after(shape_dtypes(blocks))
    return result


def play_adjoint(plan: MovementPlan, blocks: Blocks) -> Blocks:
    """Return all workers' blocks after the adjoint, from those after the movement."""
    parts = {worker: plan.part(worker) for worker in blocks}
    result = carry_out({worker: part and part.adjoint() for worker, part in parts.items()}, blocks)
    assert {worker: of for worker, of in shape_dtypes(result).items() if worker in plan.workers} == _inputs(plan)
    return result


def _inputs(plan: Any) -> dict[int, ShapeDtype]:
    return dict(plan.inputs)


def carry_out(parts: Mapping[int, Movement | None], blocks: Blocks) -> Blocks:
    """Carry out every worker's part on its block."""
    moving = {worker: part for worker, part in parts.items() if part is not None}
    if not moving:
        return blocks
    (kind,) = {type(part) for part in moving.values()}
    of_kind = {Replication: _replicated, AllSum: _summed, BoxMovement: _exchanged}[kind]
    return blocks | of_kind(moving, blocks)


def _replicated(parts: dict[int, Any], blocks: Blocks) -> Blocks:
    tasks = {task for part in parts.values() for task in (part.as_root, part.as_member) if task is not None}
    result = {}
    for worker, part in parts.items():
        after = part.copy if part.is_broadcast else part.source
        result[worker] = np.zeros(after.shape, after.dtype)
    for task in tasks:
        root, members = task.team.root, task.team.members
        assert parts[root].as_root == task and all(parts[member].as_member == task for member in members)
        if parts[root].is_broadcast:
            assert ShapeDtype(blocks[root].shape, blocks[root].dtype) == task.shape_dtype
            result |= dict.fromkeys(members, blocks[root])
        else:
            assert all(blocks[member].shape == task.shape_dtype.shape for member in members)
            result[root] = sum(blocks[member] for member in members).astype(task.shape_dtype.dtype)
    return result


def _summed(parts: dict[int, Any], blocks: Blocks) -> Blocks:
    assert all(parts[worker] == part for part in parts.values() for worker in part.team)
    return {worker: sum(blocks[each] for each in part.team) for worker, part in parts.items()}


def _exchanged(parts: dict[int, Any], blocks: Blocks) -> Blocks:
    assert len({(part.name, part.copies, part.adds) for part in parts.values()}) == 1
    given = {}
    for worker, part in parts.items():
        assert ShapeDtype(blocks[worker].shape, blocks[worker].dtype) == part.source
        first = part.steps[0].in_shape if part.steps else blocks[worker].shape
        given[worker] = blocks[worker].reshape(first) if blocks[worker].size else np.zeros(first, blocks[worker].dtype)
    moved = simulate({worker: part.steps for worker, part in parts.items()}, given)
    result = {}
    for worker, part in parts.items():
        result[worker] = moved[worker] if moved[worker].size else np.zeros(part.target.shape)
        result[worker] = result[worker].reshape(part.target.shape)
        result[worker] = result[worker].astype(part.target.dtype)
    return result
