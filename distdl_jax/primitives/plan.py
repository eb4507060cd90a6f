"""Plans: what all workers of an operation do, apart from doing it.

A plan is made by a pure function of the shapes and dtypes on all workers: without a message, without tracing, and equal
whichever worker makes it. So one process can make the plans of any number of workers, and one plan after another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from jax import Array

from distdl_jax.agreement.shapes import exchange_shapes
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.plans.alike import ByClass, OnGrids, of_team, on_grids, workers_of
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.work import Work
from distdl_jax.plans.worker_ranks import union
from distdl_jax.primitives.block_checks import outside
from distdl_jax.primitives.movement import Movement, adjoint_operations, move
from distdl_jax.programs.ir import Operation
from distdl_jax.world import Workers, World

ShapeDtypes = Mapping[int, ShapeDtype]
"""The shapes and dtypes of workers' blocks, by world rank."""


X: Final = frozenset({"x"})
PARAMS: Final = frozenset({"params"})
BOTH: Final = X | PARAMS
"""Inputs of a plan, on which what moves or is computed depends."""


@dataclass(frozen=True)
class Moves:
    """An action of a plan: a movement.

    - `of`: the plan's inputs that what moves depends on. Where one of them is differentiated, the adjoint runs.
    - `place`: of the layer, within the network that the plan is of: "3.body.0"; "" in its own plan.
    - `beside`: whether the next action reads what arrives beside x, not in place of it: a halo, or statistics.
    """

    movement: MovementPlan
    of: frozenset[str] = X
    place: str = ""
    beside: bool = False


@dataclass(frozen=True)
class Computes:
    """An action of a plan: what each worker computes by itself.

    - `work`: from a worker's world rank to its arithmetic; None where it has none.
    - `of`: the plan's inputs that the data depends on.
    - `uses_params`: whether parameters take part in it, too.
    - `place`: as of `Moves`.
    - `alike`: values of the workers that have work; those of one class do the same. None where that is not known.
    """

    work: Callable[[int], Work | None]
    of: frozenset[str] = X
    uses_params: bool = False
    place: str = ""
    alike: Mapping[int, Any] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Traced:
    """An action of a layer as a whole whose plan does not say its parts: what traced programs do.

    - `forward`: from a worker's world rank to what it does, in order.
    - `backward`: the same of the gradients, from a rank, and whether the gradient of x is among them.
    - `of`, `uses_params`, `place`: as of `Computes`.
    """

    forward: Callable[[int], Sequence[Operation | Work]]
    backward: Callable[[int, bool], Sequence[Operation | Work]]
    of: frozenset[str] = X
    uses_params: bool = False
    place: str = ""


@dataclass(frozen=True)
class CustomDerivative:
    """An action of a plan: a function whose derivative is written out, not the adjoints of what it does forward.

    - `forward`, `backward`: what is done in each direction, in order. Movements run as they are in both. The work
      backward is `Work.flops_x`.
    - `of`, `place`: as of `Moves`.
    """

    forward: tuple[Moves | Computes, ...]
    backward: tuple[Moves | Computes, ...]
    of: frozenset[str] = X
    place: str = ""


Action = Moves | Computes | CustomDerivative | Traced


def actions_within(
    plan: Plan, of: frozenset[str] = X, place: str = "", params: frozenset[str] = PARAMS
) -> tuple[Action, ...]:
    """Return the actions of a plan that is part of another one.

    - `of`: the inputs of the outer plan that x of the inner one depends on; `params`: that its parameters do.
    - `place`: of the inner plan's layer within the outer one's.
    """
    depends = {"x": of, "params": params}
    found: list[Action] = []
    for action in plan.actions:
        within = f"{place}.{action.place}" if place and action.place else place or action.place
        found.append(replace(action, of=frozenset().union(*(depends[name] for name in action.of)), place=within))
    return tuple(found)


def dependence(actions: Sequence[Action], of: frozenset[str] = X) -> frozenset[str]:
    """Return the inputs that the result of actions depends on, where their x depends on `of`."""
    uses_params = any(isinstance(action, Computes | Traced) and action.uses_params for action in actions)
    return of.union(PARAMS if uses_params else (), *(action.of for action in actions))


