"""What an attention moves: features and sequence together, keys to queries or heads for sequence, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.partition import CartesianPartition, Partition
from distdl_jax.plans.decomposition import ProductGrid, Range, balanced_ranges, ranges_of_sizes
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.all_gather import GatherPlan
from distdl_jax.primitives.block_checks import owned_grid
from distdl_jax.primitives.collectives import accumulation_dtype
from distdl_jax.primitives.halo_exchange import RangesPlan, plan_ranges
from distdl_jax.primitives.plan import Plan, ShapeDtypes
from distdl_jax.primitives.repartition import RepartitionPlan, plan_repartition
from distdl_jax.primitives.replicated import ReplicatedPlan
from distdl_jax.sequence.dropout_mask import Dropping
from distdl_jax.sequence.load_balance import Help, HelpMovements
from distdl_jax.sequence.ring import Extras, Ring, Step, attended
from distdl_jax.sequence.ring_schedule import Turn, turns_of
from distdl_jax.world import Workers, World

Region = tuple[Range, Range, Range]
"""Samples, heads, queries."""


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
    - `back`: of the outputs. - `queries`, `keys`: how many there are. - `repeated`: how often each key head is.
    """

    there: tuple[RepartitionPlan, ...]
    back: RepartitionPlan
    queries: int
    keys: int
    repeated: int

    def run(self, world: World, q: Array, block: Array, extras: Extras, of_ring: Ring) -> Array:
        """The heads' outputs for this worker's part of the sequence; `block`, `extras` as in `attended`.

        `of_ring` has what is the same for all keys.
        """
        block = jnp.repeat(block, self.repeated, axis=2)
        if len(self.there) == 1:
            d, together = q.shape[-1], self.there[0].run(world, jnp.concatenate([q, block], axis=-1))
            q, block = together[..., :d], together[..., d:]
        else:
            of_queries, of_keys = self.there
            q, block = of_queries.run(world, q), of_keys.run(world, block)
        ring = replace(of_ring, queries=(0, self.queries), own=(0, self.keys), steps=())
        return self.back.run(world, attended(world, ring, q, block, extras))


@dataclass(frozen=True)
class StepPlan:
    """One turn in a ring.

    - `fetch`, `home`: how keys and values come, and their gradients go back.
    - `help`: how queries get to those who work for others; None where nobody does.
    """

    turn: Turn
    fetch: RangesPlan
    home: RangesPlan
    help: HelpMovements | None

    def of(self, worker: int) -> Step:
        """What `worker` does in it."""
        owned = self.fetch.halos.owned
        i, turn = owned.index(owned.cell_of[worker])[1], self.turn
        help = None if self.help is None else Help(self.help, turn.lent[i], turn.taken[i])
        return Step(self.fetch, self.home, turn.keys[i], turn.queries[i], help)


@dataclass(frozen=True)
class AttentionPlan(Plan):
    """The plan of an attention.

    - `inputs`: what the workers hold of x; `dtype`: of the output.
    - `gather`: x to all workers that share its heads, `gather_memory`: the memory, where there is one; `scatter`: sums
      of the heads' outputs back.
    - `of_params`: for each parameter, who holds copies of it.
    - `regions`: by world rank, the samples, the heads and the queries that a worker attends with.
    - `places`, `key_places`: by world rank, where the queries and keys that it has projected are in the sequence.
    - `shape`: of all weights: samples, heads, queries and keys.
    - `steps`: how workers get the keys and values of further blocks, and who works for whom.
    - `to_heads`: heads for sequence.
    - `padded`: whether it is told which keys are padding.
    """

    inputs: ShapeDtypes = field(hash=False)
    dtype: np.dtype
    gather: GatherPlan
    gather_memory: GatherPlan | None
    scatter: GatherPlan
    of_params: Mapping[str, ReplicatedPlan] = field(hash=False)
    regions: Mapping[int, Region] = field(hash=False)
    places: Mapping[int, Range] = field(hash=False)
    key_places: Mapping[int, Range] = field(hash=False)
    shape: tuple[int, int, int, int]
    steps: tuple[StepPlan, ...]
    to_heads: ToHeads | None
    padded: bool

    @cached_property
    def workers(self) -> Workers:
        return tuple(sorted(self.inputs))

    def output(self, worker: int) -> ShapeDtype:
        return ShapeDtype(self.inputs[worker].shape, self.dtype)

    @property
    def query_and_key_places(self) -> tuple[Mapping[int, Range], Mapping[int, Range]]:
        return self.places, self.key_places

    def run(self, world: World, q: Array, block: Array, extras: Extras, causal: bool, dropout: float) -> Array:
        """The heads' outputs for this worker's part of the sequence; `block`, `extras` as in `attended`."""
        own, keys = self.places[world.rank], self.key_places[world.rank]
        steps = tuple(step.of(world.rank) for step in self.steps)
        dropping = Dropping(dropout, self.shape, *self.regions[world.rank])
        ring = Ring(own, keys, steps, causal, self.padded, dropping if extras.key is not None else None)
        if self.to_heads is not None:
            return self.to_heads.run(world, q, block, extras, ring)
        return attended(world, ring, q, block, extras)


