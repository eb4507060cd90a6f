"""What a worker needs around its block, apart from the block: only the edges of blocks are exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
from jax import Array, lax

from distdl_jax.kernels.split_halo import Apart, Parts, Side, ends, joined
from distdl_jax.plans.decomposition import box_shape
from distdl_jax.plans.halo_edges import HaloEdges, halo_edges
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.halo_exchange import RangesPlan
from distdl_jax.tracing.materialize import materialize
from distdl_jax.tracing.tie import tie
from distdl_jax.world import World


@dataclass(frozen=True)
class HaloApartPlan:
    """A halo exchange that leaves each worker's block as it is.

    - `edges`: which entries of the blocks are exchanged, for each dimension along which something moves, in order.
    - `movements`: how.
    """

    edges: tuple[HaloEdges, ...]
    movements: tuple[RangesPlan, ...]

    def apart(self, worker: int) -> Apart:
        """Where what `worker` gets lies."""
        return Apart(tuple(Side(its.axis, *its.around[its.index(worker)]) for its in self.edges))

    def run(self, world: World, x: Array) -> Parts:
        """This worker's block, `x`, and what is around it."""
        sides, parts = self.apart(world.rank).sides, [x]
        for edges, movement, side in zip(self.edges, self.movements, sides, strict=True):
            kept = edges.edges[edges.index(world.rank)]
            both = [_with_ends(its, edges.axis, kept) for its in parts]
            # What the neighbours need of what is around the block: the corners of theirs.
            sent = joined(tuple(its for _, its in both), Apart(sides[: len(parts) - 1]))
            got = movement.run(world, sent)
            parts = [*(its for its, _ in both), ends(got, *side)]
        return tuple(parts)


def halo_apart(movement: RangesPlan) -> HaloApartPlan | None:
    """`movement`, which joins what it brings to blocks, as one that does not; None where more than edges moves."""
    edges = halo_edges(movement.halos)
    if edges is None:
        return None
    movements = []
    for its in edges:
        grid = its.halos.owned
        inputs = {
            worker: ShapeDtype(box_shape(grid.box(cell)), movement.inputs[worker].dtype)
            for worker, cell in grid.cell_of.items()
        }
        movements.append(RangesPlan("windows", inputs, movement.dtype, its.halos))
    return HaloApartPlan(edges, tuple(movements))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _with_ends(x: Array, axis: int, kept: tuple[int, int]) -> tuple[Array, Array]:
    """`x`, and its first and its last entries.

    The way back adds the cotangent of these to x's in its place, where JAX's own would write an array like x twice.
    """
    return x, ends(x, axis, *kept)


def _with_ends_back(axis: int, kept: tuple[int, int], _: None, cotangents: tuple[Array, Array]) -> tuple[Array]:
    dx, of_ends = cotangents
    first, last = kept
    if not (first or last):
        return (tie(dx, of_ends),)  # of nothing, but by an exchange that all workers take part in, or none
    for start, place, count in ((0, 0, first), (dx.shape[axis] - last, first, last)):
        if count:
            end = lax.slice_in_dim(dx, start, start + count, axis=axis)
            end += lax.slice_in_dim(of_ends, place, place + count, axis=axis)
            # In a loop with this sum, XLA would write all of dx anew.
            dx = lax.dynamic_update_slice_in_dim(dx, materialize(end), start, axis)
    return (dx,)


_with_ends.defvjp(lambda x, axis, kept: (_with_ends(x, axis, kept), None), _with_ends_back)
