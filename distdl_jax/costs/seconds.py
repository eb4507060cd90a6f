"""The seconds of a training step on a machine: what all workers do, action by action, played with clocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from distdl_jax.costs.copies import bytes_copied
from distdl_jax.costs.layers import PlacedLayer
from distdl_jax.costs.links import MachineLinks
from distdl_jax.costs.meetings import meetings
from distdl_jax.costs.play import Met, Own, Played, Step, play
from distdl_jax.costs.step_program import backward_events, forward_events
from distdl_jax.costs.times import Interval, Times
from distdl_jax.costs.uncertainty import Uncertainty, uncertainty
from distdl_jax.plans.work import Work
from distdl_jax.primitives.plan import Action, Moves
from distdl_jax.programs.ir import Operation

FORWARD, BACKWARD, UPDATE = range(3)
"""The rows of a layer in a play."""


class Update(NamedTuple):
    """What an optimiser does with the parameters of one layer: on each worker, a `Work` for each array."""

    place: str
    works: Sequence[Sequence[Work]]


@dataclass(frozen=True)
class Timing:
    """The times of a step.

    - `layers`: by place. - `step`: of what is done once a step: the call, and the sum of the loss over all workers.
    - `seconds`: of the step.
    """

    layers: Mapping[str, Times]
    step: Times
    seconds: Interval


@dataclass
class _Script:
    """What all workers do in a step, in order.

    - `rows`: by place, the first of the three rows of a layer in the play.
    - `hideable`: of each row, the seconds of each worker's messages that arithmetic could hide.
    """

    links: MachineLinks
    rows: dict[str, int]
    steps: list[Step] = field(default_factory=list)
    hideable: np.ndarray = field(init=False)
    _known: dict[tuple[Moves, int], list[Step]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hideable = np.zeros((3 * len(self.rows), self.links.workers))

    def act(self, action: Action, part: int) -> None:
        """Append what each worker does in one direction of an action; equal movements are looked at once."""
        if isinstance(action, Moves):
            key = replace(action, place=""), part
            if key not in self._known:
                self._known[key] = list(self._steps(action, part))
            steps: Iterable[Step] = self._known[key]
        else:
            steps = self._steps(action, part)
        for step in steps:
            self.add(replace(step, row=self.rows[action.place] + part))

    def _steps(self, action: Action, part: int) -> Iterator[Step]:
        """Yield the arithmetic of all workers, and then their messages."""
        of_worker = backward_events if part == BACKWARD else forward_events
        events = [list(of_worker(action, worker)) for worker in range(self.links.workers)]
        for direction in dict.fromkeys(event.direction for event in chain(*events)):
            works = [[e.does for e in mine if isinstance(e.does, Work) and e.direction == direction] for mine in events]
            if any(works):
                yield Own(part, self.links.work_seconds(works, direction))
        operations = [[e.does for e in mine if isinstance(e.does, Operation)] for mine in events]
        if any(operations):
            copied = [bytes_copied(action, worker, mine, part == BACKWARD) for worker, mine in enumerate(operations)]
            yield Own(part, self.links.copy_seconds(np.array(copied)))
            yield Met.on(self.links, part, meetings(dict(enumerate(operations))))

    def add(self, step: Step) -> None:
        """Append a step."""
        self.steps.append(step)
        if isinstance(step, Met):
            workers = step.meetings.workers
            for wave, (seconds, _) in zip(step.meetings.waves, step.messages, strict=True):
                hidden = self.links.hidden_seconds(wave.messages.nbytes, seconds)
                np.add.at(self.hideable[step.row], workers[wave.messages.receive], hidden)

    def times(self, place: str, played: Played) -> Times:
        """Return the times of a layer, from a play of the steps."""
        row = self.rows[place]
        rows = slice(row, row + 3)
        spent = played.spent
        forward, backward, update = spent.computing[rows]
        hideable = np.minimum(self.hideable[rows], spent.computing[rows]).sum(0)
        transfer, waiting = spent.communicating[rows].sum(0), spent.waiting[rows].sum(0)
        return Times(forward, backward, update, transfer, waiting, hideable)


def optimiser_update(layer: PlacedLayer, itemsize: int, workers: int, copies: int) -> Update:
    """Return what an optimiser does that stores so many numbers for each parameter: in one pass over each array.

    Each number is read, with the gradient, and written; then the parameter is, with all of these numbers.
    """
    read, written = 2 * copies + 1 + max(copies, 1), copies + 1
    works: list[list[Work]] = [[] for _ in range(workers)]
    for spec in layer.param_specs:
        for worker, shape in spec.block_shapes.items():
            nbytes = math.prod(shape) * itemsize
            works[worker].append(Work("optimiser", read=read * nbytes, written=written * nbytes))
    return Update(layer.place, works)


def step_timing(
    actions: Sequence[Action], places: Sequence[str], links: MachineLinks, updates: Sequence[Update], *, backward: bool
) -> Timing:
    """Return the times of a training step, or of a forward pass alone.

    - `places`: of all layers, in order. - `updates`: what the optimiser does.
    """
    script = _Script(links, {place: 3 * number for number, place in enumerate((*places, "step"))})
    script.add(Own(script.rows["step"], np.full(links.workers, links.machine.call_seconds)))
    for action in actions:
        script.act(action, FORWARD)
    if backward:
        if links.workers > 1:
            loss = Operation("allreduce", tuple(range(links.workers)), count=1, itemsize=4)
            everyone = {worker: [loss] for worker in range(links.workers)}
            script.add(Met.on(links, script.rows["step"], meetings(everyone)))
        for action in reversed(actions):
            script.act(action, BACKWARD)
        for update in updates:
            seconds = links.work_seconds(update.works, "forward")
            script.add(Own(script.rows[update.place] + UPDATE, seconds))
    rows = 3 * len(script.rows)
    played = play(script.steps, rows, links.workers, noise=links.machine.noise)
    times = {place: script.times(place, played) for place in script.rows}
    unsure = uncertainty(links.machine, links.dtype, links.used)
    return Timing(times, times.pop("step"), _interval(script.steps, rows, played, unsure, links.workers))


def _interval(steps: Sequence[Step], rows: int, played: Played, unsure: Uncertainty, workers: int) -> Interval:
    """Return the seconds of a step, between those where all times are as short, and as long, as they may be."""
    low, high = (
        play(list(_scaled(steps, 1 + sign * unsure.computing, 1 + sign * unsure.messages)), rows, workers)
        for sign in (-1, 1)
    )
    mean, spread = float(played.passes.mean()), float(played.passes.std())
    bounds = float(low.passes.mean()) - spread, float(high.passes.mean()) + spread
    return Interval(min(bounds[0], mean), mean, max(bounds[1], mean), unsure.reasons)


def _scaled(steps: Sequence[Step], computing: float, messages: float) -> Iterator[Step]:
    """Yield the steps with times so many times as long."""
    for step in steps:
        match step:
            case Own():
                yield replace(step, seconds=step.seconds * computing)
            case Met():
                scaled = [(seconds * messages, eager) for seconds, eager in step.messages]
                collectives = [[seconds * messages for seconds in wave] for wave in step.collectives]
                yield replace(step, messages=scaled, collectives=collectives)
