"""A layer drawn from its plan: the owners before and after, and the messages in between."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from textwrap import wrap
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
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.decomposition import intersect
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.text import Drawing
from distdl_jax.tools.cost.layers import Counter as LayerCounter
from distdl_jax.tools.cost.layers import LayerMovement, forward_movements
from distdl_jax.tools.draw import svg
from distdl_jax.tools.draw.grids import MOST, Blocks, named, spec_as_blocks, titled
from distdl_jax.tools.draw.halos_and_arrows import draw_halos, draw_pieces
from distdl_jax.tools.draw.messages import DrawnEvent, amounts_of, message_lines, message_squares
from distdl_jax.tools.draw.svg import Part
from distdl_jax.watchdog.programs.ir import Operation
from distdl_jax.watchdog.programs.matching import play_back

MOST_PARAMETERS = 4
"""The number of parameters whose blocks are drawn."""

MOST_OPERATIONS = 10_000
"""The number of operations of one movement that are examined, since all-to-all on many workers takes long."""

MOST_ARROWS = 40
"""The number of messages of a movement that are drawn as arrows; more are drawn as squares."""

MOST_STEPS = 16
"""The number of movements of one layer that are drawn."""

LETTERS = 92
"""Of a line of text."""

NAMES = {"all_sum": "all_sum_reduce", "extremum": "all_reduce"}
"""Names of movements that differ from their plans'."""


def draw_layer(layer: Any, x_spec: TensorSpec, dtype: DTypeLike, **options: Any) -> Drawing:
    """Draw the effect of one of the library's layers on a tensor; `options` are additional arguments of its plan."""
    x_dtype = np.dtype(np.int32 if layer.takes_indices else dtype)
    x = {worker: ShapeDtype(x_spec.shape_on(worker), x_dtype) for worker in range(x_spec.partition.world.size)}
    plan = layer.plan(x, **options)
    notes: list[str] = []
    specs = jax.tree.leaves_with_path(layer.param_specs(), is_leaf=lambda leaf: isinstance(leaf, TensorSpec))
    parameters = [
        spec_as_blocks(spec, jax.tree_util.keystr(path, simple=True, separator="."))
        for path, spec in specs[:MOST_PARAMETERS]
    ]
    if len(specs) > MOST_PARAMETERS:
        notes.append(f"Omitted: the blocks of {len(specs) - MOST_PARAMETERS} more parameters.")
    after = None
    try:
        # A halo exchange leaves blocks that overlap.
        if not isinstance(plan, HaloExchangePlan):
            P_y = layer.output_partition or x_spec.partition
            after = spec_as_blocks(spec_of_blocks(repr(layer), plan.after(x), P_y, layer._copied), "y")
    except PlanError:
        notes.append("The output is not a tensor of balanced blocks, so it is not drawn as a whole.")
    before, movements = spec_as_blocks(x_spec, "x"), None
    with suppress(PlanError):  # on more workers than a layer can be traced on
        world = (layer.input_partition or x_spec.partition).world  # the spec may be on another one, for planning
        movements = forward_movements(LayerCounter(world, np.dtype(dtype)).chain(layer, plan, x))
    return draw_plan(type(layer).__name__, plan, before, parameters, after, notes, movements)


def plan_movements(plan: Plan) -> list[LayerMovement] | None:
    """Return the movements in a plan of one movement; None for other plans."""
    movement = plan.movement if isinstance(plan, HaloExchangePlan) else plan
    return [LayerMovement("", movement)] if isinstance(movement, MovementPlan) else None


def draw_plan(
    name: str,
    plan: Plan,
    before: Blocks | None = None,
    parameters: Sequence[Blocks] = (),
    after: Blocks | None = None,
    notes: Sequence[str] = (),
    movements: Sequence[LayerMovement] | None = None,
) -> Drawing:
    """Draw the movements in a plan, between the tensor before and after, as far as they are known."""
    if movements is None and (movements := plan_movements(plan)) is None:
        movements, notes = (), [*notes, f"The movements of {type(plan).__name__} are unknown."]
    ends = [blocks for blocks in (before, after) if blocks is not None]
    workers = {worker for blocks in ends for block in blocks.blocks for worker in block.workers}
    workers.update(islice((worker for worker in plan.workers if worker not in workers), max(0, MOST - len(workers))))
    steps = steps_of(movements, sorted(workers), before)
    is_one_movement = len(steps) == 1 and movements[0].movement is not None and not parameters
    if is_one_movement and before is not None and after is not None and not steps[0].pieces:
        pieces = _boxes(steps[0], before, after) if isinstance(plan, RepartitionPlan) else ()
        steps = [replace(steps[0], before=before, after=after, pieces=pieces)]
    tensors = [blocks for blocks in (before, *parameters, after) if blocks is not None]
    return _draw_steps(name, tensors, steps, notes)


