"""The plan of an attention: gathers of features and sequence, the ring of keys, the exchange of heads for sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import PlanError
from distdl_jax.functional.all_gather import GatherPlan
from distdl_jax.functional.block_checks import owned_grid
from distdl_jax.functional.copies import ReplicatedPlan
from distdl_jax.functional.halo_exchange import RangesPlan, plan_ranges
from distdl_jax.functional.plan import BlocksPlan, ShapeDtypes
from distdl_jax.functional.repartition import RepartitionPlan, plan_repartition
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.nn.attention.ring import Dropping, Extras, Loans, Ring, RingStep, attended
from distdl_jax.nn.attention.ring_schedule import turns_of
from distdl_jax.nn.base.parameters import ParamShapeDtypes
from distdl_jax.partitions.partition import CartesianPartition, Partition
from distdl_jax.plans.decomposition import ProductGrid, Range, balanced_ranges, ranges_of_sizes
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.transports.world import World

Region = tuple[Range, Range, Range]
"""Samples, heads, queries."""


@dataclass(frozen=True)
class Heads:
    """The heads of an attention, as they are sent.

    - `queries`, `keys`: the number of heads of queries, and of keys and values. - `features`: of a head.
    - `dtype`: of messages. - `padded`: whether a flag is sent with each key, 1 if it is padding.
    """

    queries: int
    keys: int
    features: int
    dtype: np.dtype
    padded: bool

    def copies(self, workers: int) -> int:
        """Return how often to repeat key heads so that each of `workers` along the heads has whole groups."""
        most = self.queries // self.keys
        fitting = (n for n in range(1, most + 1) if most % n == 0 and self.keys * n % workers == 0)
        return next(fitting, most)

    def blocks(self, x: ShapeDtypes, work: Partition, heads: int, features: int) -> dict[int, ShapeDtype]:
        """Return the workers' blocks, samples x sequence x heads x features, for the samples and sequence of x."""
        own = balanced_ranges(heads, work.shape[2])
        return {
            worker: ShapeDtype((*x[worker].shape[:2], own[i][1] - own[i][0], features + self.padded), self.dtype)
            for worker, i in ((worker, rank % len(own)) for rank, worker in enumerate(work.ranks))
        }


