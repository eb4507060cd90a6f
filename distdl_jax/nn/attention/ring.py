"""Ring attention: keys and values come from other workers block by block, forward and again backward.

No worker keeps more of the sequence than its own block: not the blocks that passed, and no scores. Backward, blocks are
fetched again, the gradients of their keys and values are sent back, and weights are recomputed from the logarithms of
their sums. Source: Liu et al. (2023), arXiv:2310.01889; Dao et al. (2022), arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.functional.collectives import accumulation_dtype
from distdl_jax.functional.halo_exchange import RangesPlan
from distdl_jax.nn.attention.load_balance import (
    Loan,
    backward_inputs,
    cut,
    merge_rows,
    put,
    send_back,
    side_by_side,
    split_inputs,
)
from distdl_jax.nn.attention.online_softmax import Keys, Running, added, finished, gradients, start
from distdl_jax.nn.attention.ring_schedule import sees
from distdl_jax.partitions.initialization import initialize_block
from distdl_jax.plans.decomposition import Range
from distdl_jax.random import standard_uniform
from distdl_jax.tracing.adjoint_order import note_anchor, order_after_previous
from distdl_jax.tracing.marks import never_transposed, reverse_only
from distdl_jax.tracing.tie import nothing, tie
from distdl_jax.tracing.world import World


class Extras(NamedTuple):
    """Inputs of an attention beside queries and keys; None for those that are not given.

    - `mask`: (n or 1) x (heads or 1) x queries x all keys, as in `online_softmax.Keys`.
    - `key`: of the random numbers, by which weights are dropped.
    """

    mask: Array | None = None
    key: Array | None = None


@dataclass(frozen=True)
class Dropping:
    """Dropout of weights: they are 0 with probability `p`, and the others are divided by 1 - p, whatever the partition.

    Weights stay where `jax.random.bernoulli(key, 1 - p, shape)` is true, for the whole batch, all heads, queries and
    keys: `shape`. - `samples`, `heads`, `queries`: the ranges of this worker.
    """

    p: float
    shape: tuple[int, int, int, int]
    samples: Range
    heads: Range
    queries: Range

    def factors(self, key: Array, block: int, first: int, n: int) -> Array:
        """Return the factors of the weights of `n` keys, from place `block + first` on.

        They are samples x heads x queries x keys.
        """
        keys = (block + first, block + first + n)
        box = (self.samples, self.heads, self.queries, keys)
        numbers = initialize_block(standard_uniform, key, self.shape, box, np.dtype(jnp.result_type(float)))
        return (numbers < 1 - self.p) / (1 - self.p)


@dataclass(frozen=True)
class Step:
    """One worker's turn, see `ring_schedule`.

    - `fetch`, `send_back`: the movements of a block of keys and values, and of its gradients. - `keys`: its places.
    - `queries`: the worker's own queries that look at them.
    - `loan`: the queries that it lends, and takes; None where nobody does.
    """

    fetch: RangesPlan
    send_back: RangesPlan
    keys: Range
    queries: Range
    loan: Loan | None


@dataclass(frozen=True)
class Ring:
    """The attention of one worker's queries to all keys.

    - `queries`: their places in the sequence. - `own`: the places of this worker's keys.
    - `steps`: its turns, which bring it the other keys.
    - `causal`: whether queries see no keys that come after them.
    - `padded`: whether a flag stands behind each key's and value's numbers: 1 where it is padding.
    - `dropping`: the dropout of the weights.
    """

    queries: Range
    own: Range
    steps: tuple[Step, ...]
    causal: bool
    padded: bool
    dropping: Dropping | None = None

    def of(self, queries: Range) -> Ring:
        """Return the ring of other queries."""
        dropping = self.dropping
        return replace(self, queries=queries, dropping=dropping and replace(dropping, queries=queries))

    def rows(self, queries: Range) -> Range:
        """Return the rows of some queries in this worker's block."""
        return queries[0] - self.queries[0], queries[1] - self.queries[0]

    def seen(self, keys: Range, q: Array, block: Array) -> bool:
        """Say whether some query sees some of these keys."""
        return sees(self.queries, keys, self.causal) and q.size > 0 and block.size > 0

    def keys(self, block: Array, keys: Range, extras: Extras) -> Keys:
        """Return the keys and values of a block, at the places `keys`, and what hides them."""
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
    """Join keys and values, and the flags of those that are padding."""
    if padding is None:
        return jnp.concatenate([k, v], axis=-1)
    flags = jnp.broadcast_to(padding[:, :, None, None], (*k.shape[:3], 1)).astype(k.dtype)
    return jnp.concatenate([k, v, flags], axis=-1)


