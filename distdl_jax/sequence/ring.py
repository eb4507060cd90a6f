"""Attention whose keys and values come from other workers, block by block, and come again on the way back.

Of the whole sequence no worker keeps more than its own block: not the blocks that came by, and no scores. Backward they
are fetched anew, what each makes of the gradient of its keys and values is sent home, and the weights are worked out
from the logarithms of their sums. Source: Liu et al. (2023), arXiv:2310.01889; Dao et al. (2022), arXiv:2205.14135.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

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
from distdl_jax.primitives.tie import tie
from distdl_jax.sequence.softmax import Places, added, finished, gradients, start


@dataclass(frozen=True)
class Ring:
    """How one worker's queries get to all keys.

    - `queries`: their places in the sequence. - `own`: those of the keys that this worker holds.
    - `steps`: how it gets each further block, and that block's places.
    - `causal`: whether queries see no keys that come after them.
    - `padded`: whether a flag stands behind each key's and value's numbers: 1 where it is padding.
    """

    queries: Range
    own: Range
    steps: tuple[tuple[RangesPlan, Range], ...]
    causal: bool
    padded: bool

    def seen(self, keys: Range, q: Array, block: Array) -> bool:
        """Whether some query sees some of these keys."""
        ahead = self.causal and keys[0] >= self.queries[1]
        return keys[1] > keys[0] and not ahead and q.size > 0 and block.size > 0

    def places(self, keys: Range) -> Places:
        return Places(self.queries[0], keys[0], self.causal and keys[1] > self.queries[0] + 1)

    def parts(self, block: Array) -> tuple[Array, Array, Array | None]:
        """Keys, values, and which of them are padding."""
        flags = block[:, :, 0, -1] > 0.5 if self.padded else None
        k, v = jnp.split(block[..., :-1] if self.padded else block, 2, axis=-1)
        return k, v, flags


def attended(world: World, ring: Ring, q: Array, block: Array) -> Array:
    """The heads' outputs for queries n x s x heads x d; `block`, n x t x (key heads) x (d + d), are keys and values.

    It is one movement to whoever differentiates it, with an adjoint of its own.
    """
    y, anchor, _ = _attended(world, ring, reverse_only(after_the_one_before(q)), reverse_only(block))
    note_anchor(anchor)
    return never_transposed(y)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attended(world: World, ring: Ring, q: Array, block: Array) -> tuple[Array, Array, Array]:
    """The output, an empty anchor of it (see `primitives.movement`), and the logarithms of the sums."""
    running, passed = start(q), []
    for step, keys in ((None, ring.own), *ring.steps):
        # A block is fetched when the one before has been dealt with.
        fetched = block if step is None else step.run(world, tie(block, q, running.total))
        if ring.seen(keys, q, fetched):
            running = added(running, q, *ring.parts(fetched), ring.places(keys))
        else:
            passed.append(fetched)
    y, log_sum = finished(running, np.dtype(q.dtype))
    y = tie(y, q, block, *passed)
    return y, tie(jnp.zeros(0, y.dtype), y), log_sum


def _forward(world: World, ring: Ring, q: Array, block: Array) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
    y, anchor, log_sum = _attended(world, ring, q, block)
    return (y, anchor, log_sum), (q, block, y, log_sum)


def _backward(
    world: World, ring: Ring, kept: tuple[Array, ...], cotangents: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    q, block, y, log_sum = kept
    wide = accumulation_dtype(np.dtype(q.dtype))
    dy = tie(*cotangents[:2])
    delta = jnp.moveaxis(jnp.sum(dy.astype(wide) * y.astype(wide), -1), 2, 1) - cotangents[2]
    dq, of_block = _made(ring, ring.own, q, block, dy, log_sum, delta)
    for step, keys in ring.steps:
        fetched, send_home = jax.vjp(partial(step.run, world), tie(block, dq, of_block))
        more, made = _made(ring, keys, q, fetched, dy, log_sum, delta)
        dq = dq + more
        of_block = of_block + send_home(made.astype(block.dtype))[0].astype(wide)
    return dq.astype(q.dtype), of_block.astype(block.dtype)


def _made(
    ring: Ring, keys: Range, q: Array, block: Array, dy: Array, log_sum: Array, delta: Array
) -> tuple[Array, Array]:
    """The gradients of the queries, and of the block, that this block of keys makes."""
    if not ring.seen(keys, q, block):
        return tuple(tie(jnp.zeros(x.shape, log_sum.dtype), block, dy) for x in (q, block))  # type: ignore[return-value]
    k, v, flags = ring.parts(block)
    dq, dk, dv = gradients(q, k, v, flags, ring.places(keys), dy, log_sum, delta)
    of_flags = [jnp.zeros((*dk.shape[:-1], 1), dk.dtype)] if ring.padded else []
    return dq, jnp.concatenate([dk, dv, *of_flags], -1)


_attended.defvjp(_forward, _backward)