class Plan(ABC):
    """The effect of an operation on its workers' blocks: an immutable value, the same on every worker."""

    @property
    def actions(self) -> tuple[Action, ...]:
        """What all workers do, in order, for `dj.cost`; of a plan that does not say so, raises `PlanError`."""
        raise PlanError(
            f"{type(self).__name__} does not say what its workers do: give it a property `actions`, a tuple of `Moves` "
            "and `Computes` (docs/own-layers.md)."
        )

    @property
    @abstractmethod
    def workers(self) -> Workers:
        """The world ranks, ascending, of the workers that take part. All others keep their blocks."""

    @abstractmethod
    def output(self, worker: int) -> ShapeDtype:
        """Return the shape and dtype of the block of `worker`, one of `workers`, afterwards."""

    @property
    def outputs(self) -> ShapeDtypes:
        """The shapes and dtypes of the blocks of `workers` afterwards, by world rank; computed when asked for."""
        return {worker: self.output(worker) for worker in self.workers}

    def after(self, shape_dtypes: ShapeDtypes) -> ShapeDtypes:
        """Return the shapes and dtypes of all workers' blocks afterwards, given those before."""
        return on_grids(self.outputs, shape_dtypes)


@dataclass(frozen=True)
class BlocksPlan(Plan):
    """A plan that lists what its workers hold afterwards: the shapes and dtypes of their `blocks`, by world rank."""

    blocks: ShapeDtypes = field(hash=False)

    @cached_property
    def workers(self) -> Workers:
        return workers_of(self.blocks)

    def output(self, worker: int) -> ShapeDtype:
        return self.blocks[worker]

    @property
    def outputs(self) -> ShapeDtypes:
        return self.blocks


class MovementPlan(Plan):
    """A plan of one primitive: each worker's part in it is a movement."""

    @abstractmethod
    def part(self, worker: int) -> Movement | None:
        """Return the movement of any worker of the world; None where it keeps its block, and nobody waits for it."""

    inputs: ShapeDtypes
    """The shapes and dtypes of the workers' blocks before, by world rank."""

    @property
    def actions(self) -> tuple[Action, ...]:
        return (Moves(self),)

    @property
    def alike(self) -> Iterable[Workers]:
        """The workers, those together that communicate equally much, with whomever; else each by itself."""
        return ((worker,) for worker in self.workers)

    def operations(self, worker: int, *, adjoint: bool = False) -> tuple[Operation, ...]:
        """Return what `worker` communicates in the movement, or in its adjoint, in order."""
        part = self.part(worker)
        if part is None:
            return ()
        if adjoint:
            return adjoint_operations(part, worker, self.output(worker))
        return part.operations(worker, self.inputs[worker])

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's block afterwards, given its block `x`."""
        part = self.part(world.rank)
        return x if part is None else move(world, part, x)


@dataclass(frozen=True)
class Unmoved(MovementPlan):
    """The plan of an operation in which every worker keeps its block; `inputs` are their shapes and dtypes."""

    inputs: ShapeDtypes = field(hash=False)

    @property
    def actions(self) -> tuple[Action, ...]:
        return ()

    @cached_property
    def workers(self) -> Workers:
        return workers_of(self.inputs)

    def output(self, worker: int) -> ShapeDtype:
        return self.inputs[worker]

    @property
    def outputs(self) -> ShapeDtypes:
        return self.inputs

    def part(self, worker: int) -> None:
        return None


def taking_part(shape_dtypes: ShapeDtypes, *teams: Workers) -> ShapeDtypes:
    """Return the shapes and dtypes on the workers of `teams`, by world rank, ascending, from those on more workers."""
    workers = union(*teams)
    shape_dtypes = of_team(shape_dtypes, workers)
    if isinstance(shape_dtypes, ByClass | OnGrids) and shape_dtypes.workers == workers:
        return shape_dtypes
    if missing := [worker for worker in workers if worker not in shape_dtypes]:
        raise InvalidArgumentError(
            f"`x` must say what each worker that takes part holds, but says nothing of worker {missing[0]}."
        )
    return {worker: shape_dtypes[worker] for worker in workers}


def plan_and_run(world: World, team: Workers, label: str, plan: Callable[[ShapeDtypes], Any], x: Array) -> Array:
    """Return this worker's block after an operation of `team`, given its block `x`; other workers keep `x`.

    The workers of the team exchange shapes and dtypes once, make the same plan of them, and run it. `label` says what
    the operation is, in the same words on all workers.
    """
    if world.rank not in team:
        return outside(world, x)
    y: Array = plan(exchange_shapes(world, team, label, x)).run(world, x)
    return y
