"""The plan of a mixture of experts: the movement of tokens to their experts, and back.

Messages have static shapes, whatever the tokens choose: each worker has as many slots for each expert as it can need.
Slots are numbered worker by worker, and those of all workers are one tensor of experts x slots x features. It is split
along the slots before an all-to-all, and along the experts after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import PlanError
from distdl_jax.functional.all_gather import GatherPlan, plan_all_gather
from distdl_jax.functional.block_checks import zero_volume_shape
from distdl_jax.functional.broadcast import plan_broadcast, plan_sum_reduce
from distdl_jax.functional.plan import BlocksPlan, MovementPlan, ShapeDtypes
from distdl_jax.functional.repartition import RepartitionPlan
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.nn.experts.routing import (
    Choices,
    choose,
    counts_of,
    load_balancing_loss,
    places_in_whole,
    places_within,
)
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.decomposition import ProductGrid, balanced_ranges, ranges_of_sizes
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import World

Params = Mapping[str, Array]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a tensor in groups, and each worker's share of them.

    - `grid`: the blocks of x on P_x; the last dimension, the features, is whole.
    - `group_axes`: the dimensions along which each index is a group.
    """

    grid: ProductGrid
    group_axes: tuple[int, ...]

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The dimensions of the tokens of a group."""
        return tuple(d for d in range(len(self.grid.shape) - 1) if d not in self.group_axes)

    @cached_property
    def rows_along(self) -> tuple[int, ...]:
        """The dimensions up to the last split one; the tokens of a row, along the remaining ones, are on one worker."""
        split = [place for place, d in enumerate(self.axes) if self.grid.shape[d] > 1]
        return self.axes[: split[-1] + 1] if split else ()

    def lengths(self, worker: int) -> tuple[int, ...]:
        """Return the shape of the block of `worker`."""
        return tuple(stop - start for start, stop in self.grid.box(self.grid.cell_of[worker]))

    def size(self, worker: int) -> tuple[int, int]:
        """Return the number of groups in the block of `worker`, and of tokens in each."""
        lengths = self.lengths(worker)
        return math.prod(lengths[d] for d in self.group_axes), math.prod(lengths[d] for d in self.axes)

    @cached_property
    def whole(self) -> tuple[int, int]:
        """The number of groups, and of tokens in each, of the whole tensor."""
        extent = self.grid.extent
        return math.prod(extent[d] for d in self.group_axes), math.prod(extent[d] for d in self.axes)

    def numbers(self, worker: int) -> np.ndarray:
        """Return the global numbers of the groups of `worker`."""
        box = self.grid.box(self.grid.cell_of[worker])
        return _numbers([box[d] for d in self.group_axes], [self.grid.extent[d] for d in self.group_axes])

    def rows(self, worker: int) -> np.ndarray:
        """Return the numbers of the rows of `worker` among all rows of a group."""
        cell, (*before, last) = self.grid.cell_of[worker], self.rows_along
        box, place = self.grid.box(cell), self.grid.index(cell)[last]
        lengths = [self.grid.extent[d] for d in before]
        return _numbers([*(box[d] for d in before), (place, place + 1)], [*lengths, self.grid.shape[last]])

    def counts(self, worker: int, each: int) -> tuple[int, ...]:
        """Return the shape of the counts of `worker`, `each` numbers for a row."""
        lengths = self.lengths(worker)
        return (*(lengths[d] for d in (*self.group_axes, *self.rows_along[:-1])), 1, each)

    def in_groups(self, x: Array) -> Array:
        """Return a block of x as groups x tokens x features."""
        order, last = (*self.group_axes, *self.axes), x.ndim - 1
        groups, tokens = (math.prod(x.shape[d] for d in axes) for axes in (self.group_axes, self.axes))
        return x.transpose(*order, last).reshape(groups, tokens, x.shape[last])

    def in_blocks(self, y: Array, worker: int) -> Array:
        """Return groups x tokens x features as the block of `worker`: the inverse of `in_groups`."""
        order, lengths = (*self.group_axes, *self.axes), self.lengths(worker)
        y = y.reshape(*(lengths[d] for d in order), y.shape[-1])
        return y.transpose(*np.argsort(order).tolist(), len(order))


def _numbers(ranges: Sequence[tuple[int, int]], lengths: Sequence[int]) -> np.ndarray:
    """Return the row-major numbers of a box in a tensor of `lengths`."""
    strides = [math.prod(lengths[d + 1 :]) for d in range(len(lengths))]
    numbers = np.zeros(1, int)
    for (start, stop), stride in zip(ranges, strides, strict=True):
        numbers = (numbers[:, None] + stride * np.arange(start, stop)).ravel()
    return numbers.astype(np.int32)


@dataclass(frozen=True)
class Dispatch:
    """The sizes of a mixture: experts, choices of a token, and the capacity of an expert for each group."""

    tokens: Tokens
    experts: int
    k: int
    capacity: int

    def slots_of_group(self, worker: int) -> int:
        """Return the largest number of tokens of a group that `worker` may have for an expert."""
        return min(self.capacity, self.tokens.size(worker)[1])

    def slots(self, worker: int) -> int:
        """Return the number of slots of `worker` for each expert."""
        return self.tokens.size(worker)[0] * self.slots_of_group(worker)

    def exchange(self, P_W: Partition, features: int) -> Exchange:
        """Return the all-to-all of experts x slots x features, from the slots' workers to the experts' workers."""
        ranks = self.tokens.grid.ranks
        slots = ranges_of_sizes([self.slots(worker) for worker in ranks])
        owned = ProductGrid(ranks, (((0, self.experts),), slots, ((0, features),)))
        experts, whole = balanced_ranges(self.experts, P_W.size), ((0, slots[-1][1]),)
        return Exchange(owned, ProductGrid(P_W.ranks, (experts, whole, ((0, features),))))


@dataclass(frozen=True)
class MixturePlan(BlocksPlan):
    """The plan of a mixture of experts.

    - `dispatch`: its sizes; `expert`: the computation of an expert; `normalize`: whether a token's gates sum to 1.
    - `to_tokens`: the broadcast of the router to the workers with tokens.
    - `to_rows`: the gathering of counts, along the split dimensions of a group; None if there are none.
    - `to_experts`, `places_to_experts`: the all-to-all of tokens and their positions to the experts; `to_slots`: back.
    - `sum_losses`, `sum_counts`: the sums for the losses, onto the first worker.
    - `dtype`: of the output.
    """

    dispatch: Dispatch
    expert: Callable[[Any, Array], Array] = field(hash=False)
    normalize: bool
    to_tokens: MovementPlan
    to_rows: GatherPlan | None
    to_experts: RepartitionPlan
    places_to_experts: RepartitionPlan
    to_slots: RepartitionPlan
    sum_losses: MovementPlan
    sum_counts: MovementPlan
    dtype: np.dtype

    def run(self, world: World, params: Params, x: Array) -> tuple[Array, Choices | None]:
        """Return this worker's block of the output, and its tokens' choices; None if it has no part of x."""
        dispatch, worker = self.dispatch, world.rank
        if worker not in dispatch.tokens.grid.cell_of:
            sent, rows = (_empty(plan.inputs[worker]) for plan in (self.to_experts, self.places_to_experts))
            return tie(_empty(self.output(worker)), self._through_experts(world, params, x, sent, rows)), None
        tokens, copy = dispatch.tokens.in_groups(x), self.to_tokens.run(world, params["router"])
        choices = choose(tokens, copy, dispatch.k, self.normalize)
        slots, rows = self._slots(world, choices)
        sent, rows = self._filled(worker, tokens, choices.experts, slots, tie(rows, lax.stop_gradient(copy)))
        outputs = self._through_experts(world, params, x, sent, rows)
        rows = outputs.at[choices.experts, slots].get(mode="fill", fill_value=0)
        y = jnp.einsum("gtk,gtke->gte", choices.gates, rows.astype(choices.gates.dtype))
        return tie(dispatch.tokens.in_blocks(y, worker).astype(self.dtype), outputs, copy), choices

    def _through_experts(self, world: World, params: Params, x: Array, sent: Array, rows: Array) -> Array:
        """Return the experts' outputs for this worker's slots, `sent`, which fill the given rows of the experts."""
        # All movements are used, and batched, on all workers; the movement of x carries no derivative of the router's.
        router = lax.stop_gradient(params["router"])
        received = self.to_experts.run(world, tie(sent, x, router))
        rows = self.places_to_experts.run(world, tie(rows, lax.stop_gradient(x), router))
        computed = self._computed(world.rank, params, received, rows)
        return self.to_slots.run(world, tie(computed, received, rows, *params.values()))

    def _slots(self, world: World, choices: Choices) -> tuple[Array, Array]:
        """Return the slot of each assignment, beyond the last one if it is dropped, and its row at the expert."""
        dispatch, worker, chosen = self.dispatch, world.rank, choices.chosen
        within = places = places_within(chosen)
        counts = chosen
        if self.to_rows is not None:
            rows = dispatch.tokens.rows(worker)
            counts = counts_of(chosen, len(rows)).reshape(self.to_rows.inputs[worker].shape)
            counts = self.to_rows.run(world, counts)
            places = places_in_whole(chosen, counts.reshape(len(chosen), -1, *chosen.shape[2:]), rows)
        groups = dispatch.tokens.numbers(worker)[:, None, None]
        own = np.arange(len(groups), dtype=np.int32)[:, None, None]
        accepted = places < dispatch.capacity
        slots = jnp.where(accepted, own * dispatch.slots_of_group(worker) + within, dispatch.slots(worker))
        return slots, tie(jnp.asarray(groups * dispatch.capacity + places), counts)

    def _filled(self, worker: int, tokens: Array, experts: Array, slots: Array, rows: Array) -> tuple[Array, Array]:
        """Return this worker's slots with its tokens, and their rows: beyond the last one for an empty slot."""
        shape, empty = (self.dispatch.experts, self.dispatch.slots(worker)), self._rows
        copies = jnp.broadcast_to(tokens[:, :, None], (*slots.shape, tokens.shape[-1]))
        filled = jnp.zeros((*shape, tokens.shape[-1]), tokens.dtype).at[experts, slots].add(copies, mode="drop")
        return filled, jnp.full((*shape, 1), empty, np.int32).at[experts, slots, 0].set(rows, mode="drop")

    @property
    def _rows(self) -> int:
        """The number of tokens that an expert accepts from all groups."""
        return self.dispatch.tokens.whole[0] * self.dispatch.capacity

    def _computed(self, worker: int, params: Params, received: Array, rows: Array) -> Array:
        """Return the outputs of this worker's experts, in the slots in which their tokens arrived."""
        block = self.to_slots.inputs[worker]
        if 0 in block.shape:
            return _empty(block)
        experts, rows = np.arange(len(received), dtype=np.int32)[:, None], rows[..., 0]
        tokens = jnp.zeros((len(received), self._rows, received.shape[-1]), received.dtype)
        tokens = tokens.at[experts, rows].add(received, mode="drop")
        outputs = jax.vmap(self.expert)({name: params[name] for name in params if name != "router"}, tokens)
        return outputs.at[experts, rows].get(mode="fill", fill_value=0).astype(block.dtype)

    def losses(self, world: World, choices: Choices, dtype: np.dtype) -> dict[str, Array]:
        """Return the state after these choices: on the first worker, with losses of `dtype`; empty arrays elsewhere."""
        tokens = max(math.prod(self.dispatch.tokens.whole), 1)
        sums = self.sum_losses.run(world, choices.sums / tokens)
        counts = self.sum_counts.run(
            world, tie(choices.chosen.sum((0, 1, 2), dtype=np.int32), lax.stop_gradient(choices.sums))
        )
        balance, squares = (load_balancing_loss(counts, sums[:-1]), sums[-1]) if counts.size else (sums, sums)
        losses = {"load_balancing_loss": balance.astype(dtype), "router_z_loss": squares.astype(dtype)}
        return losses | {"tokens_per_expert": counts}


