"""A plan, and a repartition after it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from jax import Array

from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.plan import Plan, ShapeDtypes
from distdl_jax.primitives.repartition import RepartitionPlan
from distdl_jax.world import Workers, World


class RunnablePlan(Protocol):
    """A plan that runs on one array."""

    @property
    def workers(self) -> Workers: ...

    def output(self, worker: int) -> ShapeDtype: ...

    def after(self, shape_dtypes: ShapeDtypes) -> dict[int, ShapeDtype]: ...

    def run(self, world: World, x: Array) -> Array: ...


@dataclass(frozen=True)
class MovedPlan(Plan):
    """`first`, and then `move`."""

    first: RunnablePlan
    move: RepartitionPlan

    @cached_property
    def workers(self) -> Workers:
        return tuple(sorted({*self.first.workers, *self.move.workers}))

    def output(self, worker: int) -> ShapeDtype:
        return self.move.output(worker) if worker in self.move.workers else self.first.output(worker)

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's block of the output, from its block `x`."""
        return self.move.run(world, self.first.run(world, x))
