"""A halo in buffers of its own: neighbours exchange the edges of blocks alone, and nothing is joined to a block.

To join them is a copy of the block for each dimension. Arithmetic that can work on a block and its halo as they are
takes them so, and no cotangent is written twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
from jax import Array, lax

from distdl_jax.plans.halo_edges import HaloEdges, halo_edges
from distdl_jax.primitives.block_checks import GridBlocks
from distdl_jax.primitives.halo_exchange import RangesPlan
from distdl_jax.primitives.packing import joined_slices, side_by_side
from distdl_jax.primitives.plan import Action, Moves
from distdl_jax.tracing.materialize import materialize
from distdl_jax.tracing.tie import tie
from distdl_jax.world import World

Parts = tuple[Array, ...]
"""A block, and for each side of it an array of its halo there."""

Shape = tuple[int, ...]


class Side(NamedTuple):
    """The halo along dimension `axis`, as one array: `low` entries before the block, then `high` after it."""

    axis: int
    low: int
    high: int


@dataclass(frozen=True)
class SplitHalo:
    """Where the parts of one worker's halo belong; `kernels` takes it as a `SplitInput`.

    - `sides`: in order. Along the axes of the sides before it, a side is as long as the block with its halo; along the
      axes of the sides after it, as the block. So the corners belong to the last side that they are on.
    """

    sides: tuple[Side, ...]

    def joined_shape(self, block: Shape) -> Shape:
        """Return the shape of the block with its halo, from the block's."""
        shape = list(block)
        for axis, low, high in self.sides:
            shape[axis] += low + high
        return tuple(shape)

    def shapes(self, joined: Shape) -> tuple[Shape, ...]:
        """Return the shapes of the parts, from the shape of the block with its halo."""
        shape, shapes = list(joined), []
        for axis, low, high in reversed(self.sides):
            block, shape[axis] = shape[axis] - low - high, low + high
            shapes.append(tuple(shape))
            shape[axis] = block
        return (tuple(shape), *reversed(shapes))

    def join(self, parts: Parts) -> Array:
        """Return the block with its halo."""
        block = parts[0]
        for halo, (axis, low, high) in zip(parts[1:], self.sides, strict=True):
            pieces = [(halo, 0, low), (block, 0, block.shape[axis]), (halo, low, low + high)]
            block = joined_slices(pieces, axis, side_by_side)
        return block

    def split(self, x: Array) -> Parts:
        """Return the parts of `x`, a block with its halo."""
        halo = []
        for axis, low, high in reversed(self.sides):
            stop = x.shape[axis] - high
            halo.append(_ends(x, axis, low, high))
            x = joined_slices([(x, low, stop)], axis)
        return (x, *reversed(halo))


@dataclass(frozen=True)
class SplitHaloPlan:
    """A halo exchange that leaves each worker's block as it is.

    - `edges`: which entries of the blocks are exchanged, for each dimension along which something moves, in order.
    - `movements`: how.
    """

    edges: tuple[HaloEdges, ...]
    movements: tuple[RangesPlan, ...]

    @property
    def actions(self) -> tuple[Action, ...]:
        """What workers do, in order."""
        return tuple(Moves(movement, beside=True) for movement in self.movements)

    def split_halo(self, worker: int) -> SplitHalo:
        """Return where the parts of the halo of `worker` belong."""
        return SplitHalo(tuple(Side(each.axis, *each.around[each.index(worker)]) for each in self.edges))

    def run(self, world: World, x: Array) -> Parts:
        """Return this worker's block, `x`, and its halo."""
        sides, parts = self.split_halo(world.rank).sides, [x]
        for edges, movement, side in zip(self.edges, self.movements, sides, strict=True):
            with_ends = [_with_ends(part, edges.axis, edges.edges[edges.index(world.rank)]) for part in parts]
            # Of the halo, too, neighbours need the ends: the corners of theirs.
            sent = SplitHalo(sides[: len(parts) - 1]).join(tuple(ends for _, ends in with_ends))
            received = movement.run(world, sent)
            parts = [*(part for part, _ in with_ends), _ends(received, *side)]
        return tuple(parts)


def plan_split_halo(movement: RangesPlan) -> SplitHaloPlan | None:
    """Plan `movement`, which joins halos to blocks, without joining; None where more than edges moves."""
    edges = halo_edges(movement.halos)
    if edges is None:
        return None
    movements = []
    for each in edges:
        inputs = GridBlocks(each.halos.owned, movement.dtype)
        movements.append(RangesPlan("windows", inputs, movement.dtype, each.halos))
    return SplitHaloPlan(edges, tuple(movements))


def _ends(x: Array, axis: int, first: int, last: int) -> Array:
    """Return the first and the last entries of x along a dimension, side by side."""
    size = x.shape[axis]
    return joined_slices([(x, 0, first), (x, size - last, size)], axis)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _with_ends(x: Array, axis: int, counts: tuple[int, int]) -> tuple[Array, Array]:
    """Return `x`, and its first and its last entries.

    The adjoint adds the cotangent of these to x's in its place, where JAX's own would write an array like x twice.
    """
    return x, _ends(x, axis, *counts)


def _with_ends_adjoint(axis: int, counts: tuple[int, int], _: None, cotangents: tuple[Array, Array]) -> tuple[Array]:
    dx, d_ends = cotangents
    first, last = counts
    if not (first or last):
        return (tie(dx, d_ends),)  # of nothing, but by an exchange that all workers take part in, or none
    for start, place, count in ((0, 0, first), (dx.shape[axis] - last, first, last)):
        if count:
            end = lax.slice_in_dim(dx, start, start + count, axis=axis)
            end += lax.slice_in_dim(d_ends, place, place + count, axis=axis)
            # In a loop with this sum, XLA would write all of dx anew.
            dx = lax.dynamic_update_slice_in_dim(dx, materialize(end), start, axis)
    return (dx,)


_with_ends.defvjp(lambda x, axis, counts: (_with_ends(x, axis, counts), None), _with_ends_adjoint)