def _empty(block: ShapeDtype) -> Array:
    return jnp.zeros(block.shape, block.dtype)


def plan_mixture(
    dispatch: Dispatch,
    expert: Callable[[Any, Array], Array],
    normalize: bool,
    x: ShapeDtypes,
    params: Mapping[int, Mapping[str, ShapeDtype]],
    P_x: Partition,
    P_W: Partition,
) -> MixturePlan:
    """Plan a mixture from the shapes and dtypes of x and of the parameters on all its workers."""
    tokens, first = dispatch.tokens, P_x.grid([1], [0])
    sender = P_x.ranks[0]
    sent, router = x[sender], params[sender]["router"]
    features = sent.shape[-1]
    own = {name: block for name, block in params[P_W.ranks[0]].items() if name != "router"}
    rows = jax.ShapeDtypeStruct((tokens.whole[0] * dispatch.capacity, features), sent.dtype)
    one = {name: ShapeDtype(block.shape[1:], block.dtype) for name, block in own.items()}
    # The expert is any function of rows: its shape on one expert's rows tells what it returns, and in which dtype.
    result = jax.eval_shape(expert, {name: jax.ShapeDtypeStruct(*block) for name, block in one.items()}, rows)
    _check_result(result, rows)
    out = np.dtype(jnp.promote_types(sent.dtype, result.dtype))
    to_experts = _to_experts(dispatch, P_W, x, sent.dtype, features)
    back = _to_experts(dispatch, P_W, x, out, result.shape[-1]).exchange
    outputs = {worker: ShapeDtype((0,), out) for worker in x} | {
        worker: ShapeDtype((stop - start, back.needed.extent[1], result.shape[-1]), out)
        for worker, (start, stop) in zip(P_W.ranks, back.needed.ranges[0], strict=True)
    }
    dtype = accumulation_dtype(np.dtype(jnp.promote_types(sent.dtype, router.dtype)))
    # The balancing loss needs each expert's probabilities, and the number of tokens: one sum. Counts are whole numbers,
    # which float32 would lose above 2^24, and travel apart.
    sums = dict.fromkeys(P_x.ranks, ShapeDtype((dispatch.experts + 1,), dtype))
    counts = dict.fromkeys(P_x.ranks, ShapeDtype((dispatch.experts,), np.dtype(np.int32)))
    return MixturePlan(
        blocks={
            worker: ShapeDtype(
                (*block.shape[:-1], result.shape[-1])
                if worker in tokens.grid.cell_of
                else zero_volume_shape(block.shape, True),
                out,
            )
            for worker, block in x.items()
        },
        dispatch=dispatch,
        expert=expert,
        normalize=normalize,
        to_tokens=plan_broadcast(
            {worker: blocks["router"] for worker, blocks in params.items()}, first, P_x, preserve_batch=False
        ),
        to_rows=_to_rows(dispatch, P_x),
        to_experts=to_experts,
        places_to_experts=_to_experts(dispatch, P_W, x, np.dtype(np.int32), 1),
        to_slots=RepartitionPlan("to_slots", outputs, out, Exchange(back.needed, back.owned), False),
        sum_losses=plan_sum_reduce(sums, P_x, first, preserve_batch=False),
        sum_counts=plan_sum_reduce(counts, P_x, first, preserve_batch=False),
        dtype=out,
    )