def _draw_steps(title: str, tensors: Sequence[Blocks], steps: Sequence[DrawnStep], notes: Sequence[str]) -> Drawing:
    """Draw the tensors before and after, then the movements in order."""
    moving = [step for step in steps if step.events or step.left_out]
    shown, rest = moving[:MOST_STEPS], moving[MOST_STEPS:]
    notes = list(notes)
    if rest:
        left_out = [message for step in rest for message in step.messages]
        total = sum(message.nbytes for message in left_out)
        notes.append(f"Omitted: {len(rest)} more movements, of {len(left_out):,} messages and {total:,} bytes.")
    if not moving:
        notes.append("No message is sent.")
    alone = [blocks for blocks in tensors if not any(blocks in step.ends for step in shown)]
    parts = [svg.heading(title, 15), svg.beside(map(titled, alone), 36)]
    plain = [title, *(blocks.text for blocks in alone)]
    for i, step in enumerate(shown, 1):
        step_title = f"{i}. " * (len(shown) > 1) + step.title
        lines = svg.words(step.lines if len(step.messages) <= 96 else [])
        parts.append(svg.below([svg.heading(step_title), step.draw(), lines], 10))
        plain.append("\n".join([*(blocks.text for blocks in step.ends), step_title, *(f"  {s}" for s in step.lines)]))
    about = ". ".join([*(blocks.title for blocks in tensors), *(step.title for step in shown)])
    text = "\n\n".join([*plain, *(["\n".join(notes)] if notes else [])])
    return Drawing(svg.document(title, about, svg.below([*parts, svg.words(notes)])), text)


def steps_of(movements: Sequence[LayerMovement], workers: Sequence[int], before: Blocks | None) -> list[DrawnStep]:
    """Return movements on some workers, with halos if they are those of the tensor `before`."""
    steps: list[DrawnStep] = []
    for place, movement, of_params, operations in movements:
        if place != movements[0].place:
            before = None
        if movement is None:
            step = _communication(f"{place} messages", {worker: operations[worker] for worker in workers}, workers)
        else:
            step = _step(f"{place} {_name(movement, of_params)}", movement, workers, before)
        steps.append(step)
        if not (isinstance(movement, RangesPlan) or of_params):
            before = None  # the result is something else
    return steps


def _name(movement: MovementPlan, of_params: bool) -> str:
    """Return the name of a movement, and its object."""
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


def _step(name: str, movement: MovementPlan, workers: Sequence[int], before: Blocks | None) -> DrawnStep:
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
    if before is None or not isinstance(movement, RangesPlan) or movement.halos.owned.shape != before.grid:
        return step
    owners = {worker for block in before.blocks for worker in block.workers}
    if any(block.is_empty for block in before.blocks) or not owners.issuperset(workers):
        return step
    pieces = tuple(p for worker in workers for p in _halos(movement, worker) if p.team[0] in owners)
    return replace(step, pieces=pieces, before=before if pieces else None)


def _communication(name: str, does: Mapping[int, Sequence[Operation]], workers: Sequence[int]) -> DrawnStep:
    """Return the messages and the team operations of some workers, from their communication."""
    messages: list[DrawnEvent] = []
    calls: dict[DrawnEvent, None] = {}
    left_out, known = 0, set(workers)
    for worker, operations in does.items():
        for op in operations:
            if not op.is_message:
                calls[DrawnEvent(op.kind, tuple(op.team), op.bytes_sent, root=op.root)] = None
            elif op.dest in known:
                messages.append(DrawnEvent("message", (worker, op.dest), op.bytes_sent))
            else:
                left_out += op.dest is not None
    if not left_out:
        happened, waiting = play_back({worker: tuple(operations) for worker, operations in does.items()})
        if not waiting:  # in a possible order of execution
            messages = [DrawnEvent("message", tuple(team), op.bytes_sent) for op, team, _ in happened if op.is_message]
    return DrawnStep(name.strip(), (*messages, *calls), left_out)


def _halos(movement: RangesPlan, worker: int) -> Iterator[DrawnEvent]:
    """Yield the parts of a worker's halo, each with the message that brings it."""
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
                yield DrawnEvent("message", (message.partner, worker), piece.size * itemsize, box=halo, axis=d)
        box[d] = needed  # corners are included in the next dimension


