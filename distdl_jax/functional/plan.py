"""Plans: the actions of all workers in an operation. A plan is a movement, or a computation around movements.

A plan is made by a pure function of the shapes and dtypes on all workers: without communication or tracing, and equal
on every worker. So one process can plan for any number of workers, and chain plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from jax import Array

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.block_checks import outside
from distdl_jax.functional.mark import moved
from distdl_jax.functional.movement import Movement, adjoint_operations, move
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.static import Immutable
from distdl_jax.plans.alike import ByClass, of_team, on_grids, workers_of
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.worker_ranks import covers, union
from distdl_jax.transports.agreement import exchange_shapes
from distdl_jax.transports.world import Workers, World
from distdl_jax.watchdog.programs.ir import Operation

ShapeDtypes = Mapping[int, ShapeDtype]
"""The shapes and dtypes of workers' blocks, by world rank."""


class Plan(Immutable, ABC):
    """The effect of an operation on its workers' blocks: an immutable value, the same on every worker."""

    inputs: ShapeDtypes
    """The shapes and dtypes of the workers' input blocks, by world rank."""

    @cached_property
    def workers(self) -> Workers:
        """The world ranks, ascending, of the participating workers. All others keep their blocks."""
        return workers_of(self.inputs)

    @abstractmethod
    def output(self, worker: int) -> ShapeDtype:
        """Return the shape and dtype of the output block of `worker`, one of `workers`."""

    @property
    def outputs(self) -> ShapeDtypes:
        """The shapes and dtypes of the output blocks of `workers`, by world rank; computed on demand."""
        return {worker: self.output(worker) for worker in self.workers}

    def after(self, shape_dtypes: ShapeDtypes) -> ShapeDtypes:
        """Return the shapes and dtypes of all workers' output blocks, given their input blocks."""
        return on_grids(self.outputs, shape_dtypes)


@dataclass(frozen=True)
class BlocksPlan(Plan):
    """A plan that lists its output: the shapes and dtypes of the workers' `blocks`, by world rank."""

    blocks: ShapeDtypes = field(hash=False)

    @cached_property
    def workers(self) -> Workers:
        return workers_of(self.blocks)

    def output(self, worker: int) -> ShapeDtype:
        return self.blocks[worker]

    @property
    def outputs(self) -> ShapeDtypes:
        return self.blocks


class Computation(Plan):
    """A plan of computation on each worker's block, before and after movements."""

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's output block, given its block `x`."""
        return self.computed(world, x) if world.rank in self.workers else x

    @abstractmethod
    def computed(self, world: World, x: Array) -> Array:
        """Return the output block of this worker, one of `workers`."""


class MovementPlan(Plan):
    """A plan of one primitive: each worker's part in it is a movement."""

    @abstractmethod
    def part(self, worker: int) -> Movement | None:
        """Return the movement of any worker of the world; None if it keeps its block, and no worker waits for it."""

    @property
    def alike(self) -> Iterable[Workers]:
        """The workers, grouped if they communicate the same amount, whoever the partners; otherwise one by one."""
        return ((worker,) for worker in self.workers)

    def operations(self, worker: int, *, adjoint: bool = False) -> tuple[Operation, ...]:
        """Return the communication of `worker` in the movement, or in its adjoint, in order."""
        part = self.part(worker)
        if part is None:
            return ()
        if adjoint:
            return adjoint_operations(part, worker, self.output(worker))
        return part.operations(worker, self.inputs[worker])

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's output block, given its block `x`."""
        part = self.part(world.rank)
        if world.records and world.rank in self.inputs:
            return moved(self, world.rank, x, moves=part is not None)
        return x if part is None else move(world, part, x)


@dataclass(frozen=True)
class Unmoved(MovementPlan):
    """The plan of an operation without communication, in which every worker keeps its block."""

    inputs: ShapeDtypes = field(hash=False)

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
    workers, known = union(*teams), workers_of(shape_dtypes)
    if not covers(known, workers):
        missing = next(worker for worker in workers if worker not in shape_dtypes)
        raise InvalidArgumentError(
            f"`x` must give the block of each participating worker, but has none for worker {missing}."
        )
    return shape_dtypes if isinstance(shape_dtypes, ByClass) and known == workers else of_team(shape_dtypes, workers)


def flags_text(**flags: tuple[object, object]) -> str:
    """Return, for the label of an agreement, the arguments that differ from their defaults, which are given, too.

    >>> flags_text(transpose_src=(True, False), preserve_batch=(True, True))
    ' (transpose_src=True)'
    """
    given = ", ".join(
        f"{name}={value!r}" for name, (value, default) in flags.items() if value is not None and value != default
    )
    return f" ({given})" if given else ""


def plan_and_run(
    operation: str,
    plan: Callable[[ShapeDtypes], MovementPlan | Computation],
    x: Array,
    P_x: Partition,
    P_y: Partition | None = None,
    *,
    team: Workers = (),
) -> Array:
    """Return this worker's block after an operation on P_x, or from P_x to P_y; other workers keep `x`.

    The workers of both, or of `team`, exchange shapes and dtypes once, make the same plan from them, and run it.
    `operation` describes it, with the same text on all workers.
    """
    world = P_x.world
    team = team or union(P_x.ranks, *(() if P_y is None else (P_y.ranks,)))
    if world.rank not in team:
        return outside(world, x)
    where = f"on {P_x.describe()}" if P_y is None else f"from {P_x.describe()} to {P_y.describe()}"
    return plan(exchange_shapes(world, team, f"{operation} {where}", x)).run(world, x)
