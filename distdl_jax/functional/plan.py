"""Plans: what all workers of an operation do, apart from doing it.

A plan is made by a pure function of the shapes and dtypes on all workers: without a message, without tracing, and equal
whichever worker makes it. So one process can make the plans of any number of workers, and one plan after another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jax import Array

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.block_checks import outside
from distdl_jax.functional.mark import moved
from distdl_jax.functional.movement import Movement, adjoint_operations, move
from distdl_jax.plans.alike import ByClass, OnGrids, of_team, on_grids, workers_of
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.worker_ranks import union
from distdl_jax.tracing.world import Workers, World
from distdl_jax.transports.agreement import exchange_shapes
from distdl_jax.watchdog.programs.ir import Operation

ShapeDtypes = Mapping[int, ShapeDtype]
"""The shapes and dtypes of workers' blocks, by world rank."""


class Plan(ABC):
    """The effect of an operation on its workers' blocks: an immutable value, the same on every worker."""

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
        if world.records and world.rank in self.inputs:
            return moved(self, world.rank, x, moves=part is not None)
        return x if part is None else move(world, part, x)


@dataclass(frozen=True)
class Unmoved(MovementPlan):
    """The plan of an operation in which every worker keeps its block; `inputs` are their shapes and dtypes."""

    inputs: ShapeDtypes = field(hash=False)

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

    def run(self, world: World, x: Array) -> Array:
        return x


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