def _check_result(result: Any, rows: jax.ShapeDtypeStruct) -> None:
    if getattr(result, "shape", ())[:-1] != rows.shape[:-1] or not jnp.issubdtype(result.dtype, jnp.floating):
        raise PlanError(
            f"`expert` must return real floating-point numbers, one row for each of its {rows.shape[0]} tokens "
            f"({rows.shape}), but returns {result}."
        )


def _to_experts(dispatch: Dispatch, P_W: Partition, x: ShapeDtypes, dtype: np.dtype, features: int) -> RepartitionPlan:
    """Plan the all-to-all of slots with the given number of features; workers without tokens have placeholders."""
    inputs = {worker: ShapeDtype((0,), dtype) for worker in x} | {
        worker: ShapeDtype((dispatch.experts, dispatch.slots(worker), features), dtype)
        for worker in dispatch.tokens.grid.ranks
    }
    return RepartitionPlan("to_experts", inputs, dtype, dispatch.exchange(P_W, features), False)


def _to_rows(dispatch: Dispatch, P_x: Partition) -> GatherPlan | None:
    """Plan the gathering of the counts of all rows of a worker's groups."""
    tokens = dispatch.tokens
    if not tokens.rows_along:
        return None
    along = (*tokens.group_axes, *tokens.rows_along)
    others = [d for d in range(P_x.dim) if d not in along]  # one worker each
    ranks = np.arange(P_x.size).reshape(P_x.shape).transpose(*along, *others).ravel()
    P = P_x.grid([*(P_x.shape[d] for d in along), 1], ranks.tolist())
    each = dispatch.k * dispatch.experts
    counts = {worker: ShapeDtype(tokens.counts(worker, each), np.dtype(np.int32)) for worker in P_x.ranks}
    return plan_all_gather(counts, P, range(len(tokens.group_axes), len(along)))
