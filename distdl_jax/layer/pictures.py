"""What a layer does, drawn from its plan: who owns what before and after, and what moves in between."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.typing import DTypeLike

from distdl_jax.drawing.blocks import MOST, Blocks
from distdl_jax.drawing.drawing import Drawing
from distdl_jax.drawing.halos import Strip
from distdl_jax.drawing.movements import Message, Piece, Step, TeamCall, draw_movements
from distdl_jax.errors import PlanError
from distdl_jax.layer.output_specs import spec_of_blocks
from distdl_jax.plans.alike import derived, on_grids
from distdl_jax.plans.decomposition import intersect
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.all_gather import GatherPlan
from distdl_jax.primitives.broadcast import ReplicationPlan
from distdl_jax.primitives.halo_exchange import HaloExchangePlan, RangesPlan
from distdl_jax.primitives.plan import MovementPlan, Plan, ShapeDtypes
from distdl_jax.primitives.repartition import RepartitionPlan
from distdl_jax.programs.ir import Operation
from distdl_jax.tensors import TensorSpec, check_spec, drawn_blocks

if TYPE_CHECKING:
    from distdl_jax.tools.cost.layers import LayerMovement

MOST_PARAMETERS = 4
"""Of how many parameters the blocks are drawn."""

NAMES = {"all_sum": "all_sum_reduce", "extremum": "all_reduce"}
"""Of movements that are called otherwise than their plans."""

MOST_OPERATIONS = 10_000
"""How many operations of one movement are looked at: where each of many workers sends to all others, it takes long."""


def input_blocks(spec: TensorSpec, dtype: np.dtype) -> ShapeDtypes:
    """Return the shapes and dtypes of all workers' blocks and placeholders."""
    P, size = spec.partition, spec.partition.world.size
    blocks = derived(lambda worker: ShapeDtype(spec.shape_on(worker), dtype), spec.block_shapes)
    if P.size == size:
        return blocks
    own = set(P.ranks)
    others = (worker for worker in range(size) if worker not in own)
    return on_grids(blocks, {worker: ShapeDtype(spec.shape_on(worker), dtype) for worker in others})


def draw_layer(layer: Any, x_spec: TensorSpec, dtype: DTypeLike, **options: Any) -> Drawing:
    """Draw what one of the library's layers does to a tensor; `options` are further arguments of its plan."""
    check_spec(x_spec, "x_spec")
    x = input_blocks(x_spec, np.dtype(np.int32 if layer.takes_indices else dtype))
    plan = layer.plan(x, **options)
    notes: list[str] = []
    specs = jax.tree.leaves_with_path(layer.param_specs(), is_leaf=lambda leaf: isinstance(leaf, TensorSpec))
    parameters = [
        drawn_blocks(spec, jax.tree_util.keystr(path, simple=True, separator="."))
        for path, spec in specs[:MOST_PARAMETERS]
    ]
    if len(specs) > MOST_PARAMETERS:
        notes.append(f"Left out: the blocks of {len(specs) - MOST_PARAMETERS} more parameters.")
    after = None
    try:
        # A halo exchange leaves blocks that overlap.
        if not isinstance(plan, HaloExchangePlan):
            P_y = layer.output_partition or x_spec.partition
            after = drawn_blocks(spec_of_blocks(repr(layer), plan.after(x), P_y, layer._copied), "y")
    except PlanError:
        notes.append("The output is no tensor of balanced blocks, so it is not drawn as a whole.")
    from distdl_jax.tools.cost.layers import Counter, forward_movements

    before, movements = drawn_blocks(x_spec, "x"), None
    with suppress(PlanError):  # on more workers than all of which a layer can be traced on
        movements = forward_movements(Counter(x_spec.partition.world, np.dtype(dtype)).chain(layer, plan, x))
    return draw_plan(type(layer).__name__, plan, before, parameters, after, notes, movements)


def draw_plan(
    name: str,
    plan: Plan,
    before: Blocks | None = None,
    parameters: Sequence[Blocks] = (),
    after: Blocks | None = None,
    notes: Sequence[str] = (),
    movements: Sequence[LayerMovement] | None = None,
) -> Drawing:
    """Draw what moves in a plan, between the tensor before and after, as far as they are known."""
    if movements is None:
        movements = plan_movements(plan)
    if movements is None:
        movements = ()
        notes = [*notes, f"{type(plan).__name__} does not say what moves."]
    ends = [blocks for blocks in (before, after) if blocks is not None]
    workers = {worker for blocks in ends for block in blocks.blocks for worker in block.workers}
    workers.update(islice((worker for worker in plan.workers if worker not in workers), max(0, MOST - len(workers))))
    steps = steps_of(movements, sorted(workers), before)
    is_one_movement = len(movements) == 1 and movements[0].movement is not None and not parameters
    if is_one_movement and before is not None and after is not None and not steps[0].strips:
        steps = [_between(steps[0], plan, before, after)]
    tensors = [blocks for blocks in (before, *parameters, after) if blocks is not None]
    return draw_movements(name, tensors, steps, notes)


def plan_movements(plan: Plan) -> list[LayerMovement] | None:
    """Return what moves in a plan of one movement; None for other plans."""
    from distdl_jax.tools.cost.layers import LayerMovement

    match plan:
        case HaloExchangePlan():
            return [LayerMovement("", plan.movement)]
        case MovementPlan():
            return [LayerMovement("", plan)]
    return None