@dataclass(frozen=True)
class ToHeads:
    """The exchange of heads for sequence, and back.

    - `there`: one joint movement of queries, keys and values, or one of queries, and one of keys and values.
    - `back`: the movement of the outputs. - `queries`, `keys`: their numbers. - `repeated`: copies of a key head.
    """

    there: tuple[RepartitionPlan, ...]
    back: RepartitionPlan
    queries: int
    keys: int
    repeated: int

    def run(self, world: World, q: Array, block: Array, extras: Extras, of_ring: Ring) -> Array:
        """Return the heads' outputs for this worker's part of the sequence; `block`, `extras` as in `attended`.

        `of_ring` has the settings for all keys.
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
class AttentionPlan(BlocksPlan):
    """The plan of an attention.

    - `dtype`: of the output.
    - `gather`, `gather_memory`: the movements of x, and of the memory if there is one, to all workers that share its
      heads; `scatter`: the movement of sums of the heads' outputs back.
    - `of_params`: for each parameter, the workers that hold copies of it.
    - `regions`: by world rank, the samples, the heads and the queries of a worker.
    - `places`, `key_places`: by world rank, the positions in the sequence of its projected queries and keys.
    - `shape`: of all weights: samples, heads, queries and keys.
    - `steps`: the rounds of the ring, which bring the keys and values of further blocks.
    - `to_heads`: the exchange of heads for sequence.
    - `causal`: whether queries see no keys that come after them.
    - `padded`: whether padding of keys is marked.
    """

    dtype: np.dtype
    gather: GatherPlan
    gather_memory: GatherPlan | None
    scatter: GatherPlan
    of_params: Mapping[str, ReplicatedPlan] = field(hash=False)
    regions: Mapping[int, Region] = field(hash=False)
    places: Mapping[int, Range] = field(hash=False)
    key_places: Mapping[int, Range] = field(hash=False)
    shape: tuple[int, int, int, int]
    steps: tuple[RingStep, ...]
    to_heads: ToHeads | None
    causal: bool
    padded: bool

    def run(self, world: World, q: Array, block: Array, extras: Extras, dropout: float) -> Array:
        """Return the heads' outputs for this worker's part of the sequence; `block`, `extras` as in `attended`."""
        own, keys = self.places[world.rank], self.key_places[world.rank]
        dropping = None if extras.key is None else Dropping(dropout, self.shape, *self.regions[world.rank])
        ring = Ring(self._index(world.rank), own, keys, self.steps, self.causal, self.padded, dropping)
        if self.to_heads is not None:
            return self.to_heads.run(world, q, block, extras, ring)
        return attended(world, ring, q, block, extras)

    def _index(self, worker: int) -> int:
        """Return the position of `worker` along the sequence, in the ring."""
        if not self.steps:
            return 0
        owned = self.steps[0].fetch.halos.owned
        return owned.index(owned.cell_of[worker])[1]


def ring_steps(
    heads: Heads, queries: ShapeDtypes, keys: ShapeDtypes, work: Partition, causal: bool, balanced: bool
) -> tuple[RingStep, ...]:
    """Plan the rounds that bring further blocks of keys and values to each worker.

    `queries`, `keys`: the blocks of x from which they are computed. `balanced`: whether workers may compute for others.
    """
    wide = accumulation_dtype(heads.dtype)
    of_queries, of_keys = (owned_grid("x", work, x).ranges[1] for x in (queries, keys))
    bare, bare_wide = replace(heads, padded=False), replace(heads, dtype=wide, padded=False)
    d, steps = heads.features, []
    for turn in turns_of(of_queries, of_keys, causal, balanced):
        loans = None
        if turn.is_balanced:
            of_lent = partial(_plan_fetch, x=queries, work=work, number=heads.queries, needed=turn.taken)
            returned = partial(_plan_return, bare_wide, queries, work, heads.queries, taken=turn.taken)
            loans = Loans(
                queries=of_lent(bare, features=d),
                backward_inputs=of_lent(bare_wide, features=2 * d + 2),
                sums=returned(features=d + 2, further=turn.far),
                gradients=returned(features=d, further=turn.far),
            )
        fetch = _plan_fetch(heads, keys, work, heads.keys, 2 * d, turn.keys)
        back = _plan_return(replace(heads, dtype=wide), keys, work, heads.keys, 2 * d, turn.keys, -turn.near)
        steps.append(RingStep(turn, fetch, back, loans))
    return tuple(steps)


def _plan_fetch(
    heads: Heads, x: ShapeDtypes, work: Partition, number: int, features: int, needed: tuple[Range, ...]
) -> RangesPlan:
    """Plan the movement that brings each worker along the sequence the entries at the positions `needed`."""
    return _plan_ranges(heads.blocks(x, work, number, features), work, needed)


def _plan_return(
    heads: Heads, x: ShapeDtypes, work: Partition, number: int, features: int, taken: tuple[Range, ...], further: int
) -> RangesPlan:
    """Plan the movement of results for the positions `taken` to their owner, `further` workers along the sequence.

    They follow one row that stays, see `ring._send_back`.
    """
    blocks = heads.blocks(x, work, number, features)
    sizes = [1 + stop - start for start, stop in taken]
    for rank, worker in enumerate(work.ranks):
        n, _, *rest = blocks[worker].shape
        blocks[worker] = ShapeDtype((n, sizes[rank // work.shape[2] % len(sizes)], *rest), blocks[worker].dtype)
    results = [(start + 1, stop) for start, stop in ranges_of_sizes(sizes)]
    return _plan_ranges(blocks, work, tuple(results[(i - further) % len(results)] for i in range(len(results))))


def _plan_ranges(blocks: ShapeDtypes, work: Partition, needed: tuple[Range, ...]) -> RangesPlan:
    on = work.create_cartesian_topology_partition([*work.shape, 1])
    owned = owned_grid("x", on, blocks)
    return plan_ranges("ring", blocks, on, Halos(owned, (owned.ranges[0], needed, *owned.ranges[2:])))


def plan_to_heads(heads: Heads, x: ShapeDtypes, memory: ShapeDtypes, work: Partition) -> ToHeads:
    """Plan the exchange of heads for sequence, and of outputs back; keys are computed from `memory`, which may be x."""
    d, repeated = heads.features, heads.copies(work.shape[1] * work.shape[2])
    split, whole = _exchanged(work)
    bare = replace(heads, padded=False)
    if heads.keys * repeated == heads.queries and memory is x:
        blocks = [heads.blocks(x, work, heads.queries, 3 * d)]
    else:
        blocks = [bare.blocks(x, work, heads.queries, d), heads.blocks(memory, work, heads.keys * repeated, 2 * d)]
    there = [plan_repartition(block, split, whole) for block in blocks]
    outputs = {w: ShapeDtype((*block.shape[:3], d), heads.dtype) for w, block in there[0].outputs.items()}
    queries, keys = (owned_grid("x", work, source).extent[1] for source in (x, memory))
    return ToHeads(tuple(there), plan_repartition(outputs, whole, split), queries, keys, repeated)


def _exchanged(work: Partition) -> tuple[CartesianPartition, CartesianPartition]:
    """Return P_n x P_s x P_h x 1, and the same workers with the sequence's workers moved along the heads."""
    p_n, p_s, p_h = work.shape
    order = np.arange(work.size).reshape(work.shape).swapaxes(1, 2).ravel().tolist()
    return work.grid([p_n, p_s, p_h, 1]), work.grid([p_n, 1, p_h * p_s, 1], order)


