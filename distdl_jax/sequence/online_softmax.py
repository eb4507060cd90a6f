"""Attention of one worker's queries to a block of keys, piece by piece: running maximum and sums, and gradients.

There are never more scores at a time than for the queries and `PIECE` keys, so memory is linear in the block. Source:
Milakov and Gimelshein (2018), arXiv:1805.02867 (running sums); Dao et al. (2022), arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.primitives.collectives import accumulation_dtype
from distdl_jax.tracing.materialize import materialize

PIECE = 512
"""The number of keys that are looked at together."""


class Places(NamedTuple):
    """The places of queries and keys in the sequence: numbers, or scalars that JAX traces.

    - `queries`, `keys`: the places of the first ones. - `causal`: whether queries see no keys that come after them.
    """

    queries: int | Array
    keys: int | Array
    causal: bool


class Hidden(NamedTuple):
    """Masks of one block of keys; None where there is none.

    - `padding`: n x t, of bool: True for keys that no query sees.
    - `mask`: (n or 1) x (heads or 1) x queries x t: of bool, True where a query doesn't see a key; or added to scores.
    """

    padding: Array | None = None
    mask: Array | None = None


Factors = Callable[[int, int], Array]
"""From the first of some keys and their number, the factors of their weights: n x heads x queries x keys."""


class Running(NamedTuple):
    """The state after some keys: per query and head the largest score, and sums relative to it.

    - `top`, `total`: n x heads x queries; -inf and 0 where a query has seen none.
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


def added(
    running: Running,
    q: Array,
    k: Array,
    v: Array,
    hidden: Hidden,
    places: Places,
    factors: Factors | None = None,
) -> Running:
    """Return the state after one block of keys and values more, n x t x (key heads) x d.

    Each key head serves the heads of one group of neighbours. `factors` counts keys within the block.
    """
    whole, t = _pieces(k)

    def of_piece(running: Running, first: int | Array, n: int) -> Running:
        piece_factors = None if factors is None else factors(int(first), n)  # there, pieces are not in a loop
        return _added(running, q, *_cut(first, n, k, v, hidden), _from(places, first), piece_factors)

    if factors is not None:
        for i in range(whole):
            running = of_piece(running, i * PIECE, PIECE)
    elif whole:
        running, _ = lax.scan(lambda r, i: (of_piece(r, i * PIECE, PIECE), None), running, jnp.arange(whole))
    return running if whole * PIECE == t else of_piece(running, whole * PIECE, t - whole * PIECE)


def merged(one: Running, other: Running) -> Running:
    """Return the state after the keys of both."""
    top = jnp.maximum(one.top, other.top)
    base = jnp.where(jnp.isneginf(top), 0, top)
    of_one, of_other = jnp.exp(one.top - base), jnp.exp(other.top - base)
    values = one.values * of_one[..., None] + other.values * of_other[..., None]
    return Running(top, one.total * of_one + other.total * of_other, values)


def finished(running: Running, dtype: np.dtype) -> tuple[Array, Array]:
    """Return the output, n x queries x heads x features, and the logarithms of the sums, n x heads x queries.

    A query that has seen no key has 0 as both.
    """
    nothing = running.total == 0
    total = jnp.where(nothing, 1, running.total)
    y = jnp.moveaxis(running.values / total[..., None], 1, 2).astype(dtype)
    return y, jnp.where(nothing, 0, running.top) + jnp.log(total)