def attended(world: World, ring: Ring, q: Array, block: Array, extras: Extras) -> Array:
    """Return the heads' outputs, for queries n x s x heads x d and keys and values n x t x (key heads) x (d + d).

    It differentiates as one movement, with an adjoint of its own.
    """
    mask = extras.mask
    if mask is not None and mask.dtype != jnp.bool_:
        extras = extras._replace(mask=reverse_only(mask))
    y, anchor, _ = _attended(world, ring, reverse_only(order_after_previous(q)), reverse_only(block), extras)
    note_anchor(anchor)
    return never_transposed(y)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attended(world: World, ring: Ring, q: Array, block: Array, extras: Extras) -> tuple[Array, Array, Array]:
    """Return the output, an empty anchor of it (see `primitives.movement`), and the logarithms of the sums."""
    running = _after(ring, start(q), q, block, ring.own, extras)
    for step in ring.steps:
        # What moves comes before what is computed, for others wait for it; and after the turn before.
        loan, before = step.loan, tie(q, running.total)
        if loan is not None:
            before = taken = loan.movements.queries.run(world, before)
        fetched = step.fetch.run(world, tie(block, before))
        rows = ring.rows(step.queries)
        part = _after(ring.of(step.queries), cut(running, rows, 2), cut(q, rows, 1), fetched, step.keys, extras)
        running = put(running, part, rows, 2)
        running = running._replace(total=tie(running.total, fetched))
        if loan is not None:
            taken = tie(taken, fetched)
            sums = side_by_side(_after(ring.of(loan.taken), start(taken), taken, block, ring.own, extras))
            returned = send_back(world, loan.movements.sums, tie(sums, taken, block), side_by_side(running))
            running = merge_rows(running, returned, ring.rows(loan.lent))
            # Other workers wait for what is sent back, so it goes before this worker's own sums are computed.
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
    dq, of_block, of_mask = _gradients_of(ring, ring.own, block, extras, q, dy, log_sum, delta)
    of_masks = [(ring.own, of_mask)]
    for step in ring.steps:
        loan, before = step.loan, tie(dq, of_block)
        if loan is not None:
            lent = tie(backward_inputs(q, dy, log_sum, delta), before)
            before = taken = loan.movements.backward_inputs.run(world, lent)
        fetched = step.fetch.run(world, tie(block, before))
        rows = ring.rows(step.queries)
        of_rows = (*(cut(x, rows, 1) for x in (q, dy)), *(cut(x, rows, 2) for x in (log_sum, delta)))
        of_queries, of_fetched, of_mask = _gradients_of(ring.of(step.queries), step.keys, fetched, extras, *of_rows)
        dq, of_masks = _add_rows(dq, of_queries, rows), [*of_masks, (step.keys, of_mask)]
        if loan is not None:
            taken = tie(taken, fetched)
            of_taken, of_own, _ = _gradients_of(ring.of(loan.taken), ring.own, block, extras, *split_inputs(taken))
            of_block = of_block + of_own
        returned = send_back(world, step.send_back, of_fetched, of_block)
        of_block = _add_rows(of_block, returned, (0, returned.shape[1]))
        if loan is not None:
            returned = send_back(world, loan.movements.gradients, tie(of_taken, of_block), dq)
            dq = _add_rows(dq, returned, ring.rows(loan.lent))
    return dq.astype(q.dtype), of_block.astype(block.dtype), Extras(_of_whole_mask(extras.mask, of_masks, dy))


def _add_rows(whole: Array, more: Array, rows: Range) -> Array:
    """Add `more` to some rows."""
    return put(whole, cut(whole, rows, 1) + more, rows, 1)


def _gradients_of(
    ring: Ring, keys: Range, block: Array, extras: Extras, q: Array, dy: Array, log_sum: Array, delta: Array
) -> tuple[Array, Array, Array | None]:
    """Return the contributions of this block of keys to the gradients of queries, block and mask."""
    if not ring.seen(keys, q, block):
        of_q, of_block = (tie(jnp.zeros(x.shape, log_sum.dtype), block, dy) for x in (q, block))
        return of_q, of_block, None
    dq, dk, dv, of_mask = gradients(q, ring.keys(block, keys, extras), dy, log_sum, delta)
    of_flags = [jnp.zeros((*dk.shape[:-1], 1), dk.dtype)] if ring.padded else []
    return dq, jnp.concatenate([dk, dv, *of_flags], -1), of_mask


def _of_whole_mask(mask: Array | None, parts: Sequence[tuple[Range, Array | None]], dy: Array) -> Array | None:
    """Return the gradient of an added mask, from gradients of its columns; 0 for keys that nobody looked at."""
    if mask is None or mask.dtype == jnp.bool_:
        return None
    whole = tie(jnp.zeros(mask.shape, mask.dtype), dy)
    for keys, part in parts:
        if part is not None:
            whole = whole.at[..., slice(*keys)].set(part.astype(mask.dtype))
    return whole


_attended.defvjp(_forward, _backward)
