"""Attention of one worker's queries to a block of keys, piece by piece: running maximum and sums, and gradients.

Only the scores for the queries and `PIECE` keys exist at a time, so memory is linear in the block. Source: Milakov and
Gimelshein (2018), arXiv:1805.02867 (running sums); Dao et al. (2022), arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.tracing.tie import materialize

PIECE = 512
"""The number of keys that are processed together."""


Factors = Callable[[int, int], Array]
"""Maps the first of some keys and their number to the factors of their weights: n x heads x queries x keys."""


class Keys(NamedTuple):
    """One block of keys and values, n x t x (key heads) x d, and their relation to the queries.

    Each key head serves a group of adjacent heads.

    - `first_query`, `first`: the positions of the first query and of the first key: numbers, or traced scalars.
    - `causal`: whether queries see no keys that come after them.
    - `padding`: n x t, of bool: True for keys that no query sees. None if there are none.
    - `mask`: (n or 1) x (heads or 1) x queries x t: of bool, True where a query doesn't see a key; or added to scores.
    - `factors`: of the weights, by the number of a key in the block; for a piece of the block, an array.
    """

    k: Array
    v: Array
    first_query: int | Array = 0
    first: int | Array = 0
    causal: bool = False
    padding: Array | None = None
    mask: Array | None = None
    factors: Factors | Array | None = None

    def piece(self, start: int | Array, n: int) -> Keys:
        """Return `n` keys starting at `start`."""

        def cut(x: Array, axis: int) -> Array:
            return lax.dynamic_slice_in_dim(x, start, n, axis)

        return self._replace(
            factors=self.factors(int(start), n) if callable(self.factors) else None,
            k=cut(self.k, 1),
            v=cut(self.v, 1),
            padding=None if self.padding is None else cut(self.padding, 1),
            mask=None if self.mask is None else cut(self.mask, 3),
            first=self.first + start,
        )


class Running(NamedTuple):
    """The state after some keys: per query and head the largest score, and sums relative to it.

    - `top`, `total`: n x heads x queries; -inf and 0 for a query that has seen none.
    - `values`: n x heads x queries x features, not yet divided by `total`.
    """

    top: Array
    total: Array
    values: Array


def start(q: Array) -> Running:
    """Return the state before the first key, of queries n x s x heads x d."""
    n, s, heads, d = q.shape
    wide = accumulation_dtype(np.dtype(q.dtype))
    return Running(
        jnp.full((n, heads, s), -jnp.inf, wide), jnp.zeros((n, heads, s), wide), jnp.zeros((n, heads, s, d), wide)
    )


def added(running: Running, q: Array, keys: Keys) -> Running:
    """Return the state after one more block of keys and values."""

    def step(running: Running, piece: Keys) -> tuple[Running, tuple[()]]:
        return _added(running, q, piece), ()

    return _over_pieces(step, running, keys, ())[0]


def merged(one: Running, other: Running) -> Running:
    """Return the state after the keys of both."""
    top = jnp.maximum(one.top, other.top)
    base = jnp.where(jnp.isneginf(top), 0, top)
    shrunk, other_shrunk = jnp.exp(one.top - base), jnp.exp(other.top - base)
    values = one.values * shrunk[..., None] + other.values * other_shrunk[..., None]
    return Running(top, one.total * shrunk + other.total * other_shrunk, values)


def finished(running: Running, dtype: np.dtype) -> tuple[Array, Array]:
    """Return the output, n x queries x heads x features, and the logarithms of the sums, n x heads x queries.

    A query that has seen no key has 0 for both.
    """
    nothing = running.total == 0
    total = jnp.where(nothing, 1, running.total)
    y = jnp.moveaxis(running.values / total[..., None], 1, 2).astype(dtype)
    return y, jnp.where(nothing, 0, running.top) + jnp.log(total)


def gradients(
    q: Array, keys: Keys, dy: Array, log_sum: Array, delta: Array
) -> tuple[Array, Array, Array, Array | None]:
    """Return the gradients of queries, keys, values and an added mask from one block of keys, in the dtype of sums.

    - `dy`: of the output. - `log_sum`: from `finished`.
    - `delta`, like it: the sum over a head's features of dy * y, less the gradient of `log_sum`.
    """

    def step(dq: Array | None, piece: Keys) -> tuple[Array, tuple[Array | None, ...]]:
        more, *rest = _gradients(q, piece, dy, log_sum, delta)
        return more if dq is None else dq + more, tuple(rest)

    dq = jnp.zeros(q.shape, log_sum.dtype) if _whole_pieces(keys) else None
    dq, parts = _over_pieces(step, dq, keys, (1, 1, 3))
    dk, dv, d_mask = zip(*parts, strict=True)
    joined = None if d_mask[0] is None else jnp.concatenate(d_mask, 3)
    return dq, jnp.concatenate(dk, 1), jnp.concatenate(dv, 1), joined


def _over_pieces(step: Callable[..., Any], carry: Any, keys: Keys, axes: Sequence[int]) -> tuple[Any, list[Any]]:
    """Run `step(carry, piece)`, which returns a carry and outputs, over pieces of the keys, whole ones in a loop.

    The outputs of the loop are joined along `axes`. Factors depend on the keys' numbers: no loop then.
    """
    whole, t, outputs = _whole_pieces(keys), keys.k.shape[1], []
    if whole and keys.factors is None:
        carry, stacked = lax.scan(lambda c, i: step(c, keys.piece(i * PIECE, PIECE)), carry, jnp.arange(whole))
        outputs.append(tuple(x if x is None else _side_by_side(x, a) for x, a in zip(stacked, axes, strict=True)))
    for i in range(whole if keys.factors is not None else 0):
        carry, output = step(carry, keys.piece(i * PIECE, PIECE))
        outputs.append(output)
    if whole * PIECE < t:
        carry, output = step(carry, keys.piece(whole * PIECE, t - whole * PIECE))
        outputs.append(output)
    return carry, outputs


def _side_by_side(stacked: Array, axis: int) -> Array:
    """Join stacked pieces along `axis` of the other dimensions."""
    moved = jnp.moveaxis(stacked, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])


def _whole_pieces(keys: Keys) -> int:
    """Return the number of whole pieces, 0 if there is just one piece."""
    t = keys.k.shape[1]
    return t // PIECE if t > PIECE else 0


def _scores(q: Array, keys: Keys) -> tuple[Array, Array | None]:
    """Return scores, n x key heads x heads of each x queries x keys, and where a query doesn't see a key.

    The scores are -inf there; the second result is None without padding, a boolean mask or causality.
    """
    (n, s, heads, d), (_, t, groups, _) = q.shape, keys.k.shape
    wide = accumulation_dtype(np.dtype(q.dtype))
    products = _dot("ngmd,ntgd->ngmt", _rows(q.astype(wide), groups), keys.k.astype(wide))
    scores = products.reshape(n, groups, heads // groups, s, t) / np.sqrt(d).astype(wide)
    unseen = [] if keys.padding is None else [keys.padding[:, None, None, None, :]]
    if keys.mask is not None:
        mask = _in_groups(keys.mask, groups)
        if mask.dtype == jnp.bool_:
            unseen.append(mask)
        else:
            scores = scores + mask.astype(wide)
    if keys.causal:
        unseen.append(keys.first + jnp.arange(t)[None, :] > keys.first_query + jnp.arange(s)[:, None])
    if not unseen:
        return scores, None
    somewhere = reduce(jnp.logical_or, unseen)
    return jnp.where(somewhere, -jnp.inf, scores), somewhere


def _rows(x: Array, groups: int) -> Array:
    """Bring n x s x heads x d to n x key heads x rows x d: head after head of each group, for batched products.

    With the heads of a group as a separate dimension XLA takes three times as long.
    """
    n, s, heads, d = x.shape
    return jnp.moveaxis(x, 1, 2).reshape(n, groups, heads // groups * s, d)


def _in_groups(x: Array, groups: int) -> Array:
    """Bring n x heads (or 1) x queries x keys to n x key heads (or 1) x heads of each (or 1) x queries x keys."""
    n, heads, *rest = x.shape
    return x.reshape(n, 1, 1, *rest) if heads == 1 else x.reshape(n, groups, heads // groups, *rest)


def _added(running: Running, q: Array, keys: Keys) -> Running:
    (n, s, heads, d), wide = q.shape, running.top.dtype
    scores, _ = _scores(q, keys)
    # The results do not depend on this number. Its derivative would compare the largest score with recomputed scores,
    # whose rounding may differ, so that none of them might equal it.
    top = lax.stop_gradient(jnp.maximum(running.top, jnp.max(scores, axis=-1).reshape(n, heads, s)))
    base = jnp.where(jnp.isneginf(top), 0, top)
    weights = jnp.exp(scores - base.reshape(scores.shape[:-1])[..., None])
    shrunk = jnp.exp(running.top - base)
    total = jnp.sum(weights, axis=-1).reshape(n, heads, s)
    if isinstance(keys.factors, Array):
        weights = weights * _in_groups(keys.factors, keys.k.shape[2])
    values = _dot("ngrst,ntgd->ngrsd", weights, keys.v.astype(wide)).reshape(n, heads, s, d)
    return Running(top, running.total * shrunk + total, running.values * shrunk[..., None] + values)


def _gradients(
    q: Array, keys: Keys, dy: Array, log_sum: Array, delta: Array
) -> tuple[Array, Array, Array, Array | None]:
    (n, s, heads, d), groups, wide = q.shape, keys.k.shape[2], log_sum.dtype
    scores, unseen = _scores(q, keys)
    by_group = (*scores.shape[:-1], 1)
    weights = jnp.exp(scores - log_sum.reshape(by_group))
    dy_rows = _rows(dy.astype(wide), groups)
    d_weights, used = _dot("ngmd,ntgd->ngmt", dy_rows, keys.v.astype(wide)).reshape(weights.shape), weights
    if isinstance(keys.factors, Array):
        factors = _in_groups(keys.factors, groups)
        d_weights, used = d_weights * factors, weights * factors
    rows = (*dy_rows.shape[:3], weights.shape[-1])
    dv = _dot("ngmt,ngmd->ntgd", used.reshape(rows), dy_rows)
    d_scores = weights * (d_weights - delta.reshape(by_group))
    if unseen is not None:  # not even a query with NaN output uses a key that it doesn't see
        d_scores = jnp.where(unseen, 0, d_scores)
    d_mask, mask = None, keys.mask
    if mask is not None and mask.dtype != jnp.bool_:
        by_head = d_scores.reshape(n, heads, s, -1)
        d_mask = jnp.sum(by_head, [a for a in (0, 1) if mask.shape[a] != by_head.shape[a]], keepdims=True)
    d_scores = (d_scores / np.sqrt(d).astype(wide)).reshape(rows)
    dq = _dot("ngmt,ntgd->ngmd", d_scores, keys.k.astype(wide)).reshape(n, heads, s, d)
    return jnp.moveaxis(dq, 1, 2), _dot("ngmt,ngmd->ntgd", d_scores, _rows(q.astype(wide), groups)), dv, d_mask


def _dot(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)


def rotated(x: Array, first: int | Array, base: float) -> Array:
    """Rotate the pairs (x_i, x_{i + d/2}) of each head by place * base^(-2i/d), for positions from `first` on."""
    d, wide = x.shape[-1], accumulation_dtype(np.dtype(x.dtype))
    speeds = base ** (-np.arange(0, d, 2) / d)
    angles = ((first + jnp.arange(x.shape[1]))[:, None] * speeds[None, :].astype(wide))[None, :, None, :]
    low, high = jnp.split(x.astype(wide), 2, axis=-1)
    # Otherwise XLA would recompute them for each sample and head.
    cos, sin = materialize(jnp.stack([jnp.cos(angles), jnp.sin(angles)]).astype(wide))
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
