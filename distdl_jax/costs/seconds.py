"""The seconds of a training step on a machine: what all workers do, action by action, played with clocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from distdl_jax.costs.amounts import Index
from distdl_jax.costs.copies import bytes_copied
from distdl_jax.costs.counting import groups
from distdl_jax.costs.layers import PlacedLayer
from distdl_jax.costs.links import MachineLinks
from distdl_jax.costs.meetings import meetings
from distdl_jax.costs.play import Met, Own, Played, Step, Together, play
from distdl_jax.costs.seconds_by_class import alike_in, on_classes, steps_by_class
from distdl_jax.costs.step_program import backward_events, forward_events
from distdl_jax.costs.times import Interval, Times
from distdl_jax.costs.uncertainty import Uncertainty, uncertainty
from distdl_jax.plans.work import Work, optimiser_update
from distdl_jax.primitives.plan import Action, Moves
from distdl_jax.programs.ir import Operation

FORWARD, BACKWARD, UPDATE = range(3)
"""The rows of a layer in a play."""

MOST_PLAYED = 256
"""On more workers than these, those that do the same are one, and all wait for the slowest after each movement."""


class Update(NamedTuple):
    """What an optimiser does with a layer's parameters: for each array a `Work`, and the workers that have it."""

    place: str
    works: Sequence[tuple[Work, Index]]

    @classmethod
    def of(cls, layer: PlacedLayer, itemsize: int, copies: int) -> Update:
        """Return it for an optimiser that stores so many numbers for each parameter."""
        works = []
        for spec in layer.param_specs:
            for worker, workers in groups(spec.block_shapes):
                works.append((optimiser_update(spec.block_shapes[worker], itemsize, copies), workers))
        return cls(layer.place, works)

    def seconds(self, links: MachineLinks) -> np.ndarray:
        """Return the seconds of each worker."""
        busy = np.zeros(links.workers, bool)
        for _, workers in self.works:
            busy[workers] = True
        together = links.busy(busy)
        seconds = np.zeros(links.workers)
        for work, workers in self.works:
            for others in np.unique(together[workers]):
                one = links.one_work_seconds(work, "forward", int(others))
                seconds[workers] += np.where(together[workers] == others, one, 0.0)
        return seconds


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
        workers = self.links.workers if self.links.workers <= MOST_PLAYED else 1  # beyond that it isn't foreseen
        self.hideable = np.zeros((3 * len(self.rows), workers))

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
        if self.links.workers > MOST_PLAYED:
            yield from steps_by_class(self.links, action, part, part == BACKWARD)
            return
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

    def sum_loss(self) -> None:
        """Append the sum of the loss over all workers."""
        workers, row = self.links.workers, self.rows["step"]
        if workers > MOST_PLAYED:
            seconds = self.links.collective_seconds("allreduce", np.arange(workers), 4)
            self.add(Together(row, np.full(workers, seconds)))
        elif workers > 1:
            loss = Operation("allreduce", tuple(range(workers)), count=1, itemsize=4)
            self.add(Met.on(self.links, row, meetings({worker: [loss] for worker in range(workers)})))

    def times(self, place: str, played: Played) -> Times:
        """Return the times of a layer, from a play of the steps."""
        row = self.rows[place]
        rows = slice(row, row + 3)
        spent = played.spent
        forward, backward, update = spent.computing[rows]
        hideable = np.minimum(self.hideable[rows], spent.computing[rows]).sum(0)
        transfer, waiting = spent.communicating[rows].sum(0), spent.waiting[rows].sum(0)
        return Times(forward, backward, update, transfer, waiting, hideable)


def step_timing(
    actions: Sequence[Action],
    places: Sequence[str],
    links: MachineLinks,
    updates: Sequence[Update],
    *,
    arrays: int,
    backward: bool,
) -> Timing:
    """Return the times of a training step, or of a forward pass alone.

    - `places`: of all layers, in order. - `updates`: what the optimiser does.
    - `arrays`: how many a step takes and returns.
    """
    machine = links.machine
    script = _Script(links, {place: 3 * number for number, place in enumerate((*places, "step"))})
    script.add(Own(script.rows["step"], np.full(links.workers, machine.call_seconds + arrays * machine.calls.array)))
    for action in actions:
        script.act(action, FORWARD)
    if backward:
        script.sum_loss()
        for action in reversed(actions):
            script.act(action, BACKWARD)
        for update in updates:
            script.add(Own(script.rows[update.place] + UPDATE, update.seconds(links)))
    rows, steps, workers, noise = 3 * len(script.rows), script.steps, links.workers, links.machine.noise
    number_of = np.arange(workers)
    if workers > MOST_PLAYED:
        first, number_of = alike_in(steps)
        # In a movement all wait for the slowest: of many times that vary, the largest one.
        steps, workers, noise = on_classes(steps, first, 1 + noise * math.sqrt(2 * math.log(workers))), len(first), 0.0
    played = play(steps, rows, workers, noise=noise)
    times = {place: script.times(place, played).of(number_of) for place in script.rows}
    unsure = uncertainty(links.machine, links.dtype, links.used)
    return Timing(times, times.pop("step"), _interval(steps, rows, played, unsure, workers))


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
            case Together():
                yield replace(step, seconds=step.seconds * messages)
            case Met():
                scaled = [(seconds * messages, eager) for seconds, eager in step.messages]
                collectives = [[seconds * messages for seconds in wave] for wave in step.collectives]
                yield replace(step, messages=scaled, collectives=collectives)
