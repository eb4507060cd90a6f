"""One worker's part of a training step, from the actions of a plan: what it computes and communicates, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from distdl_jax.plans.work import Work
from distdl_jax.primitives.plan import (
    PARAMS,
    Action,
    Computes,
    CustomDerivative,
    Moves,
    Traced,
)
from distdl_jax.programs.ir import Operation

Direction = Literal["forward", "input gradient", "parameter gradient"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a worker does: an operation of MPI's, or the arithmetic of one direction.

    - `place`: of the layer in the network: "3.body.0".
    - `does`: what; of a movement's adjoint the direction is "input gradient".
    """

    place: str
    direction: Direction
    does: Operation | Work


def step_events(
    actions: Sequence[Action], worker: int, *, backward: bool = True, x_has_gradient: bool = False
) -> Iterator[Event]:
    """Yield what `worker` does in one training step, in order: all actions forward, and backward what has a derivative.

    - `backward`: whether gradients of the parameters are computed.
    - `x_has_gradient`: whether that of the network's input is, too.
    """
    for action in actions:
        yield from forward_events(action, worker)
    for action in reversed(actions) if backward else ():
        yield from backward_events(action, worker, x_has_gradient=x_has_gradient)


def forward_events(action: Action, worker: int) -> Iterator[Event]:
    """Yield what `worker` does in the forward pass of an action."""
    return _events(action, worker, action.place, "forward")


def _events(action: Action, worker: int, place: str, direction: Direction) -> Iterator[Event]:
    match action:
        case Moves(movement):
            for operation in movement.operations(worker):
                yield Event(place, direction, operation)
        case Computes(work) if (mine := work(worker)) is not None:
            yield Event(place, direction, mine)
        case Traced(forward):
            for does in forward(worker):
                yield Event(place, direction, does)
        case CustomDerivative(forward):
            for step in forward:
                yield from _events(step, worker, place, direction)


def backward_events(action: Action, worker: int, *, x_has_gradient: bool = False) -> Iterator[Event]:
    """Yield what `worker` does in the backward pass of an action: nothing where no data has a derivative."""
    differentiated = PARAMS | (frozenset({"x"}) if x_has_gradient else frozenset())
    place, has_gradient = action.place, bool(action.of & differentiated)
    match action:
        case Moves(movement) if has_gradient:
            for operation in movement.operations(worker, adjoint=True):
                yield Event(place, "input gradient", operation)
        case Computes(work) if (mine := work(worker)) is not None:
            yield from _gradients(action, mine, has_gradient)
        case Traced() if has_gradient or action.uses_params:
            for does in action.backward(worker, has_gradient):
                if isinstance(does, Operation):
                    yield Event(place, "input gradient", does)
                else:
                    yield from _gradients(action, does, has_gradient)
        case CustomDerivative(_, backward) if has_gradient:
            for step in backward:
                yield from _events(step, worker, place, "input gradient")


def _gradients(action: Computes | Traced, work: Work, has_gradient: bool) -> Iterator[Event]:
    if has_gradient:
        yield Event(action.place, "input gradient", work)
    if action.uses_params:
        yield Event(action.place, "parameter gradient", work)