def ring_steps(
    heads: Heads, queries: ShapeDtypes, keys: ShapeDtypes, work: Partition, causal: bool, helping: bool
) -> tuple[StepPlan, ...]:
    """How each worker gets further blocks of keys and values, and who works for whom.

    `queries`, `keys`: whose they are to be, with all features. `helping`: whether workers may work for others.
    """
    wide = accumulation_dtype(heads.dtype)
    of_queries, of_keys = (owned_grid("x", work, x).ranges[1] for x in (queries, keys))
    bare, bare_wide = replace(heads, padded=False), replace(heads, dtype=wide, padded=False)
    d, steps = heads.features, []
    for turn in turns_of(of_queries, of_keys, causal, helping):
        help = None
        if turn.helps:
            of_lent = partial(_there, x=queries, work=work, number=heads.queries, needed=turn.taken)
            of_taken = partial(_home, bare_wide, queries, work, heads.queries, taken=turn.taken, further=turn.far)
            help = HelpMovements(
                queries=of_lent(bare, features=d),
                told=of_lent(bare_wide, features=2 * d + 2),
                sums=of_taken(features=d + 2),
                gradients=of_taken(features=d),
            )
        fetch = _there(heads, keys, work, heads.keys, 2 * d, turn.keys)
        home = _home(replace(heads, dtype=wide), keys, work, heads.keys, 2 * d, turn.keys, -turn.near)
        steps.append(StepPlan(turn, fetch, home, help))
    return tuple(steps)


def _there(
    heads: Heads, x: ShapeDtypes, work: Partition, number: int, features: int, needed: tuple[Range, ...]
) -> RangesPlan:
    """How each worker along the sequence gets what is at the places `needed`."""
    return _moved(heads.held(x, work, number, features), work, needed)


def _home(
    heads: Heads, x: ShapeDtypes, work: Partition, number: int, features: int, taken: tuple[Range, ...], further: int
) -> RangesPlan:
    """How what was made of the places `taken`, of the worker so much further along the sequence, gets there.

    It is behind one row that stays, see `helping.home`.
    """
    held = heads.held(x, work, number, features)
    sizes = [1 + stop - start for start, stop in taken]
    for rank, worker in enumerate(work.ranks):
        n, _, *rest = held[worker].shape
        held[worker] = ShapeDtype((n, sizes[rank // work.shape[2] % len(sizes)], *rest), held[worker].dtype)
    made = [(start + 1, stop) for start, stop in ranges_of_sizes(sizes)]
    return _moved(held, work, tuple(made[(i - further) % len(made)] for i in range(len(made))))


def _moved(held: ShapeDtypes, work: Partition, needed: tuple[Range, ...]) -> RangesPlan:
    on = work.create_cartesian_topology_partition([*work.shape, 1])
    owned = owned_grid("x", on, held)
    return plan_ranges("ring", held, on, Halos(owned, (owned.ranges[0], needed, *owned.ranges[2:])))


def plan_to_heads(heads: Heads, x: ShapeDtypes, memory: ShapeDtypes, work: Partition) -> ToHeads:
    """How heads are exchanged for sequence, and their outputs back; keys are those of `memory`, which may be x."""
    d, repeated = heads.features, heads.copies(work.shape[1] * work.shape[2])
    split, whole = _exchanged(work)
    together = heads.keys * repeated == heads.queries and memory is x
    of_queries, of_keys = (x, heads.queries, d), (memory, heads.keys * repeated, 2 * d)
    there = []
    for held_of, number, width in ((x, heads.queries, 3 * d),) if together else (of_queries, of_keys):
        its = heads if width > d else Heads(heads.queries, heads.keys, d, heads.dtype, False)
        there.append(plan_repartition(its.held(held_of, work, number, width), split, whole))
    held = {w: ShapeDtype((*its.shape[:3], d), heads.dtype) for w, its in there[0].outputs.items()}
    queries, keys = (owned_grid("x", work, its).extent[1] for its in (x, memory))
    return ToHeads(tuple(there), plan_repartition(held, whole, split), queries, keys, repeated)


def _exchanged(work: Partition) -> tuple[CartesianPartition, CartesianPartition]:
    """P_n x P_s x P_h x 1, and the same workers with those along the sequence along the heads."""
    p_n, p_s, p_h = work.shape
    split = work.create_cartesian_topology_partition([p_n, p_s, p_h, 1])
    order = np.arange(split.size).reshape(p_n, p_s, p_h).transpose(0, 2, 1).ravel().tolist()
    team = split.create_partition_inclusive(order)
    return split, team.create_cartesian_topology_partition([p_n, 1, p_h * p_s, 1])


def regions_of(heads: int, work: Partition, grid: ProductGrid, to_heads: ToHeads | None) -> dict[int, Region]:
    """What each worker attends with; x has the blocks `grid`."""
    if to_heads is not None:
        whole = to_heads.there[0].exchange.needed
        boxes = {worker: whole.box(cell) for worker, cell in whole.cell_of.items()}
        return {worker: (samples, its, queries) for worker, (samples, queries, its, _) in boxes.items()}
    _, p_s, p_h = work.shape
    places, along = places_of(work, grid), balanced_ranges(heads, p_h)
    return {
        worker: (grid.ranges[0][rank // (p_s * p_h)], along[rank % p_h], places[worker])
        for rank, worker in enumerate(work.ranks)
    }


def places_of(work: Partition, grid: ProductGrid) -> dict[int, Range]:
    """Where in the sequence the queries of each worker are; x has the blocks `grid`."""
    _, p_s, p_h = work.shape
    along = grid.ranges[1] if p_s > 1 else ((0, grid.extent[1]),)
    return {worker: along[rank // p_h % p_s] for rank, worker in enumerate(work.ranks)}
