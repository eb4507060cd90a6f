"""What repartition, halo exchange and the gathering primitives share: a chain of exchanges as one movement."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.backends.base import World
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.partition import Partition
from distdl_jax.plans.broadcasting import shape_text
from distdl_jax.plans.decomposition import ProductGrid, index_of, ranges_of_sizes
from distdl_jax.plans.messages import ExchangePlan
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.channel import Channel
from distdl_jax.primitives.handshake import checked_kinds
from distdl_jax.primitives.movement import move
from distdl_jax.primitives.packing import exchange
from distdl_jax.primitives.team_operations import accumulation_dtype
from distdl_jax.primitives.tie import tie


@dataclass(frozen=True)
class BoxMovement:
    """One worker's part of a chain of exchanges.

    - `name`: of the primitive, for profiles and for the messages' tag.
    - `team`: the world ranks that take part.
    - `steps`: the exchanges, in order; each takes the block that the one before left.
    - `source`, `target`: what this worker holds before and after, zero-volume where it owns or needs nothing.
    - `copies`: whether several workers may get the same element. Then the adjoint adds.
    - `adds`: whether elements may be sums of several. Then everything moves in the dtype of sums, on all workers: one
      that has nothing to add itself cannot know that its partner has.
    - `lead`: the sizes of the batch dimensions in front of the blocks.
    """

    name: str
    world: World
    team: tuple[int, ...]
    steps: tuple[ExchangePlan, ...]
    source: ShapeDtype
    target: ShapeDtype
    differentiable: bool
    copies: bool = False
    adds: bool = False
    lead: tuple[int, ...] = ()

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
        """Whether this worker keeps what it has and sends nothing; then the adjoint is the identity too."""
        return self.source == self.target and all(step.is_identity for step in self.steps)

    def run(self, x: Array) -> Array:
        with jax.named_scope(self.name):
            channel = Channel(self.world.transport, x, zlib.crc32(repr((self.name, self.team)).encode()) % 32768)
            y = x
            if self.adds:
                y = y.astype(accumulation_dtype(np.dtype(x.dtype)))
            for step in self.steps:
                y = exchange(channel, step, y, self.lead)
            if y.size == 0:
                # This worker needs nothing, so its placeholder stands for the block.
                y = tie(jnp.zeros(self.target.shape, self.target.dtype), x)
            return channel.finish(y.astype(self.target.dtype))


def run_boxes(plan: BoxMovement, x: Array) -> Array:
    """Carry out the movement; where this worker has nothing to do, the result is `x` itself."""
    return x if plan.is_identity else move(plan, x)


def owned_grid(name: str, P: Partition, shapes: dict[int, tuple[int, ...]]) -> ProductGrid:
    """The grid of the blocks that the workers of `P` hold, balanced or not, from their local shapes by world rank."""
    listed = ", ".join(f"{list(shapes[worker])} on worker {worker}" for worker in P.ranks[:64])
    wrong = [worker for worker in P.ranks if len(shapes[worker]) != P.dim]
    if wrong:
        raise PlanError(
            f"`{name}` must have as many dimensions as its partition ({shape_text(P.shape)}), but has the shapes "
            f"{listed}."
        )
    sizes: list[list[int | None]] = [[None] * p for p in P.shape]
    for rank, worker in enumerate(P.ranks):
        for d, i in enumerate(index_of(rank, P.shape)):
            if sizes[d][i] not in (None, shapes[worker][d]):
                raise PlanError(
                    f"The blocks of `{name}` don't form a {shape_text(P.shape)} grid: workers with the same index in "
                    f"dimension {d} must hold the same length there, but the shapes are {listed}."
                )
            sizes[d][i] = shapes[worker][d]
    return ProductGrid(P.ranks, tuple(ranges_of_sizes([n or 0 for n in line]) for line in sizes))


def common_dtype(name: str, shape_dtypes: dict[int, ShapeDtype], owners: Sequence[int]) -> np.dtype:
    """The dtype of the data that `owners` (world ranks) hold; refuses placeholders of another kind elsewhere."""
    dtype = shape_dtypes[owners[0]].dtype
    if any(shape_dtypes[worker].dtype != dtype for worker in owners):
        listed = ", ".join(f"{shape_dtypes[worker].dtype} on worker {worker}" for worker in owners)
        raise PlanError(f"`{name}` must have one dtype on all workers that hold a part of it, but is {listed}.")
    checked_kinds(name, shape_dtypes, dtype)
    return dtype


def is_differentiable(dtype: np.dtype) -> bool:
    """Whether data of `dtype` has derivatives."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def checked_axes(axes: Any, dim: int) -> tuple[int, ...]:
    """Dimensions of a partition of `dim` dimensions, ascending, from an integer or a sequence."""
    given = (axes,) if isinstance(axes, int) else tuple(axes)
    if any(not isinstance(axis, int) or not -dim <= axis < dim for axis in given):
        raise InvalidArgumentError(f"`axes` (={axes!r}) must be dimensions of the partition, 0 to {dim - 1}.")
    return tuple(sorted({axis % dim for axis in given}))
