"""Plans: what all workers of an operation do, apart from doing it.

A plan is made by a pure function of the shapes and dtypes that all workers hold: without a message, without tracing,
and equal whichever worker makes it. So one process can make the plans of any number of workers; and whoever knows what
all of them hold can make one plan after another without asking again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from jax import Array

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.movement import Movement, move
from distdl_jax.world import Workers, World

ShapeDtypes = Mapping[int, ShapeDtype]
"""What workers hold, by world rank."""


class Plan(ABC):
    """What an operation makes of what its workers hold: an immutable value, the same on every worker."""

    @property
    @abstractmethod
    def workers(self) -> Workers:
        """The world ranks, ascending, of the workers that take part. All others keep what they have."""

    @abstractmethod
    def output(self, worker: int) -> ShapeDtype:
        """What `worker`, one of `workers`, holds afterwards."""

    @property
    def outputs(self) -> dict[int, ShapeDtype]:
        """What each of `workers` holds afterwards, by world rank; worked out when it is asked for."""
        return {worker: self.output(worker) for worker in self.workers}

    def after(self, shape_dtypes: ShapeDtypes) -> dict[int, ShapeDtype]:
        """What all workers hold afterwards that held `shape_dtypes` before, also those that take no part."""
        return {**shape_dtypes, **self.outputs}


class MovementPlan(Plan):
    """A plan of one primitive: each worker's part in it is a movement."""

    @abstractmethod
    def part(self, worker: int) -> Movement | None:
        """What `worker`, any worker of the world, does; None where it keeps what it has, and nobody waits for it."""

    def run(self, world: World, x: Array) -> Array:
        """What this worker, which holds `x`, holds afterwards."""
        part = self.part(world.rank)
        return x if part is None else move(world, part, x)


@dataclass(frozen=True)
class Unmoved(MovementPlan):
    """The plan of an operation in which every worker keeps what it has, `inputs`."""

    inputs: ShapeDtypes = field(hash=False)

    @cached_property
    def workers(self) -> Workers:
        return tuple(sorted(self.inputs))

    def output(self, worker: int) -> ShapeDtype:
        return self.inputs[worker]

    def part(self, worker: int) -> None:
        return None


def taking_part(shape_dtypes: ShapeDtypes, *teams: Workers) -> dict[int, ShapeDtype]:
    """What the workers of `teams` hold, by world rank, ascending; `shape_dtypes` may speak of more workers."""
    workers = sorted({worker for team in teams for worker in team})
    if missing := [worker for worker in workers if worker not in shape_dtypes]:
        raise InvalidArgumentError(
            f"`x` must say what each worker that takes part holds, but says nothing of worker {missing[0]}."
        )
    return {worker: shape_dtypes[worker] for worker in workers}
