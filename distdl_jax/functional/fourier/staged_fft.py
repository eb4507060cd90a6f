"""One worker's arithmetic on several grids, one after the other, with a movement between each two."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.functional.plan import BlocksPlan, ShapeDtypes
from distdl_jax.functional.repartition import RepartitionPlan
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.decomposition import ProductGrid, balanced_ranges, box_shape
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import tie
from distdl_jax.tracing.world import World


class Step(Protocol):
    """The arithmetic of each worker on its block: an immutable value."""

    def lengths(self) -> dict[int, int]:
        """Return the lengths, afterwards, of the dimensions that it works along: each worker has them as a whole."""

    def dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype of the result, for a block of `dtype`."""

    def __call__(self, x: Array) -> Array:
        """Return the result, of a block that has elements."""


@dataclass(frozen=True)
class Move:
    """A repartition of the tensor with its dimensions in another `order`, in which they are packed and sent."""

    order: tuple[int, ...]
    plan: RepartitionPlan

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's block afterwards, its dimensions in the order of `x`."""
        owned, needed = self.plan.exchange.owned, self.plan.exchange.needed
        x = x.transpose(self.order) if world.rank in owned.cell_of else x
        y = self.plan.run(world, x)
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return y.transpose(back) if world.rank in needed.cell_of else y


@dataclass(frozen=True)
class Stage(BlocksPlan):
    """A movement to the grid of a stage, and the arithmetic there; None for none.

    - `inputs`: the workers' blocks between the two.
    """

    move: Move | None
    inputs: ShapeDtypes = field(hash=False)
    step: Step | None

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's block afterwards."""
        x = x if self.move is None else self.move.run(world, x)
        if self.step is None:
            return x
        y = self.blocks[world.rank]
        return self.step(x).astype(y.dtype) if x.size else tie(jnp.zeros(y.shape, y.dtype), x)


@dataclass(frozen=True)
class StagesPlan(BlocksPlan):
    """The plan of stages on several grids; `grid` has the blocks in the end."""

    stages: tuple[Stage, ...]
    grid: ProductGrid

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the data in the end."""
        return self.blocks[self.grid.ranks[0]].dtype

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's block in the end."""
        for stage in self.stages:
            x = stage.run(world, x)
        return x


def plan_stages(
    blocks: ShapeDtypes,
    grid: ProductGrid,
    dtype: np.dtype,
    path: Sequence[tuple[Partition, Step | None]],
    like: ProductGrid,
    rebalanced: Collection[int] = (),
) -> StagesPlan:
    """Plan the steps on the grids of `path`, of which the first is `grid`, for blocks of `dtype`.

    On a grid of the workers and the shape of `like` the blocks are those of `like` along dimensions of its length,
    except `rebalanced`. Elsewhere they are balanced.
    """
    stages: list[Stage] = []
    before: Step | None = None
    for P, step in path:
        needed = _grid_on(P, grid, like, rebalanced) if stages else grid
        move = None if needed == grid else _move(blocks, grid, needed, dtype, step or before)
        if move is not None:
            blocks = {worker: move.plan.output(worker) for worker in blocks if worker not in needed.cell_of}
            blocks |= {worker: ShapeDtype(box_shape(needed.box(c)), dtype) for worker, c in needed.cell_of.items()}
        grid, before, inputs = needed, step, blocks
        if step is not None:
            dtype, lengths = step.dtype(dtype), step.lengths()
            along = (((0, lengths[d]),) if d in lengths else ranges for d, ranges in enumerate(grid.ranges))
            grid = ProductGrid(grid.ranks, tuple(along))
            shapes = {worker: box_shape(grid.box(cell)) for worker, cell in grid.cell_of.items()}
            blocks = {worker: ShapeDtype(shapes.get(worker, x.shape), dtype) for worker, x in blocks.items()}
        stages.append(Stage(blocks, move, inputs, step))
    return StagesPlan(blocks, tuple(stages), grid)


def _grid_on(P: Partition, grid: ProductGrid, like: ProductGrid, rebalanced: Collection[int]) -> ProductGrid:
    """Return the blocks on `P` of the tensor of `grid`."""
    ranges = [balanced_ranges(n, p) for n, p in zip(grid.extent, P.shape, strict=True)]
    if (P.ranks, P.shape) == (like.ranks, like.shape):
        for d, (n, m) in enumerate(zip(grid.extent, like.extent, strict=True)):
            ranges[d] = like.ranges[d] if n == m and d not in rebalanced else ranges[d]
    return ProductGrid(P.ranks, tuple(ranges))


def _move(blocks: ShapeDtypes, grid: ProductGrid, needed: ProductGrid, dtype: np.dtype, step: Step | None) -> Move:
    """Plan the movement next to `step`.

    XLA transforms along the last dimension, and transposes for others. That is fast if the other dimension is next
    to the last, since these matrices stay in the cache. So the dimension travels there.
    """
    dims = len(grid.shape)
    axes = list(step.lengths()) if step is not None else []
    order = tuple(range(dims))
    if len(axes) == 1 and axes[0] < dims - 2:
        order = (*(d for d in order[:-1] if d != axes[0]), axes[0], dims - 1)
    turned = {
        worker: ShapeDtype(tuple(x.shape[d] for d in order), x.dtype) if worker in grid.cell_of else x
        for worker, x in blocks.items()
    }
    exchange = Exchange(_in_order(grid, order), _in_order(needed, order))
    return Move(order, RepartitionPlan("repartition", turned, dtype, exchange, True))


def _in_order(grid: ProductGrid, order: tuple[int, ...]) -> ProductGrid:
    """Return the blocks of the tensor with its dimensions in another order."""
    ranks = np.reshape(grid.ranks, grid.shape).transpose(order).ravel()
    return ProductGrid(tuple(ranks.tolist()), tuple(grid.ranges[d] for d in order))