def gradients(
    q: Array,
    k: Array,
    v: Array,
    hidden: Hidden,
    places: Places,
    dy: Array,
    log_sum: Array,
    delta: Array,
    factors: Factors | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """Return the gradients of queries, keys, values and an added mask from one block of keys, in the dtype of sums.

    - `dy`: of the output. - `log_sum`: from `finished`.
    - `delta`, like it: the sum over a head's features of dy * y, less the gradient of `log_sum`.
    """
    whole, t = _pieces(k)

    def of_piece(first: int | Array, n: int) -> tuple[Array, Array, Array, Array | None]:
        piece_factors = None if factors is None else factors(int(first), n)
        return _gradients(q, *_cut(first, n, k, v, hidden), _from(places, first), dy, log_sum, delta, piece_factors)

    def step(dq: Array, i: Array) -> tuple[Array, tuple[Array, Array, Array | None]]:
        more, *rest = of_piece(i * PIECE, PIECE)
        return dq + more, tuple(rest)  # type: ignore[return-value]

    if not whole:
        return of_piece(0, t)
    dq, parts = jnp.zeros(q.shape, log_sum.dtype), []
    if factors is None:
        dq, stacked = lax.scan(step, dq, jnp.arange(whole))
        parts.append(tuple(x if x is None else _side_by_side(x, a) for x, a in zip(stacked, (1, 1, 3), strict=True)))
    else:
        for i in range(whole):
            more, *rest = of_piece(i * PIECE, PIECE)
            dq, parts = dq + more, [*parts, tuple(rest)]
    if whole * PIECE < t:
        more, *rest = of_piece(whole * PIECE, t - whole * PIECE)
        dq, parts = dq + more, [*parts, tuple(rest)]
    dk, dv, of_mask = zip(*parts, strict=True)
    joined = None if of_mask[0] is None else jnp.concatenate(of_mask, 3)
    return dq, jnp.concatenate(dk, 1), jnp.concatenate(dv, 1), joined


def _side_by_side(stacked: Array, axis: int) -> Array:
    """Join pieces, which are in front of the other dimensions, along `axis` of these."""
    moved = jnp.moveaxis(stacked, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])