def regions_of(num_heads: int, work: Partition, grid: ProductGrid, to_heads: ToHeads | None) -> dict[int, Region]:
    """Return the region of each worker; x has the blocks `grid`."""
    if to_heads is not None:
        whole = to_heads.there[0].exchange.needed
        boxes = {worker: whole.box(cell) for worker, cell in whole.cell_of.items()}
        return {worker: (samples, heads, queries) for worker, (samples, queries, heads, _) in boxes.items()}
    _, p_s, p_h = work.shape
    places, along = places_of(work, grid), balanced_ranges(num_heads, p_h)
    return {
        worker: (grid.ranges[0][rank // (p_s * p_h)], along[rank % p_h], places[worker])
        for rank, worker in enumerate(work.ranks)
    }


def places_of(work: Partition, grid: ProductGrid) -> dict[int, Range]:
    """Return the positions in the sequence of each worker's queries; x has the blocks `grid`."""
    _, p_s, p_h = work.shape
    along = grid.ranges[1] if p_s > 1 else ((0, grid.extent[1]),)
    return {worker: along[rank // p_h % p_s] for rank, worker in enumerate(work.ranks)}


# --- arguments besides x: all workers raise together ----------------------------------------------------------------

MEMORY, MASK, SEEN, PADDING = "memory", "attn_mask", "mask", "key_padding_mask"


def _on_all(name: str, arguments: ParamShapeDtypes) -> dict[int, ShapeDtype]:
    """Return the shape and dtype of an argument on each worker, if any gives it; raise if only some do."""
    given = {worker: each[name] for worker, each in arguments.items() if name in each}
    if given and len(given) < len(arguments):
        missing = min(arguments.keys() - given.keys())
        raise PlanError(f"On worker {missing}: `{name}` must be an array on all workers if it is on one, but is None.")
    return given


def memory_of(arguments: ParamShapeDtypes, ranks: Sequence[int]) -> ShapeDtypes | None:
    """Return the shapes and dtypes of the memory's blocks; None without a memory."""
    blocks = _on_all(MEMORY, arguments)
    return {worker: blocks[worker] for worker in ranks} if blocks else None


def is_padded(arguments: ParamShapeDtypes, keys: ShapeDtypes) -> bool:
    """Say whether workers mark any of the `keys` that they have projected as padding."""
    masks = _on_all(PADDING, arguments)
    for worker, mask in masks.items():
        shape = keys[worker].shape[:2]
        if mask.shape != shape or mask.dtype != np.bool_:
            raise PlanError(
                f"On worker {worker}: `{PADDING}` (={mask}) must be {ShapeDtype(shape, np.dtype(bool))}: True or False "
                "for each of this worker's samples, and each element of its part of the keys' sequence."
            )
    return bool(masks)


def check_mask(arguments: ParamShapeDtypes, regions: Mapping[int, tuple[Range, Range, Range]], keys: int) -> None:
    """Reject masks that don't match the samples, heads and queries of their workers, and all keys."""
    for name, kinds in ((MASK, "bool or floating"), (SEEN, "bool")):
        _check_mask(name, kinds, _on_all(name, arguments), regions, keys)


def _check_mask(
    name: str, kinds: str, masks: ShapeDtypes, regions: Mapping[int, tuple[Range, Range, Range]], keys: int
) -> None:
    for worker, mask in masks.items():
        n, heads, queries = (stop - start for start, stop in regions[worker])
        fits = len(mask.shape) == 4 and mask.shape[0] in (1, n) and mask.shape[1] in (1, heads)
        numbers = mask.dtype == np.bool_ or (name == MASK and jnp.issubdtype(mask.dtype, jnp.floating))
        if not fits or mask.shape[2:] != (queries, keys) or not numbers:
            raise PlanError(
                f"On worker {worker}: `{name}` must be of {kinds}, with rows for its own queries and columns for all "
                f"keys: {queries} x {keys}, or samples x heads x {queries} x {keys} with 1 or {n} samples and 1 or "
                f"{heads} heads, but is {mask}."
            )
    if len({mask.dtype for mask in masks.values()}) > 1:
        listed = ", ".join(f"{mask.dtype} on worker {worker}" for worker, mask in sorted(masks.items()))
        raise PlanError(f"`{name}` must have one dtype on all workers, but is {listed}.")
