"""Ring attention: keys and values arrive from other workers block by block, forward and again backward.

No worker stores more of the sequence than its own block: neither the blocks that passed, nor scores. In the backward
pass, blocks are fetched again, the gradients of their keys and values are sent back, and weights are recomputed from
the logarithms of their sums. If queries see no later keys, workers send queries to others for load balancing (see
`ring_schedule`): partial sums come back, and in the backward pass the gradients of queries; gradients of keys and
values stay where they are computed.

Source: Liu et al. (2023), arXiv:2310.01889; Dao et al. (2022), arXiv:2205.14135; Li et al. (2023), arXiv:2310.03294
(load balancing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.functional.box_exchange import joined_slices
from distdl_jax.functional.halo_exchange import RangesPlan
from distdl_jax.kernels.dtypes import accumulation_dtype, in_own_width
from distdl_jax.nn.attention.online_softmax import Keys, Running, added, finished, gradients, merged, start
from distdl_jax.nn.attention.ring_schedule import Turn, sees
from distdl_jax.partitions.initialization import initialize_block
from distdl_jax.plans.decomposition import Range
from distdl_jax.random import standard_uniform
from distdl_jax.tracing.adjoint_order import note_anchor, order_after_previous
from distdl_jax.tracing.marks import never_transposed, reverse_only
from distdl_jax.tracing.tie import nothing, tie
from distdl_jax.transports.world import World


class Extras(NamedTuple):
    """Further inputs of an attention, besides queries and keys; None if not given.

    - `mask`: (n or 1) x (heads or 1) x queries x all keys, as in `online_softmax.Keys`.
    - `key`: for the random numbers by which weights are dropped.
    """

    mask: Array | None = None
    key: Array | None = None


@dataclass(frozen=True)
class Dropping:
    """Dropout of weights: set to 0 with probability `p`, or else divided by 1 - p, independently of the partition.

    Weights stay where `jax.random.bernoulli(key, 1 - p, shape)` is true, for the whole batch, all heads, queries and
    keys: `shape`. - `samples`, `heads`, `queries`: the ranges of this worker.
    """

    p: float
    shape: tuple[int, int, int, int]
    samples: Range
    heads: Range
    queries: Range

    def factors(self, key: Array, block: int, first: int, n: int) -> Array:
        """Return the factors of the weights of `n` keys, from position `block + first` on.

        Their shape is samples x heads x queries x keys.
        """
        keys = (block + first, block + first + n)
        box = (self.samples, self.heads, self.queries, keys)
        numbers = initialize_block(standard_uniform, key, self.shape, box, np.dtype(jnp.result_type(float)))
        return (numbers < 1 - self.p) / (1 - self.p)


@dataclass(frozen=True)
class Loans:
    """The load-balancing movements between owners of queries and the workers that compute for them.

    - `queries`, `backward_inputs`: to the computing worker, forward and backward, see `_joined_inputs`.
    - `sums`, `gradients`: the results of queries, and their gradients, back to the owner, see `_send_back`.
    """

    queries: RangesPlan
    backward_inputs: RangesPlan
    sums: RangesPlan
    gradients: RangesPlan


@dataclass(frozen=True)
class RingStep:
    """A round of all workers, with the movements of keys and values, `fetch`, and of their gradients, `send_back`.

    - `loans`: the movements of queries computed on other workers; None if there are none.
    """

    turn: Turn
    fetch: RangesPlan
    send_back: RangesPlan
    loans: Loans | None


@dataclass(frozen=True)
class Ring:
    """The attention of one worker's queries to all keys.

    - `index`: the position of this worker along the sequence. - `queries`: the positions of its queries.
    - `own`: the positions of its keys. - `steps`: the rounds that bring it the other keys.
    - `causal`: whether queries see no keys that come after them.
    - `padded`: whether a flag follows each key's and value's numbers: 1 if it is padding.
    - `dropping`: the dropout of the weights.
    """

    index: int
    queries: Range
    own: Range
    steps: tuple[RingStep, ...]
    causal: bool
    padded: bool
    dropping: Dropping | None = None

    def for_queries(self, queries: Range) -> Ring:
        """Return the ring for other queries."""
        dropping = self.dropping
        return replace(self, queries=queries, dropping=dropping and replace(dropping, queries=queries))

    def rows(self, queries: Range) -> Range:
        """Return the rows of some queries in this worker's block."""
        return queries[0] - self.queries[0], queries[1] - self.queries[0]

    def seen(self, keys: Range, q: Array, block: Array) -> bool:
        """Say whether some query sees some of these keys."""
        return sees(self.queries, keys, self.causal) and q.size > 0 and block.size > 0

    def keys(self, block: Array, keys: Range, extras: Extras) -> Keys:
        """Return the keys and values of a block, at the positions `keys`, and their masks."""
        padding = block[:, :, 0, -1] > 0.5 if self.padded else None
        k, v = jnp.split(block[..., :-1] if self.padded else block, 2, axis=-1)
        factors = None
        if self.dropping is not None and extras.key is not None:
            factors = partial(self.dropping.factors, extras.key, keys[0])
        return Keys(
            k,
            v,
            first_query=self.queries[0],
            first=keys[0],
            causal=self.causal and keys[1] > self.queries[0] + 1,
            padding=padding,
            mask=None if extras.mask is None else extras.mask[..., slice(*keys)],
            factors=factors,
        )