def _pieces(k: Array) -> tuple[int, int]:
    """Return the number of whole pieces, where there is more than one, and the number of keys."""
    t = k.shape[1]
    return (t // PIECE if t > PIECE else 0), t


def _cut(first: int | Array, n: int, k: Array, v: Array, hidden: Hidden) -> tuple[Array, Array, Hidden]:
    padding, mask = hidden
    k, v = (lax.dynamic_slice_in_dim(x, first, n, 1) for x in (k, v))
    padding = None if padding is None else lax.dynamic_slice_in_dim(padding, first, n, 1)
    return k, v, Hidden(padding, None if mask is None else lax.dynamic_slice_in_dim(mask, first, n, 3))


def _from(places: Places, first: int | Array) -> Places:
    return places._replace(keys=places.keys + first)


def _scores(q: Array, k: Array, hidden: Hidden, places: Places) -> tuple[Array, Array | None]:
    """Return scores, n x key heads x heads of each x queries x keys, and where a query doesn't see a key: -inf."""
    (n, s, heads, d), (_, t, groups, _) = q.shape, k.shape
    wide = accumulation_dtype(np.dtype(q.dtype))
    products = _dot("ngmd,ntgd->ngmt", _rows(q.astype(wide), groups), k.astype(wide))
    scores = products.reshape(n, groups, heads // groups, s, t) / np.sqrt(d).astype(wide)
    unseen = [] if hidden.padding is None else [hidden.padding[:, None, None, None, :]]
    if hidden.mask is not None:
        mask = _in_groups(hidden.mask, groups)
        if mask.dtype == jnp.bool_:
            unseen.append(mask)
        else:
            scores = scores + mask.astype(wide)
    if places.causal:
        unseen.append(places.keys + jnp.arange(t)[None, :] > places.queries + jnp.arange(s)[:, None])
    if not unseen:
        return scores, None
    somewhere = reduce(jnp.logical_or, unseen)
    return jnp.where(somewhere, -jnp.inf, scores), somewhere


def _rows(x: Array, groups: int) -> Array:
    """Bring n x s x heads x d to n x key heads x rows x d: head after head of each group, for batched products.

    With the heads of a group as a dimension of their own XLA takes three times as long.
    """
    n, s, heads, d = x.shape
    return jnp.moveaxis(x, 1, 2).reshape(n, groups, heads // groups * s, d)


def _in_groups(x: Array, groups: int) -> Array:
    """Bring n x heads (or 1) x queries x keys to n x key heads (or 1) x heads of each (or 1) x queries x keys."""
    n, heads, *rest = x.shape
    return x.reshape(n, 1, 1, *rest) if heads == 1 else x.reshape(n, groups, heads // groups, *rest)


def _added(
    running: Running, q: Array, k: Array, v: Array, hidden: Hidden, places: Places, factors: Array | None
) -> Running:
    (n, s, heads, d), wide = q.shape, running.top.dtype
    scores, _ = _scores(q, k, hidden, places)
    # The results do not depend on which number this is. Its derivative would compare the largest score with scores that
    # XLA works out again, rounded in another way, so that none of them might be it.
    top = lax.stop_gradient(jnp.maximum(running.top, jnp.max(scores, axis=-1).reshape(n, heads, s)))
    base = jnp.where(jnp.isneginf(top), 0, top)
    weights = jnp.exp(scores - base.reshape(scores.shape[:-1])[..., None])
    shrunk = jnp.exp(running.top - base)
    total = jnp.sum(weights, axis=-1).reshape(n, heads, s)
    if factors is not None:
        weights = weights * _in_groups(factors, k.shape[2])
    values = _dot("ngrst,ntgd->ngrsd", weights, v.astype(wide)).reshape(n, heads, s, d)
    return Running(top, running.total * shrunk + total, running.values * shrunk[..., None] + values)


def _gradients(
    q: Array,
    k: Array,
    v: Array,
    hidden: Hidden,
    places: Places,
    dy: Array,
    log_sum: Array,
    delta: Array,
    factors: Array | None,
) -> tuple[Array, Array, Array, Array | None]:
    (n, s, heads, d), groups, wide = q.shape, k.shape[2], log_sum.dtype
    scores, unseen = _scores(q, k, hidden, places)
    by_group = (*scores.shape[:-1], 1)
    weights = jnp.exp(scores - log_sum.reshape(by_group))
    of_rows = _rows(dy.astype(wide), groups)
    of_weights, used = _dot("ngmd,ntgd->ngmt", of_rows, v.astype(wide)).reshape(weights.shape), weights
    if factors is not None:
        factors = _in_groups(factors, groups)
        of_weights, used = of_weights * factors, weights * factors
    rows = (*of_rows.shape[:3], weights.shape[-1])
    dv = _dot("ngmt,ngmd->ntgd", used.reshape(rows), of_rows)
    of_scores = weights * (of_weights - delta.reshape(by_group))
    if unseen is not None:  # not even a query whose output is NaN makes anything of a key that it doesn't see
        of_scores = jnp.where(unseen, 0, of_scores)
    of_mask, mask = None, hidden.mask
    if mask is not None and mask.dtype != jnp.bool_:
        by_head = of_scores.reshape(n, heads, s, -1)
        of_mask = jnp.sum(by_head, [a for a in (0, 1) if mask.shape[a] != by_head.shape[a]], keepdims=True)
    of_scores = (of_scores / np.sqrt(d).astype(wide)).reshape(rows)
    dq = _dot("ngmt,ntgd->ngmd", of_scores, k.astype(wide)).reshape(n, heads, s, d)
    return jnp.moveaxis(dq, 1, 2), _dot("ngmt,ngmd->ntgd", of_scores, _rows(q.astype(wide), groups)), dv, of_mask


def _dot(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)


def rotated(x: Array, first: int | Array, base: float) -> Array:
    """Rotate the pairs (x_i, x_{i + d/2}) of each head by place * base^(-2i/d), for places from `first` on."""
    d, wide = x.shape[-1], accumulation_dtype(np.dtype(x.dtype))
    speeds = base ** (-np.arange(0, d, 2) / d)
    angles = ((first + jnp.arange(x.shape[1]))[:, None] * speeds[None, :].astype(wide))[None, :, None, :]
    low, high = jnp.split(x.astype(wide), 2, axis=-1)
    # XLA would compute them again for each sample and head.
    cos, sin = materialize(jnp.stack([jnp.cos(angles), jnp.sin(angles)]).astype(wide))
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
