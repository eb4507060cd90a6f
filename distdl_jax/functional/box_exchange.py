"""A chain of exchanges as one movement: the shared part of repartition, halo exchange, all-gather and reshape."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import numpy as np
from jax import Array

from distdl_jax.functional.block_checks import is_differentiable
from distdl_jax.functional.channel import Channel, tag_of, tied_zeros
from distdl_jax.functional.collectives import accumulation_dtype
from distdl_jax.functional.packing import exchange, exchange_operations
from distdl_jax.functional.plan import MovementPlan, ShapeDtypes
from distdl_jax.plans.alike import workers_of
from distdl_jax.plans.messages import ExchangePlan
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.world import Workers, World
from distdl_jax.watchdog.programs.ir import Operation


@dataclass(frozen=True)
class BoxMovement:
    """One worker's part of a chain of exchanges.

    - `name`: of the primitive, for profiles and for the messages' tag.
    - `team`: the world ranks that take part.
    - `steps`: the exchanges, in order; each takes the block that the one before left.
    - `source`, `target`: this worker's block before and after, zero-volume where it owns or needs nothing.
    - `dtype`: of the data, in which messages travel; a placeholder may have another one.
    - `copies`: whether several workers may get the same element. Then the adjoint adds.
    - `adds`: whether elements may be sums of several. Then everything moves in the dtype of sums, on all workers: one
      that has nothing to add itself cannot know that its partner has.
    - `lead`: the sizes of the batch dimensions in front of the blocks.
    """

    name: str
    team: Workers
    steps: tuple[ExchangePlan, ...]
    source: ShapeDtype
    target: ShapeDtype
    dtype: np.dtype
    differentiable: bool
    copies: bool = False
    adds: bool = False
    lead: tuple[int, ...] = ()

    def operations(self, worker: int, x: ShapeDtype) -> tuple[Operation, ...]:
        dtype = accumulation_dtype(self.dtype) if self.adds else self.dtype
        tag = tag_of(self.name, self.team)
        return tuple(op for step in self.steps for op in exchange_operations(step, self.lead, dtype, tag))

    def adjoint(self) -> BoxMovement:
        return replace(
            self,
            steps=tuple(step.reverse() for step in reversed(self.steps)),
            source=self.target,
            target=self.source,
            copies=self.adds,
            adds=self.copies,
        )

    def batched(self, n: int) -> BoxMovement:
        return replace(self, source=self.source.batched(n), target=self.target.batched(n), lead=(n, *self.lead))

    @property
    def is_identity(self) -> bool:
        """Whether this worker keeps its block and sends nothing; then the adjoint is the identity too."""
        return self.source == self.target and all(step.is_identity for step in self.steps)

    def run(self, world: World, x: Array) -> Array:
        with jax.named_scope(self.name):
            channel = Channel(world.transport, x, tag_of(self.name, self.team))
            # Only a placeholder can have another dtype, also one of another kind, and of that nothing is sent.
            y = x.astype(self.dtype) if x.size else tied_zeros(ShapeDtype(x.shape, self.dtype), x)
            if self.adds:
                y = y.astype(accumulation_dtype(self.dtype))
            for step in self.steps:
                if y.size:  # the first step may see the block in another shape
                    y = y.reshape(self.lead + step.in_shape)
                y = exchange(channel, step, y, self.lead)
            # Where this worker needs nothing, its placeholder stands for the block.
            y = y.reshape(self.target.shape) if y.size else tied_zeros(self.target, x)
            return channel.finish(y.astype(self.target.dtype))


@dataclass(frozen=True)
class BoxPlan(MovementPlan):
    """A chain of exchanges between all workers that take part.

    - `name`: of the primitive.
    - `inputs`: the shapes and dtypes of the workers' blocks.
    - `dtype`: of the data.
    """

    name: str
    inputs: ShapeDtypes = field(hash=False)
    dtype: np.dtype

    @cached_property
    def workers(self) -> Workers:
        return workers_of(self.inputs)

    @property
    def copies(self) -> bool:
        """Whether several workers may get the same element."""
        return False

    @property
    def adds(self) -> bool:
        """Whether elements may be sums of several."""
        return False

    def team(self, worker: int) -> Workers:
        """Return the world ranks that the exchanges of `worker` are between, in one order for all of them."""
        return self.workers

    @abstractmethod
    def steps(self, worker: int) -> tuple[ExchangePlan, ...]:
        """Return the exchanges of `worker`, in order."""

    def part(self, worker: int) -> BoxMovement | None:
        if worker not in self.inputs:
            return None
        part = BoxMovement(
            self.name,
            self.team(worker),
            self.steps(worker),
            self.inputs[worker],
            self.output(worker),
            self.dtype,
            is_differentiable(self.dtype),
            self.copies,
            self.adds,
        )
        return None if part.is_identity else part
