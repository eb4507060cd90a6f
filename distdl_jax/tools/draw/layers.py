"""What a layer does, drawn from its plan: who owns what before and after, and what moves in between."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from distdl_jax.errors import PlanError
from distdl_jax.functional.all_gather import GatherPlan
from distdl_jax.functional.broadcast import ReplicationPlan
from distdl_jax.functional.halo_exchange import HaloExchangePlan, RangesPlan
from distdl_jax.functional.plan import MovementPlan, Plan
from distdl_jax.functional.repartition import RepartitionPlan
from distdl_jax.nn.base.output_specs import spec_of_blocks
from distdl_jax.partitions.tensors import TensorSpec, check_spec
from distdl_jax.plans.decomposition import intersect
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.text import Drawing
from distdl_jax.tools.cost.layers import Counter, LayerMovement, forward_movements
from distdl_jax.tools.draw.grids import MOST, Blocks, spec_as_blocks
from distdl_jax.tools.draw.messages import Event
from distdl_jax.tools.draw.movements import Step, draw_steps
from distdl_jax.watchdog.programs.ir import Operation
from distdl_jax.watchdog.programs.matching import play_back

MOST_PARAMETERS = 4
"""Of how many parameters the blocks are drawn."""

MOST_OPERATIONS = 10_000
"""How many operations of one movement are looked at: where each of many workers sends to all others, it takes long."""

NAMES = {"all_sum": "all_sum_reduce", "extremum": "all_reduce"}
"""Of movements that are called otherwise than their plans."""


def draw_layer(layer: Any, x_spec: TensorSpec, dtype: DTypeLike, **options: Any) -> Drawing:
    """Draw what one of the library's layers does to a tensor; `options` are further arguments of its plan."""
    check_spec(x_spec, "x_spec")
    x_dtype = np.dtype(np.int32 if layer.takes_indices else dtype)
    x = {worker: ShapeDtype(x_spec.shape_on(worker), x_dtype) for worker in range(x_spec.partition.world.size)}
    plan = layer.plan(x, **options)
    notes: list[str] = []
    specs = jax.tree.leaves_with_path(layer.param_specs(), is_leaf=lambda leaf: isinstance(leaf, TensorSpec))
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in specs]
    parameters = [spec_as_blocks(spec, name) for name, (_, spec) in zip(names[:MOST_PARAMETERS], specs, strict=False)]
    if len(specs) > MOST_PARAMETERS:
        notes.append(f"Left out: the blocks of {len(specs) - MOST_PARAMETERS} more parameters.")
    after = None
    try:
        # A halo exchange leaves blocks that overlap.
        if not isinstance(plan, HaloExchangePlan):
            P_y = layer.output_partition or x_spec.partition
            after = spec_as_blocks(spec_of_blocks(repr(layer), plan.after(x), P_y, layer._copied), "y")
    except PlanError:
        notes.append("The output is no tensor of balanced blocks, so it is not drawn as a whole.")
    before, movements = spec_as_blocks(x_spec, "x"), None
    with suppress(PlanError):  # on more workers than all of which a layer can be traced on
        world = (layer.input_partition or x_spec.partition).world  # of which the spec need not be, to plan
        movements = forward_movements(Counter(world, np.dtype(dtype)).chain(layer, plan, x))
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
    tensors = [blocks for blocks in (before, after) if blocks is not None]
    workers = {worker for blocks in tensors for block in blocks.blocks for worker in block.workers}
    workers.update(islice((worker for worker in plan.workers if worker not in workers), max(0, MOST - len(workers))))
    steps = steps_of(movements, sorted(workers), before)
    is_one_movement = len(movements) == 1 and movements[0].movement is not None and not parameters
    if is_one_movement and before is not None and after is not None and not steps[0].pieces:
        pieces = _boxes(steps[0], before, after) if isinstance(plan, RepartitionPlan) else ()
        steps = [replace(steps[0], before=before, after=after, pieces=pieces)]
    ends = (before, *parameters, after)
    return draw_steps(name, [blocks for blocks in ends if blocks is not None], steps, notes)


