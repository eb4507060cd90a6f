"""The rows that a worker needs around its block, apart from the block: only the edges of blocks are exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.backends.base import World
from distdl_jax.nn.local.apart import Apart, taken_apart
from distdl_jax.plans.halo_edges import HaloEdges, halo_edges
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.halo_exchange import RangesPlan
from distdl_jax.primitives.tie import tie
from distdl_jax.primitives.written_once import written_once


@dataclass(frozen=True)
class RowsAroundPlan:
    """A halo exchange along one dimension that leaves each worker's block as it is.

    - `edges`: which entries of the blocks are exchanged; `movement`: how.
    """

    edges: HaloEdges
    movement: RangesPlan

    def apart(self, worker: int) -> Apart:
        """Where the rows are that `worker` gets."""
        return Apart(self.edges.axis, *self.edges.around[self.edges.index(worker)])

    def run(self, world: World, x: Array) -> tuple[Array, Array]:
        """This worker's block, `x`, and the rows around it: those before it, and then those after it."""
        apart = self.apart(world.rank)
        kept = self.edges.kept[self.edges.index(world.rank)]
        x, edges = _with_edges(x, apart.axis, kept)
        edges = self.movement.run(world, edges)
        return x, taken_apart(edges, apart)[1]


def rows_around(movement: RangesPlan) -> RowsAroundPlan | None:
    """`movement`, which joins rows to blocks, as one that does not; None where more than edges moves."""
    edges = halo_edges(movement.halos)
    if edges is None:
        return None
    inputs = {}
    for worker, held in movement.inputs.items():
        shape = list(held.shape)
        shape[edges.axis] = sum(edges.kept[edges.index(worker)])
        inputs[worker] = ShapeDtype(tuple(shape), held.dtype)
    return RowsAroundPlan(edges, RangesPlan("windows", inputs, movement.dtype, edges.halos))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _with_edges(x: Array, axis: int, kept: tuple[int, int]) -> tuple[Array, Array]:
    """`x`, and its first and its last entries.

    The way back adds the edges' cotangent to x's in its place, where JAX's own would write an array like x twice.
    """
    first, last = kept
    size = x.shape[axis]
    edges = lax.slice_in_dim(x, 0, first, axis=axis), lax.slice_in_dim(x, size - last, size, axis=axis)
    return x, jnp.concatenate(edges, axis)


def _with_edges_back(axis: int, kept: tuple[int, int], _: None, cotangents: tuple[Array, Array]) -> tuple[Array]:
    dx, of_edges = cotangents
    first, last = kept
    if not (first or last):
        return (tie(dx, of_edges),)  # of nothing, but by an exchange that all workers take part in, or none
    for start, place, count in ((0, 0, first), (dx.shape[axis] - last, first, last)):
        if count:
            edge = lax.slice_in_dim(dx, start, start + count, axis=axis)
            edge += lax.slice_in_dim(of_edges, place, place + count, axis=axis)
            # In a loop with this sum, XLA would write all of dx anew.
            dx = lax.dynamic_update_slice_in_dim(dx, written_once(edge), start, axis)
    return (dx,)


_with_edges.defvjp(lambda x, axis, kept: (_with_edges(x, axis, kept), None), _with_edges_back)
