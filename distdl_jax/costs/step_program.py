"""One worker's part of a training step, from the actions of a plan: what it computes and communicates, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from distdl_jax.plans.work import Work
from distdl_jax.primitives.plan import BOTH, PARAMS, Action, Computes, CustomDerivative, Moves, Plan
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
    actions, dependent, of_layer, place = plan.actions, set[int](), set[int](), ""
    for action in actions:
        if action.place != place:
            dependent, of_layer, place = dependent | of_layer, set(), action.place
        if isinstance(action, Computes) and action.uses_params:
            of_layer.update(action.workers)
        elif isinstance(action, Moves) and action.of >= BOTH and _meet_others(action, dependent):
            return _all_differentiated(actions)
    return actions


def _meet_others(action: Moves, dependent: set[int]) -> bool:
    """Say whether, in the adjoint of a movement, workers whose block depends on parameters meet others."""
    some, movement = dependent.union(action.workers), action.movement
    if some.issuperset(movement.workers):
        return False
    operations = (each for worker in some for each in movement.operations(worker, adjoint=True))
    return any(not some.issuperset(_partners(each)) for each in operations)


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
    differentiated = PARAMS | (frozenset({"x"}) if x_has_gradient else frozenset())
    for action in actions:
        yield from _forward(action, worker, action.place)
    for action in reversed(actions) if backward else ():
        yield from _backward(action, worker, differentiated)


def _forward(action: Action, worker: int, place: str, direction: Direction = "forward") -> Iterator[Event]:
    match action:
        case Moves(movement):
            for operation in movement.operations(worker):
                yield Event(place, direction, operation)
        case Computes(work) if (mine := work(worker)) is not None:
            yield Event(place, direction, mine)
        case CustomDerivative(forward):
            for step in forward:
                yield from _forward(step, worker, place)


def _backward(action: Action, worker: int, differentiated: frozenset[str]) -> Iterator[Event]:
    place, has_gradient = action.place, bool(action.of & differentiated)
    match action:
        case Moves(movement) if has_gradient:
            for operation in movement.operations(worker, adjoint=True):
                yield Event(place, "input gradient", operation)
        case Computes(work) if (mine := work(worker)) is not None:
            if has_gradient:
                yield Event(place, "input gradient", mine)
            if action.uses_params:
                yield Event(place, "parameter gradient", mine)
        case CustomDerivative(_, backward) if has_gradient:
            for step in backward:
                yield from _forward(step, worker, place, "input gradient")
