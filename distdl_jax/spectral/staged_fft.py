"""One worker's arithmetic on several grids, one after the other, with a movement between each two."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.partition import Partition
from distdl_jax.plans.decomposition import ProductGrid, balanced_ranges, box_shape
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.plan import Plan, ShapeDtypes
from distdl_jax.primitives.repartition import RepartitionPlan
from distdl_jax.tracing.tie import tie
from distdl_jax.world import Workers, World


class Step(Protocol):
    """What each worker does with its block: an immutable value."""

    def lengths(self) -> dict[int, int]:
        """How long the dimensions are afterwards that it works along: those are whole."""

    def dtype(self, dtype: np.dtype) -> np.dtype:
        """The dtype of the result, for a block of `dtype`."""

    def __call__(self, x: Array) -> Array:
        """The result, of a block that has elements."""


@dataclass(frozen=True)
class Move:
    """A repartition of the tensor with its dimensions in another `order`, in which they are packed and sent."""

    order: tuple[int, ...]
    plan: RepartitionPlan

    def run(self, world: World, x: Array) -> Array:
        """What this worker, which holds `x`, holds afterwards, in the order that dimensions had."""
        owned, needed = self.plan.exchange.owned, self.plan.exchange.needed
        x = x.transpose(self.order) if world.rank in owned.cell_of else x
        y = self.plan.run(world, x)
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return y.transpose(back) if world.rank in needed.cell_of else y


@dataclass(frozen=True)
class StagesPlan(Plan):
    """The plan of steps on several grids.

    - `moves`: the movement before each step; None where the tensor is on its grid already.
    - `steps`: the arithmetic; None where there is none.
    - `held`: what all workers hold after each step.
    - `grid`: the blocks in the end.
    """

    moves: tuple[Move | None, ...]
    steps: tuple[Step | None, ...]
    held: tuple[ShapeDtypes, ...] = field(hash=False)
    grid: ProductGrid

    @cached_property
    def workers(self) -> Workers:
        return tuple(sorted(self.held[-1]))

    @property
    def dtype(self) -> np.dtype:
        """That of the data in the end."""
        return self.held[-1][self.grid.ranks[0]].dtype

    def output(self, worker: int) -> ShapeDtype:
        return self.held[-1][worker]

    def run(self, world: World, x: Array) -> Array:
        """What this worker, which holds `x`, holds afterwards."""
        for move, step, held in zip(self.moves, self.steps, self.held, strict=True):
            x = x if move is None else move.run(world, x)
            mine = held[world.rank]
            if step is not None:
                x = step(x).astype(mine.dtype) if x.size else tie(jnp.zeros(mine.shape, mine.dtype), x)
        return x


def plan_stages(
    held: ShapeDtypes,
    grid: ProductGrid,
    dtype: np.dtype,
    path: Sequence[tuple[Partition, Step | None]],
    like: ProductGrid,
    anew: Collection[int] = (),
) -> StagesPlan:
    """The plan of the steps on the grids of `path`, of which the first is that of `grid`, for blocks of `dtype`.

    On a grid of the workers and the shape of `like` the blocks are those of `like` along dimensions of its length,
    except `anew`. Elsewhere they are balanced.
    """
    moves: list[Move | None] = []
    after: list[ShapeDtypes] = []
    before: Step | None = None
    for P, step in path:
        needed = _blocks(P, grid, like, anew) if moves else grid
        move = None if needed == grid else _move(held, grid, needed, dtype, step or before)
        if move is not None:
            held = {worker: its for worker, its in held.items() if worker not in needed.cell_of}
            held |= {worker: ShapeDtype(box_shape(needed.box(c)), dtype) for worker, c in needed.cell_of.items()}
            held |= {worker: move.plan.output(worker) for worker in held.keys() - needed.cell_of.keys()}
        grid, before = needed, step
        if step is not None:
            dtype, lengths = step.dtype(dtype), step.lengths()
            whole = (((0, lengths[d]),) if d in lengths else its for d, its in enumerate(grid.ranges))
            grid = ProductGrid(grid.ranks, tuple(whole))
            blocks = {worker: box_shape(grid.box(cell)) for worker, cell in grid.cell_of.items()}
            held = {worker: ShapeDtype(blocks.get(worker, its.shape), dtype) for worker, its in held.items()}
        moves.append(move)
        after.append(held)
    return StagesPlan(tuple(moves), tuple(step for _, step in path), tuple(after), grid)


def _blocks(P: Partition, grid: ProductGrid, like: ProductGrid, anew: Collection[int]) -> ProductGrid:
    """The blocks on `P` of the tensor of which `grid` has those before."""
    ranges = [balanced_ranges(n, p) for n, p in zip(grid.extent, P.shape, strict=True)]
    if (P.ranks, P.shape) == (like.ranks, like.shape):
        same = [n == m and d not in anew for d, (n, m) in enumerate(zip(grid.extent, like.extent, strict=True))]
        ranges = [theirs if keep else even for keep, theirs, even in zip(same, like.ranges, ranges, strict=True)]
    return ProductGrid(P.ranks, tuple(ranges))


def _move(held: ShapeDtypes, grid: ProductGrid, needed: ProductGrid, dtype: np.dtype, step: Step | None) -> Move:
    """The movement beside `step`.

    XLA transforms along the last dimension, and transposes for others: fast where the one that it exchanges with the
    last is next to it, since these matrices stay in the cache. So it travels there.
    """
    dims = len(grid.shape)
    axes = list(step.lengths()) if step is not None else []
    order = tuple(range(dims))
    if len(axes) == 1 and axes[0] < dims - 2:
        order = (*(d for d in order[:-1] if d != axes[0]), axes[0], dims - 1)
    turned = {
        worker: ShapeDtype(tuple(its.shape[d] for d in order), its.dtype) if worker in grid.cell_of else its
        for worker, its in held.items()
    }
    exchange = Exchange(_in_order(grid, order), _in_order(needed, order))
    return Move(order, RepartitionPlan("repartition", turned, dtype, exchange, True))


def _in_order(grid: ProductGrid, order: tuple[int, ...]) -> ProductGrid:
    """The blocks of the tensor with its dimensions in another order."""
    ranks = np.reshape(grid.ranks, grid.shape).transpose(order).ravel()
    return ProductGrid(tuple(ranks.tolist()), tuple(grid.ranges[d] for d in order))
