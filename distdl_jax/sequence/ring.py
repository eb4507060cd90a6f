"""Attention whose keys and values come from other workers, block by block, and come again on the way back.

Of the whole sequence no worker keeps more than its own block: not the blocks that came by, and no scores. Backward they
are fetched anew, what each makes of the gradient of its keys and values is sent home, and the weights are worked out
from the logarithms of their sums. Source: Liu et al. (2023), arXiv:2310.01889; Dao et al. (2022), arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.backends.base import World
from distdl_jax.plans.decomposition import Range
from distdl_jax.primitives.gradient_anchors import after_the_one_before, note_anchor
from distdl_jax.primitives.halo_exchange import RangesPlan
from distdl_jax.primitives.reverse_only import never_transposed, reverse_only
from distdl_jax.primitives.team_operations import accumulation_dtype
from distdl_jax.primitives.tie import nothing, tie
from distdl_jax.sequence.dropping import Dropping
from distdl_jax.sequence.softmax import Factors, Hidden, Places, added, finished, gradients, start


class Extras(NamedTuple):
    """What an attention is told beside queries and keys; None for what there is not.

    - `mask`: (n or 1) x (heads or 1) x queries x all keys, as in `softmax.Hidden`.
    - `key`: of the random numbers, by which weights are dropped.
    """

    mask: Array | None = None
    key: Array | None = None


@dataclass(frozen=True)
class Ring:
    """How one worker's queries get to all keys.

    - `queries`: their places in the sequence. - `own`: those of the keys that this worker holds.
    - `steps`: how it gets each further block, and that block's places.
    - `causal`: whether queries see no keys that come after them.
    - `padded`: whether a flag stands behind each key's and value's numbers: 1 where it is padding.
    - `dropping`: which weights are dropped.
    """

    queries: Range
    own: Range
    steps: tuple[tuple[RangesPlan, Range], ...]
    causal: bool
    padded: bool
    dropping: Dropping | None = None

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
    y, anchor, _ = _attended(world, ring, reverse_only(after_the_one_before(q)), reverse_only(block), extras)
    note_anchor(anchor)
    return never_transposed(y)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attended(world: World, ring: Ring, q: Array, block: Array, extras: Extras) -> tuple[Array, Array, Array]:
    """The output, an empty anchor of it (see `primitives.movement`), and the logarithms of the sums."""
    running, passed = start(q), []
    for step, keys in ((None, ring.own), *ring.steps):
        # A block is fetched when the one before has been dealt with.
        fetched = block if step is None else step.run(world, tie(block, q, running.total))
        if ring.seen(keys, q, fetched):
            parts = ring.parts(fetched, keys, extras)
            running = added(running, q, *parts, ring.places(keys), ring.factors(keys, extras))
        else:
            passed.append(fetched)
    y, log_sum = finished(running, np.dtype(q.dtype))
    y = tie(y, q, block, *passed)
    return y, tie(nothing(y.dtype), y), log_sum


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
    dq, of_block, of_mask = _made(ring, ring.own, q, block, extras, dy, log_sum, delta)
    of_masks = [(ring.own, of_mask)]
    for step, keys in ring.steps:
        fetched, send_home = jax.vjp(partial(step.run, world), tie(block, dq, of_block))
        more, made, of_mask = _made(ring, keys, q, fetched, extras, dy, log_sum, delta)
        dq, of_masks = dq + more, [*of_masks, (keys, of_mask)]
        of_block = of_block + send_home(made.astype(block.dtype))[0].astype(wide)
    return dq.astype(q.dtype), of_block.astype(block.dtype), Extras(_of_whole_mask(extras.mask, of_masks, dy))


def _made(
    ring: Ring, keys: Range, q: Array, block: Array, extras: Extras, dy: Array, log_sum: Array, delta: Array
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
