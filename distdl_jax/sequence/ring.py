"""Attention whose keys and values come from other workers, block by block, and come again on the way back.

Of the whole sequence no worker keeps more than its own block: not the blocks that came by, and no scores. Backward they
are fetched anew, what each makes of the gradient of its keys and values is sent home, and the weights are worked out
from the logarithms of their sums. Source: Liu et al. (2023), arXiv:2310.01889; Dao et al. (2022), arXiv:2205.14135.
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

from distdl_jax.plans.decomposition import Range
from distdl_jax.primitives.collectives import accumulation_dtype
from distdl_jax.primitives.halo_exchange import RangesPlan
from distdl_jax.sequence.dropout_mask import Dropping
from distdl_jax.sequence.load_balance import Help, cut, home, parts_of, put, side_by_side, told, with_those
from distdl_jax.sequence.online_softmax import Factors, Hidden, Places, Running, added, finished, gradients, start
from distdl_jax.tracing.adjoint_order import note_anchor, order_after_previous
from distdl_jax.tracing.forward_mode_error import never_transposed, reverse_only
from distdl_jax.tracing.tie import nothing, tie
from distdl_jax.world import World


class Extras(NamedTuple):
    """What an attention is told beside queries and keys; None for what there is not.

    - `mask`: (n or 1) x (heads or 1) x queries x all keys, as in `softmax.Hidden`.
    - `key`: of the random numbers, by which weights are dropped.
    """

    mask: Array | None = None
    key: Array | None = None


@dataclass(frozen=True)
class Step:
    """What one worker does in a turn, see `turns`.

    - `fetch`, `home`: how it gets a block of keys and values, and their gradients get back. - `keys`: their places.
    - `queries`: which of its own look at them.
    - `help`: which queries it lends, and takes; None where nobody does.
    """

    fetch: RangesPlan
    home: RangesPlan
    keys: Range
    queries: Range
    help: Help | None


@dataclass(frozen=True)
class Ring:
    """How one worker's queries get to all keys.

    - `queries`: their places in the sequence. - `own`: those of the keys that this worker holds.
    - `steps`: what it does to get to the other keys, turn by turn.
    - `causal`: whether queries see no keys that come after them.
    - `padded`: whether a flag stands behind each key's and value's numbers: 1 where it is padding.
    - `dropping`: which weights are dropped.
    """

    queries: Range
    own: Range
    steps: tuple[Step, ...]
    causal: bool
    padded: bool
    dropping: Dropping | None = None

    def of(self, queries: Range) -> Ring:
        """The same for other queries."""
        dropping = self.dropping
        return replace(self, queries=queries, dropping=dropping and replace(dropping, queries=queries))

    def rows(self, queries: Range) -> Range:
        """Where in its own some of its queries are."""
        return queries[0] - self.queries[0], queries[1] - self.queries[0]

    def seen(self, keys: Range, q: Array, block: Array) -> bool:
        """Whether some query sees some of these keys."""
        ahead = self.causal and keys[0] >= self.queries[1]
        return keys[1] > keys[0] and not ahead and q.size > 0 and block.size > 0

    def places(self, keys: Range) -> Places:
        return Places(self.queries[0], keys[0], self.causal and keys[1] > self.queries[0] + 1)

    def parts(self, block: Array, keys: Range, extras: Extras) -> tuple[Array, Array, Hidden]:
        """Keys, values, and what hides them."""
        flags = block[:, :, 0, -1] > 0.5 if self.padded else None
        k, v = jnp.split(block[..., :-1] if self.padded else block, 2, axis=-1)
        return k, v, Hidden(flags, None if extras.mask is None else extras.mask[..., slice(*keys)])

    def factors(self, keys: Range, extras: Extras) -> Factors | None:
        """What the weights of these keys are multiplied with."""
        if self.dropping is None or extras.key is None:
            return None
        return partial(self.dropping.factors, extras.key, keys[0])


def block_of(k: Array, v: Array, padding: Array | None) -> Array:
    """Keys and values side by side, and the flags of those that are padding."""
    if padding is None:
        return jnp.concatenate([k, v], axis=-1)
    flags = jnp.broadcast_to(padding[:, :, None, None], (*k.shape[:3], 1)).astype(k.dtype)
    return jnp.concatenate([k, v, flags], axis=-1)


def attended(world: World, ring: Ring, q: Array, block: Array, extras: Extras) -> Array:
    """The heads' outputs for queries n x s x heads x d; `block`, n x t x (key heads) x (d + d), are keys and values.

    It is one movement to whoever differentiates it, with an adjoint of its own.
    """
    mask = extras.mask
    if mask is not None and mask.dtype != jnp.bool_:
        extras = extras._replace(mask=reverse_only(mask))
    y, anchor, _ = _attended(world, ring, reverse_only(order_after_previous(q)), reverse_only(block), extras)
    note_anchor(anchor)
    return never_transposed(y)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attended(world: World, ring: Ring, q: Array, block: Array, extras: Extras) -> tuple[Array, Array, Array]:
    """The output, an empty anchor of it (see `primitives.movement`), and the logarithms of the sums."""
    running = _after(ring, start(q), q, block, ring.own, extras)
    for step in ring.steps:
        # What moves comes before what is computed, for others wait for it; and after the turn before.
        help, before = step.help, tie(q, running.total)
        if help is not None:
            before = taken = help.movements.queries.run(world, before)
        fetched = step.fetch.run(world, tie(block, before))
        rows = ring.rows(step.queries)
        its = _after(ring.of(step.queries), cut(running, rows, 2), cut(q, rows, 1), fetched, step.keys, extras)
        running = put(running, its, rows, 2)
        running = running._replace(total=tie(running.total, fetched))
        if help is not None:
            taken = tie(taken, fetched)
            made = side_by_side(_after(ring.of(help.taken), start(taken), taken, block, ring.own, extras))
            come = home(world, help.movements.sums, tie(made, taken, block), side_by_side(running))
            running = with_those(running, come, ring.rows(help.lent))
            # Others wait for what is sent home; what this worker makes of its own sums need not come first.
            running = running._replace(total=world.transport.sent_first(tie(running.total, come)))
    y, log_sum = finished(running, np.dtype(q.dtype))
    y = tie(y, q, block)
    return y, tie(nothing(y.dtype), y), log_sum


def _after(ring: Ring, running: Running, q: Array, block: Array, keys: Range, extras: Extras) -> Running:
    """What is known after this block of keys and values, too."""
    if not ring.seen(keys, q, block):
        return running
    return added(running, q, *ring.parts(block, keys, extras), ring.places(keys), ring.factors(keys, extras))


Kept = tuple[Array, Array, Extras, Array, Array]


def _forward(
    world: World, ring: Ring, q: Array, block: Array, extras: Extras
) -> tuple[tuple[Array, Array, Array], Kept]:
    y, anchor, log_sum = _attended(world, ring, q, block, extras)
    return (y, anchor, log_sum), (q, block, extras, y, log_sum)


def _backward(
    world: World, ring: Ring, kept: Kept, cotangents: tuple[Array, Array, Array]
) -> tuple[Array, Array, Extras]:
    q, block, extras, y, log_sum = kept
    wide = accumulation_dtype(np.dtype(q.dtype))
    dy = tie(*cotangents[:2])
    delta = jnp.moveaxis(jnp.sum(dy.astype(wide) * y.astype(wide), -1), 2, 1) - cotangents[2]
    dq, of_block, of_mask = _made(ring, ring.own, block, extras, q, dy, log_sum, delta)
    of_masks = [(ring.own, of_mask)]
    for step in ring.steps:
        help, before = step.help, tie(dq, of_block)
        if help is not None:
            before = taken = help.movements.told.run(world, tie(told(q, dy, log_sum, delta), before))
        fetched = step.fetch.run(world, tie(block, before))
        rows = ring.rows(step.queries)
        of_rows = (*(cut(x, rows, 1) for x in (q, dy)), *(cut(x, rows, 2) for x in (log_sum, delta)))
        more, made, of_mask = _made(ring.of(step.queries), step.keys, fetched, extras, *of_rows)
        dq, of_masks = _and(dq, more, rows), [*of_masks, (step.keys, of_mask)]
        if help is not None:
            taken = tie(taken, fetched)
            of_taken, of_own, _ = _made(ring.of(help.taken), ring.own, block, extras, *parts_of(taken))
            of_block = of_block + of_own
        come = home(world, step.home, made, of_block)
        of_block = _and(of_block, come, (0, come.shape[1]))
        if help is not None:
            dq = _and(dq, home(world, help.movements.gradients, tie(of_taken, of_block), dq), ring.rows(help.lent))
    return dq.astype(q.dtype), of_block.astype(block.dtype), Extras(_of_whole_mask(extras.mask, of_masks, dy))


def _and(whole: Array, more: Array, rows: Range) -> Array:
    """The sum, where there is more for some rows."""
    return put(whole, cut(whole, rows, 1) + more, rows, 1)


def _made(
    ring: Ring, keys: Range, block: Array, extras: Extras, q: Array, dy: Array, log_sum: Array, delta: Array
) -> tuple[Array, Array, Array | None]:
    """The gradients of the queries, of the block, and of the mask, that this block of keys makes."""
    if not ring.seen(keys, q, block):
        of_q, of_block = (tie(jnp.zeros(x.shape, log_sum.dtype), block, dy) for x in (q, block))
        return of_q, of_block, None
    parts = ring.parts(block, keys, extras)
    dq, dk, dv, of_mask = gradients(q, *parts, ring.places(keys), dy, log_sum, delta, ring.factors(keys, extras))
    of_flags = [jnp.zeros((*dk.shape[:-1], 1), dk.dtype)] if ring.padded else []
    return dq, jnp.concatenate([dk, dv, *of_flags], -1), of_mask


def _of_whole_mask(mask: Array | None, parts: Sequence[tuple[Range, Array | None]], dy: Array) -> Array | None:
    """The gradient of an added mask, from those of its columns; 0 for keys that nobody looked at."""
    if mask is None or mask.dtype == jnp.bool_:
        return None
    whole = tie(jnp.zeros(mask.shape, mask.dtype), dy)
    for keys, part in parts:
        if part is not None:
            whole = whole.at[..., slice(*keys)].set(part.astype(mask.dtype))
    return whole


_attended.defvjp(_forward, _backward)