def block_of(k: Array, v: Array, padding: Array | None) -> Array:
    """Join keys and values, and the flags that mark padding."""
    if padding is None:
        return jnp.concatenate([k, v], axis=-1)
    flags = jnp.broadcast_to(padding[:, :, None, None], (*k.shape[:3], 1)).astype(k.dtype)
    return jnp.concatenate([k, v, flags], axis=-1)


def attended(world: World, ring: Ring, q: Array, block: Array, extras: Extras) -> Array:
    """Return the heads' outputs, for queries n x s x heads x d and keys and values n x t x (key heads) x (d + d).

    It differentiates as one movement, with its own adjoint.
    """
    mask = extras.mask
    if mask is not None and mask.dtype != jnp.bool_:
        extras = extras._replace(mask=reverse_only(mask))
    y, anchor, _ = _attended(world, ring, reverse_only(order_after_previous(q)), reverse_only(block), extras)
    note_anchor(anchor)
    return never_transposed(y)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attended(world: World, ring: Ring, q: Array, block: Array, extras: Extras) -> tuple[Array, Array, Array]:
    """Return the output, an empty anchor for it (see `functional.movement`), and the logarithms of the sums."""
    running = _after(ring, start(q), q, block, ring.own, extras)
    for step in ring.steps:
        keys, queries, lent, taken = step.turn.share(ring.index)
        rows, before = ring.rows(queries), tie(q, running.total)
        # Messages go before the computation, since other workers wait for them, and after the previous round.
        if step.loans is not None:
            before = borrowed = step.loans.queries.run(world, before)
        fetched = step.fetch.run(world, tie(block, before))
        part = _after(ring.for_queries(queries), _cut(running, rows, 2), _cut(q, rows, 1), fetched, keys, extras)
        running = _put(running, part, rows, 2)
        running = running._replace(total=tie(running.total, fetched))
        if step.loans is not None:
            borrowed = tie(borrowed, fetched)
            sums = _joined_sums(_after(ring.for_queries(taken), start(borrowed), borrowed, block, ring.own, extras))
            returned = _send_back(world, step.loans.sums, tie(sums, borrowed, block), _joined_sums(running))
            running = _merge_rows(running, returned, ring.rows(lent))
            # Other workers wait for these messages, so they are sent before this worker computes its own sums.
            running = running._replace(total=world.transport.sent_first(tie(running.total, returned)))
    y, log_sum = finished(running, np.dtype(q.dtype))
    y = tie(y, q, block)
    return y, tie(nothing(y.dtype), y), log_sum


