"""What an attention moves: features and sequence together, keys to queries or heads for sequence, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.backends.base import Workers, World
from distdl_jax.partition import CartesianPartition, Partition
from distdl_jax.plans.decomposition import ProductGrid, Range, balanced_ranges
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.all_gather import GatherPlan
from distdl_jax.primitives.halo_exchange import RangesPlan, plan_ranges
from distdl_jax.primitives.held import owned_grid
from distdl_jax.primitives.plan import Plan, ShapeDtypes
from distdl_jax.primitives.repartition import RepartitionPlan, plan_repartition
from distdl_jax.primitives.replicated import ReplicatedPlan
from distdl_jax.sequence.ring import Ring, attended


@dataclass(frozen=True)
class Heads:
    """The heads of an attention, and what travels with them.

    - `queries`, `keys`: how many heads queries have, and keys and values. - `features`: of a head.
    - `dtype`: of what travels. - `padded`: whether a flag travels with each key, 1 where it is padding.
    """

    queries: int
    keys: int
    features: int
    dtype: np.dtype
    padded: bool

    def copies(self, workers: int) -> int:
        """How often key heads are repeated where heads are cut over so many workers, so that each has whole groups."""
        most = self.queries // self.keys
        fitting = (n for n in range(1, most + 1) if most % n == 0 and self.keys * n % workers == 0)
        return next(fitting, most)

    def held(self, x: ShapeDtypes, work: Partition, heads: int, features: int) -> dict[int, ShapeDtype]:
        """What the workers have of a tensor of samples x sequence x heads x features, of those of x."""
        own = balanced_ranges(heads, work.shape[2])
        return {
            worker: ShapeDtype((*x[worker].shape[:2], own[i][1] - own[i][0], features + self.padded), self.dtype)
            for worker, i in ((worker, rank % len(own)) for rank, worker in enumerate(work.ranks))
        }


@dataclass(frozen=True)
class ToHeads:
    """Heads for sequence, and back.

    - `there`: of queries, keys and values side by side, or of queries, and of keys and values.
    - `back`: of the outputs. - `extent`: of the sequence. - `repeated`: how often each key head is.
    """

    there: tuple[RepartitionPlan, ...]
    back: RepartitionPlan
    extent: int
    repeated: int

    def run(self, world: World, q: Array, block: Array, causal: bool, padded: bool) -> Array:
        """The heads' outputs for this worker's part of the sequence; `block` as in `attended`."""
        block = jnp.repeat(block, self.repeated, axis=2)
        if len(self.there) == 1:
            d, together = q.shape[-1], self.there[0].run(world, jnp.concatenate([q, block], axis=-1))
            q, block = together[..., :d], together[..., d:]
        else:
            of_queries, of_keys = self.there
            q, block = of_queries.run(world, q), of_keys.run(world, block)
        everywhere = (0, self.extent)
        return self.back.run(world, attended(world, Ring(everywhere, everywhere, (), causal, padded), q, block))


@dataclass(frozen=True)
class AttentionPlan(Plan):
    """The plan of an attention.

    - `inputs`: what the workers hold of x; `dtype`: of the output.
    - `gather`: x to all workers that share its heads; `scatter`: sums of their outputs back.
    - `of_params`: for each parameter, who holds copies of it.
    - `places`: by world rank, where this worker's queries are in the sequence.
    - `steps`: by world rank, how it gets the keys and values of further blocks, and where these are.
    - `to_heads`: heads for sequence.
    - `padded`: whether it is told which keys are padding.
    """

    inputs: ShapeDtypes = field(hash=False)
    dtype: np.dtype
    gather: GatherPlan
    scatter: GatherPlan
    of_params: Mapping[str, ReplicatedPlan] = field(hash=False)
    places: Mapping[int, Range] = field(hash=False)
    steps: tuple[RangesPlan, ...]
    to_heads: ToHeads | None
    padded: bool

    @cached_property
    def workers(self) -> Workers:
        return tuple(sorted(self.inputs))

    def output(self, worker: int) -> ShapeDtype:
        return ShapeDtype(self.inputs[worker].shape, self.dtype)

    def run(self, world: World, q: Array, block: Array, causal: bool) -> Array:
        """The heads' outputs for this worker's part of the sequence; `block` as in `attended`."""
        if self.to_heads is not None:
            return self.to_heads.run(world, q, block, causal, self.padded)
        own, ways = self.places[world.rank], []
        for step in self.steps:
            needed = step.halos.needed[1][step.halos.owned.index(step.halos.owned.cell_of[world.rank])[1]]
            ways.append((step, needed))
        return attended(world, Ring(own, own, tuple(ways), causal, self.padded), q, block)


def ring_steps(heads: Heads, x: ShapeDtypes, work: Partition) -> tuple[RangesPlan, ...]:
    """How each worker gets the keys and values of the block that is 1, 2, ... behind its own."""
    on = work.create_cartesian_topology_partition([*work.shape, 1])
    held = heads.held(x, work, heads.keys, 2 * heads.features)
    owned = owned_grid("keys", on, held)
    p_s = work.shape[1]
    steps = []
    for behind in range(1, p_s):
        needed = tuple(owned.ranges[1][(i + behind) % p_s] for i in range(p_s))
        halos = Halos(owned, (owned.ranges[0], needed, *owned.ranges[2:]))
        steps.append(plan_ranges("ring", held, on, halos))
    return tuple(steps)


def plan_to_heads(heads: Heads, x: ShapeDtypes, work: Partition) -> ToHeads:
    """How heads are exchanged for sequence, and their outputs back."""
    d, repeated = heads.features, heads.copies(work.shape[1] * work.shape[2])
    split, whole = _exchanged(work)
    widths = ((heads.queries, 3 * d),) if heads.keys * repeated == heads.queries else (
        (heads.queries, d), (heads.keys * repeated, 2 * d))  # fmt: skip
    there = []
    for number, width in widths:
        its = heads if width > d else Heads(heads.queries, heads.keys, d, heads.dtype, False)
        there.append(plan_repartition(its.held(x, work, number, width), split, whole))
    held = {w: ShapeDtype((*its.shape[:3], d), heads.dtype) for w, its in there[0].outputs.items()}
    extent = owned_grid("x", work, x).extent[1]
    return ToHeads(tuple(there), plan_repartition(held, whole, split), extent, repeated)


def _exchanged(work: Partition) -> tuple[CartesianPartition, CartesianPartition]:
    """P_n x P_s x P_h x 1, and the same workers with those along the sequence along the heads."""
    p_n, p_s, p_h = work.shape
    split = work.create_cartesian_topology_partition([p_n, p_s, p_h, 1])
    order = np.arange(split.size).reshape(p_n, p_s, p_h).transpose(0, 2, 1).ravel().tolist()
    team = split.create_partition_inclusive(order)
    return split, team.create_cartesian_topology_partition([p_n, 1, p_h * p_s, 1])


def places_of(work: Partition, grid: ProductGrid) -> dict[int, Range]:
    """Where in the sequence the queries of each worker are; x has the blocks `grid`."""
    _, p_s, p_h = work.shape
    along = grid.ranges[1] if p_s > 1 else ((0, grid.extent[1]),)
    return {worker: along[rank // p_h % p_s] for rank, worker in enumerate(work.ranks)}