def plan_movements(plan: Plan) -> list[LayerMovement] | None:
    """Return what moves in a plan of one movement; None for other plans."""
    match plan:
        case HaloExchangePlan():
            return [LayerMovement("", plan.movement)]
        case MovementPlan():
            return [LayerMovement("", plan)]
    return None


def steps_of(movements: Sequence[LayerMovement], workers: Sequence[int], before: Blocks | None) -> list[Step]:
    """Return movements on some workers; with halos where they are those of the tensor `before`."""
    steps: list[Step] = []
    for each in movements:
        if each.place != movements[0].place:
            before = None
        steps.append(_drawn(each, workers, before))
        if not (isinstance(each.movement, RangesPlan) or each.of_params):
            before = None  # something else is made of it
    return steps


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
    shapes = {worker: (movement.inputs[worker].shape, movement.output(worker).shape) for worker in workers}
    step = replace(_communication(name, does, workers), shapes=shapes)
    if before is None or not isinstance(movement, RangesPlan) or any(block.is_empty for block in before.blocks):
        return step
    owners = {worker for block in before.blocks for worker in block.workers}
    if movement.halos.owned.shape != before.grid or not owners >= set(workers):
        return step
    pieces = tuple(p for worker in workers for p in _halos(movement, worker) if p.team[0] in owners)
    return replace(step, pieces=pieces, before=before if pieces else None)


def _communication(name: str, does: Mapping[int, Sequence[Any]], workers: Sequence[int]) -> Step:
    """Return the messages and the operations of teams of some workers, from what they do."""
    programs = {worker: tuple(op for op in some if isinstance(op, Operation)) for worker, some in does.items()}
    messages: list[Event] = []
    calls: dict[Event, None] = {}
    left_out, known = 0, set(workers)
    for worker, operations in programs.items():
        for op in operations:
            if not op.is_message:
                calls[Event(op.kind, tuple(op.team), op.bytes_sent, root=op.root)] = None
            elif op.dest in known:
                messages.append(Event("message", (worker, op.dest), op.bytes_sent))
            else:
                left_out += op.dest is not None
    if not left_out:
        happened, waiting = play_back(programs)
        if not waiting:  # in an order in which they can go
            messages = [Event("message", tuple(team), op.bytes_sent) for op, team, _ in happened if op.is_message]
    return Step(name, (*messages, *calls), left_out)


def _halos(movement: RangesPlan, worker: int) -> Iterator[Event]:
    """Yield the parts of a worker's halo, each by the message that brings it."""
    halos, itemsize = movement.halos, movement.dtype.itemsize
    index = halos.owned.index(halos.owned.cell_of[worker])
    box = [ranges[i] for ranges, i in zip(halos.owned.ranges, index, strict=True)]
    moving = (d for d, needed in enumerate(halos.needed) if needed != halos.owned.ranges[d])
    for d, step in zip(moving, movement.steps(worker), strict=True):
        needed = halos.needed[d][index[d]]
        for message in step.recvs:
            for piece in message.pieces:
                start = needed[0] + int(piece.dest_start[d])  # type: ignore[arg-type]
                bounds = (start, start + piece.shape[d])
                halo = (*box[:d], bounds, *box[d + 1 :])
                yield Event("message", (message.partner, worker), piece.size * itemsize, box=halo, axis=d)
        box[d] = needed  # corners ride along in the next dimension


def _boxes(step: Step, before: Blocks, after: Blocks) -> tuple[Event, ...]:
    """Return the messages with the boxes that go from the blocks before to those after, as far as they are drawn."""
    if not all(0 < len(blocks.drawn) < 3 for blocks in (before, after)):
        return ()
    gives, gets = ({w: block.box for block in blocks.blocks for w in block.workers} for blocks in (before, after))
    boxes = []
    for message in step.messages:
        source, dest = message.team
        if source in gives and dest in gets:
            boxes.append(message._replace(box=intersect(gives[source], gets[dest])))
    return tuple(boxes)
