"""One worker's part of a training step, from the actions of a plan: what it computes and communicates, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from distdl_jax.plans.work import Work
from distdl_jax.plans.worker_ranks import Workers, positions, union
from distdl_jax.primitives.plan import (
    BOTH,
    PARAMS,
    Action,
    Computes,
    CustomDerivative,
    Moves,
    Plan,
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


def step_actions(plan: Plan) -> tuple[Action, ...]:
    """Return the actions of a training step, in which all workers differentiate alike.

    A layer leaves x as it is outside of its workers, where it doesn't depend on the parameters then. Where such workers
    and others meet in a later movement, all workers differentiate all movements (see `autodiff.adjoint_check`).
    """
    actions, place = plan.actions, ""
    dependent: Workers = ()
    of_layer: Workers = ()
    for action in actions:
        if action.place != place:
            dependent, of_layer, place = union(dependent, of_layer), (), action.place
        if isinstance(action, Computes) and action.uses_params:
            of_layer = union(of_layer, action.workers)
        elif isinstance(action, Moves) and action.of >= BOTH and _meet_others(action, dependent):
            return _all_differentiated(actions)
    return actions


def _meet_others(action: Moves, dependent: Workers) -> bool:
    """Say whether, in the adjoint of a movement, workers whose block depends on parameters meet others."""
    some, movement = union(dependent, action.workers), action.movement
    if union(some, movement.workers) == some:
        return False
    own = positions(some)
    partners = (_partners(each) for worker in some for each in movement.operations(worker, adjoint=True))
    return any(worker not in own for each in partners for worker in each)


def _partners(operation: Operation) -> Iterable[int]:
    if not operation.is_message:
        return operation.team
    return [worker for worker in (operation.dest, operation.source) if worker is not None]


def _all_differentiated(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return the actions with all that moves, and what follows from it, depending on the parameters."""
    found, moved = [], False
    for action in actions:
        moved = moved or (isinstance(action, Moves) and "x" in action.of)
        found.append(replace(action, of=action.of | PARAMS) if moved and "x" in action.of else action)
    return tuple(found)


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
