"""A plan, and a repartition after it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from jax import Array

from distdl_jax.partition import Partition
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.plan import Plan, ShapeDtypes
from distdl_jax.primitives.repartition import RepartitionPlan, plan_repartition
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
        """What this worker, which holds `x`, holds afterwards."""
        return self.move.run(world, self.first.run(world, x))


def moved_to(first: RunnablePlan, x: ShapeDtypes, P_x: Partition, P_y: Partition) -> MovedPlan:
    """`first`, of what all workers hold, whose output on `P_x` goes on to `P_y`."""
    return MovedPlan(first, plan_repartition(first.after(x), P_x, P_y))