def _after(ring: Ring, running: Running, q: Array, block: Array, keys: Range, extras: Extras) -> Running:
    """Return the running sums after this block of keys and values."""
    if not ring.seen(keys, q, block):
        return running
    return added(running, q, ring.keys(block, keys, extras))


Residuals = tuple[Array, Array, Extras, Array, Array]


def _forward(
    world: World, ring: Ring, q: Array, block: Array, extras: Extras
) -> tuple[tuple[Array, Array, Array], Residuals]:
    y, anchor, log_sum = _attended(world, ring, q, block, extras)
    return (y, anchor, log_sum), (q, block, extras, y, log_sum)


def _backward(
    world: World, ring: Ring, residuals: Residuals, cotangents: tuple[Array, Array, Array]
) -> tuple[Array, Array, Extras]:
    q, block, extras, y, log_sum = residuals
    wide = accumulation_dtype(np.dtype(q.dtype))
    dy = tie(*cotangents[:2])
    delta = jnp.moveaxis(jnp.sum(dy.astype(wide) * y.astype(wide), -1), 2, 1) - cotangents[2]
    dq, d_block, d_mask = _block_gradients(ring, ring.own, block, extras, q, dy, log_sum, delta)
    d_masks = [(ring.own, d_mask)]
    # Backwards a block of keys visits each worker's queries again, and its gradient travels home at once. Each message
    # is tied to the previous one: all workers send in one order, and only one visiting block is in memory.
    for step in ring.steps:
        keys, queries, lent, taken = step.turn.share(ring.index)
        rows, before = ring.rows(queries), tie(dq, d_block)
        if step.loans is not None:
            inputs = tie(_joined_inputs(q, dy, log_sum, delta), before)
            before = borrowed = step.loans.backward_inputs.run(world, inputs)
        fetched = step.fetch.run(world, tie(block, before))
        row_inputs = (*(_cut(x, rows, 1) for x in (q, dy)), *(_cut(x, rows, 2) for x in (log_sum, delta)))
        d_queries, d_fetched, d_mask = _block_gradients(ring.for_queries(queries), keys, fetched, extras, *row_inputs)
        dq, d_masks = _add_rows(dq, d_queries, rows), [*d_masks, (keys, d_mask)]
        if step.loans is not None:
            borrowed_inputs = _split_inputs(tie(borrowed, fetched))
            d_taken, d_own, _ = _block_gradients(ring.for_queries(taken), ring.own, block, extras, *borrowed_inputs)
            d_block = d_block + d_own
        returned = _send_back(world, step.send_back, d_fetched, d_block)
        d_block = _add_rows(d_block, returned, (0, returned.shape[1]))
        if step.loans is not None:
            returned = _send_back(world, step.loans.gradients, tie(d_taken, d_block), dq)
            dq = _add_rows(dq, returned, ring.rows(lent))
    return dq.astype(q.dtype), d_block.astype(block.dtype), Extras(_mask_gradient(extras.mask, d_masks, dy))


def _add_rows(whole: Array, more: Array, rows: Range) -> Array:
    """Add `more` to some rows."""
    return _put(whole, _cut(whole, rows, 1) + more, rows, 1)


def _block_gradients(
    ring: Ring, keys: Range, block: Array, extras: Extras, q: Array, dy: Array, log_sum: Array, delta: Array
) -> tuple[Array, Array, Array | None]:
    """Return the contributions of this block of keys to the gradients of queries, block and mask."""
    if not ring.seen(keys, q, block):
        d_q, d_block = (tie(jnp.zeros(x.shape, log_sum.dtype), block, dy) for x in (q, block))
        return d_q, d_block, None
    dq, dk, dv, d_mask = gradients(q, ring.keys(block, keys, extras), dy, log_sum, delta)
    d_flags = [jnp.zeros((*dk.shape[:-1], 1), dk.dtype)] if ring.padded else []
    return dq, jnp.concatenate([dk, dv, *d_flags], -1), d_mask