def steps_of(movements: Sequence[LayerMovement], workers: Sequence[int], before: Blocks | None) -> list[Step]:
    """Return movements on some workers; with strips where they are halos of the tensor `before`."""
    found: list[Step] = []
    for each in movements:
        if each.place != movements[0].place:
            before = None
        found.append(_drawn(each, workers, before))
        if not (isinstance(each.movement, RangesPlan) or each.of_params):
            before = None  # something else is made of it
    return _joined(found)


def _joined(steps: Iterable[Step]) -> list[Step]:
    """Return the steps, those of one halo exchange along several dimensions as one."""
    found: list[Step] = []
    for step in steps:
        if found and step.strips and found[-1].strips and found[-1].name == step.name:
            last = found.pop()
            step = replace(step, messages=last.messages + step.messages, strips=last.strips + step.strips)
        found.append(step)
    return found


def _drawn(each: LayerMovement, workers: Sequence[int], before: Blocks | None) -> Step:
    """Return a movement on some workers."""
    place = f"{each.place} " * bool(each.place)
    if each.movement is None:
        return _communication(f"{place}messages", {worker: each.operations[worker] for worker in workers}, workers)
    return _step(f"{place}{_name(each.movement, each.of_params)}", each.movement, workers, before)


def _name(movement: MovementPlan, of_params: bool) -> str:
    """Return the name of a movement, and what it moves."""
    name = getattr(movement, "name", "")
    if isinstance(movement, RangesPlan):
        name = "halos" if name == "windows" else name
    elif isinstance(movement, ReplicationPlan):
        name = "broadcast" if movement.is_broadcast else "sum_reduce"
    elif isinstance(movement, GatherPlan):
        name = "all_gather" if movement.gathers else "reduce_scatter"
    elif not name:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(movement).__name__.strip("_").removesuffix("Plan")).lower()
        name = NAMES.get(name, name)
    return f"{name} of parameters" if of_params and name != "parameters" else str(name)


def _step(name: str, movement: MovementPlan, workers: Sequence[int], before: Blocks | None) -> Step:
    taking_part = set(movement.workers)
    workers = [worker for worker in workers if worker in taking_part]
    does: dict[int, Sequence[Operation]] = {}
    for worker in workers:
        does[worker] = movement.operations(worker)
        if sum(map(len, does.values())) > MOST_OPERATIONS:
            name = f"{name}, of the first {len(does)} worker{'s' * (len(does) > 1)}"
            break
    step = _communication(name, does, workers)
    shapes = {worker: (movement.inputs[worker].shape, movement.output(worker).shape) for worker in workers}
    step = replace(step, shapes=shapes)
    if before is None or not isinstance(movement, RangesPlan) or any(block.is_empty for block in before.blocks):
        return step
    owners = {worker for block in before.blocks for worker in block.workers}
    if movement.halos.owned.shape == before.grid and owners >= set(workers):
        strips = tuple(strip for worker in workers for strip in _strips(movement, worker, owners))
        return replace(step, strips=strips, before=before if strips else None)
    return step


def _communication(name: str, does: Mapping[int, Sequence[Any]], workers: Sequence[int]) -> Step:
    """Return the messages and the collective operations of some workers, from what they do."""
    messages, calls, left_out, known = [], {}, 0, set(workers)
    for worker, operations in does.items():
        for each in operations:
            if not isinstance(each, Operation):
                continue
            if not each.is_message:
                calls[each.kind, each.team, each.root, each.bytes_sent, name] = TeamCall(
                    each.kind, each.team, each.root, each.bytes_sent
                )
            elif each.dest in known:
                messages.append(Message(worker, each.dest, each.bytes_sent))
            else:
                left_out += each.dest is not None
    return Step(name, tuple(messages), tuple(calls.values()), left_out)


def _strips(movement: RangesPlan, worker: int, owners: Set[int]) -> Iterator[Strip]:
    """Yield the parts of a worker's halo, each by the message that brings it."""
    halos, itemsize = movement.halos, movement.dtype.itemsize
    index = halos.owned.index(halos.owned.cell_of[worker])
    moving = (d for d, needed in enumerate(halos.needed) if needed != halos.owned.ranges[d])
    for d, step in zip(moving, movement.steps(worker), strict=True):
        own, first = halos.owned.ranges[d][index[d]], halos.needed[d][index[d]][0]
        for message in step.recvs:
            for piece in message.pieces:
                start, length = first + int(piece.dest_start[d]), piece.shape[d]  # type: ignore[arg-type]
                is_low = start < own[0]
                distance = own[0] - start - length if is_low else start - own[1]
                if message.partner in owners:
                    yield Strip(message.partner, worker, d, is_low, length, distance, piece.size * itemsize)


def _between(step: Step, plan: Plan, before: Blocks, after: Blocks) -> Step:
    """Return a layer's only movement with the tensor before and after, and the boxes that go from one to the other."""
    pieces: list[Piece] = []
    if isinstance(plan, RepartitionPlan):
        gives, gets = ({w: block.box for block in blocks.blocks for w in block.workers} for blocks in (before, after))
        for source, dest, _ in step.messages:
            if source in gives and dest in gets:
                pieces.append(Piece(source, dest, intersect(gives[source], gets[dest])))
    return replace(step, before=before, after=after, pieces=tuple(pieces))