def _boxes(step: DrawnStep, before: Blocks, after: Blocks) -> tuple[DrawnEvent, ...]:
    """Return the messages with the boxes sent from the blocks before to those after, as far as they are drawn."""
    if not all(0 < len(blocks.drawn) < 3 for blocks in (before, after)):
        return ()
    gives, gets = ({w: block.box for block in blocks.blocks for w in block.workers} for blocks in (before, after))
    return tuple(
        message._replace(box=intersect(gives[message.team[0]], gets[message.team[1]]))
        for message in step.messages
        if message.team[0] in gives and message.team[1] in gets
    )


@dataclass(frozen=True)
class DrawnStep:
    """A movement to draw.

    - `name`: of the movement, and its object.
    - `events`: its messages and team operations; `left_out`: the number of messages with workers not drawn.
    - `before`, `after`: the tensor; None if it is not known as a whole.
    - `pieces`: the messages with their boxes, or the received halos of `before`.
    - `shapes`: of blocks before and after, by worker.
    """

    name: str
    events: tuple[DrawnEvent, ...] = ()
    left_out: int = 0
    before: Blocks | None = None
    after: Blocks | None = None
    pieces: tuple[DrawnEvent, ...] = ()
    shapes: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    @property
    def messages(self) -> list[DrawnEvent]:
        return [event for event in self.events if event.is_message]

    @property
    def calls(self) -> list[DrawnEvent]:
        """The team operations."""
        return [event for event in self.events if not event.is_message]

    @property
    def ends(self) -> list[Blocks]:
        """The tensor before and after, as far as they are known."""
        return [blocks for blocks in (self.before, self.after) if blocks is not None]

    @property
    def title(self) -> str:
        """The movement as a sentence."""
        parts = []
        if self.messages:
            total = sum(message.nbytes for message in self.messages)
            parts.append(f"{len(self.messages):,} message{'s' * (len(self.messages) > 1)}, {total:,} bytes")
        for kind, count in sorted(Counter(call.kind for call in self.calls).items()):
            nbytes = next(call.nbytes for call in self.calls if call.kind == kind)
            parts.append(f"{count} {kind}{'s' * (count > 1)} of {nbytes:,} bytes")
        more = f"; {self.left_out:,} messages with omitted workers" if self.left_out else ""
        return f"{self.name}: {', '.join(parts) or 'no message'}{more}"

    @property
    def lines(self) -> list[str]:
        """The messages as text, grouped by length."""
        by_size: dict[int, list[str]] = {}
        for message in sorted(self.messages, key=lambda message: message.team[0]):
            by_size.setdefault(message.nbytes, []).append("{} \N{RIGHTWARDS ARROW} {}".format(*message.team))
        lines = []
        for size, pairs in sorted(by_size.items(), reverse=True)[:6]:
            more = f", and {len(pairs) - 48} more" if len(pairs) > 48 else ""
            lines += wrap(f"{size:,} bytes{' each' * (len(pairs) > 1)}: {', '.join(pairs[:48])}{more}", LETTERS)
        if len(by_size) > 6:
            lines.append(f"and messages of {len(by_size) - 6} other lengths")
        for call in self.calls[:8]:
            root = "" if call.root is None else f" with root {call.root}"
            lines.append(f"{call.kind} of {call.nbytes:,} bytes among {named(sorted(call.team))}{root}")
        if len(self.calls) > 8:
            lines.append(f"and {len(self.calls) - 8} more team operations")
        return lines

    def draw(self) -> Part:
        """Return the picture: halos, arrows between blocks, squares for many messages, or workers in a row."""
        if self.before is not None and any(piece.axis >= 0 for piece in self.pieces):
            return titled(self.before, draw_halos(self.before, self.pieces))
        if len(self.messages) + sum(len(call.team) for call in self.calls) > MOST_ARROWS:
            amounts = amounts_of(self.messages)
            squares = [message_squares(sorted({w for pair in amounts for w in pair}), amounts)] if amounts else []
            return svg.beside([*map(titled, self.ends), *squares])
        shared = any(b.workers[1:] for blocks in self.ends for b in blocks.blocks if not b.is_empty)
        if self.before is not None and self.after is not None and not (shared or self.calls):
            return draw_pieces(self.before, self.after, self.pieces or self.messages)
        workers = sorted({worker for event in self.events for worker in event.team})
        tensors, lines = svg.beside(map(titled, self.ends)), message_lines(self.events, workers, {})
        return svg.below([tensors, lines, svg.words(self._shapes())])

    def _shapes(self) -> list[str]:
        """Return the shapes of blocks before and after, grouped by workers with equal ones."""
        same: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for worker in sorted({worker for event in self.events for worker in event.team} & {*self.shapes}):
            same.setdefault(self.shapes[worker], []).append(worker)
        return [
            f"{named(workers)}: {shape_text(before)} before, {shape_text(after)} after"
            for (before, after), workers in same.items()
        ]