def _mask_gradient(mask: Array | None, parts: Sequence[tuple[Range, Array | None]], dy: Array) -> Array | None:
    """Return the gradient of an added mask, from gradients of its columns; 0 for keys that no query sees."""
    if mask is None or mask.dtype == jnp.bool_:
        return None
    whole = tie(jnp.zeros(mask.shape, mask.dtype), dy)
    for keys, part in parts:
        if part is not None:
            whole = whole.at[..., slice(*keys)].set(part.astype(mask.dtype))
    return whole


_attended.defvjp(in_own_width(_forward), in_own_width(_backward))


# --- rows in messages ----------------------------------------------------------------------------------------------

T = TypeVar("T")
"""Arrays."""


def _send_back(world: World, plan: RangesPlan, results: Array, mine: Array) -> Array:
    """Return the results for this worker's positions, from another worker, and send it `results` for its own.

    - `mine`: the result of this worker's computation before it waits, like `results` but for the rows. One of its rows
      is prepended, and stays: XLA's schedule, which ignores ties, would run a receive with only an empty operand before
      the work meant to overlap with it.
    """
    shape = (results.shape[0], 1, *results.shape[2:])
    row = lax.slice_in_dim(mine, 0, 1, axis=1) if mine.shape[1] else tie(jnp.zeros(shape, results.dtype), mine)
    return plan.run(world, lax.concatenate([row, results], 1))


def _joined_inputs(q: Array, dy: Array, log_sum: Array, delta: Array) -> Array:
    """Join the inputs of `online_softmax.gradients`: n x queries x heads x (d + d + 2)."""
    wide = accumulation_dtype(np.dtype(q.dtype))
    sums = jnp.moveaxis(jnp.stack([log_sum, delta], -1), 1, 2)
    return jnp.concatenate([x.astype(wide) for x in (q, dy, sums)], -1)


def _split_inputs(joined: Array) -> tuple[Array, Array, Array, Array]:
    """Split the array from `_joined_inputs`."""
    d = joined.shape[-1] // 2 - 1
    q, dy, sums = jnp.split(joined, [d, 2 * d], -1)
    log_sum, delta = (lax.index_in_dim(jnp.moveaxis(sums, 2, 1), i, 3, False) for i in range(2))
    return q, dy, log_sum, delta


def _joined_sums(running: Running) -> Array:
    """Join sums for a message: n x queries x heads x (d + 2)."""
    top, total, values = running
    return jnp.moveaxis(jnp.concatenate([values, top[..., None], total[..., None]], -1), 1, 2)


def _merge_rows(running: Running, other_rows: Array, rows: Range) -> Running:
    """Merge into `running`, of all queries, the sums `other_rows`, from `_joined_sums`, of the queries `rows`."""
    width = other_rows.shape[-1]
    values, top, total = jnp.split(jnp.moveaxis(other_rows, 1, 2), [width - 2, width - 1], -1)
    other = Running(lax.squeeze(top, (3,)), lax.squeeze(total, (3,)), values)
    return _put(running, merged(_cut(running, rows, 2), other), rows, 2)


def _cut(tree: T, rows: Range, axis: int) -> T:
    """Return the `rows` of arrays."""
    return jax.tree.map(lambda x: joined_slices([(x, *rows)], axis), tree)


def _put(tree: T, part: T, rows: Range, axis: int) -> T:
    """Return arrays with their `rows` replaced by `part`."""

    def replaced(whole: Array, part: Array) -> Array:
        size = whole.shape[axis]
        return joined_slices([(whole, 0, rows[0]), (part, 0, part.shape[axis]), (whole, rows[1], size)], axis)

    return jax.tree.map(replaced, tree, part)
