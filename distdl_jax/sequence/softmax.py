"""Attention of one worker's queries to a block of keys, piece by piece: a running maximum and sum; the way back.

Neither way are there more scores at a time than those of the queries and `PIECE` keys, so memory is linear in the
block. Source: Milakov and Gimelshein (2018), arXiv:1805.02867 (running sums); Dao et al. (2022), arXiv:2205.14135.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.primitives.team_operations import accumulation_dtype

PIECE = 512
"""How many keys are looked at together."""


class Places(NamedTuple):
    """Where queries and keys are in the sequence: numbers, or scalars that JAX traces.

    - `queries`, `keys`: those of the first ones. - `causal`: whether queries see no keys that come after them.
    """

    queries: int | Array
    keys: int | Array
    causal: bool


class Running(NamedTuple):
    """What is known after some keys: per query and head the largest score, and sums relative to it.

    - `top`, `total`: n x heads x queries; -inf and 0 where a query has seen none.
    - `values`: n x heads x queries x features, not yet divided by `total`.
    """

    top: Array
    total: Array
    values: Array


def start(q: Array) -> Running:
    """Before the first key, of queries n x s x heads x d."""
    n, s, heads, d = q.shape
    wide = accumulation_dtype(np.dtype(q.dtype))
    return Running(
        jnp.full((n, heads, s), -jnp.inf, wide), jnp.zeros((n, heads, s), wide), jnp.zeros((n, heads, s, d), wide)
    )


def added(running: Running, q: Array, k: Array, v: Array, padding: Array | None, places: Places) -> Running:
    """What is known after one block of keys and values more, n x t x (key heads) x d.

    Each key head serves the heads of one group of neighbours. `padding`, n x t: which keys are seen by nobody.
    """
    whole, t = _pieces(k)

    def step(running: Running, i: Array) -> tuple[Running, None]:
        return _added(running, q, *_cut(i * PIECE, PIECE, k, v, padding), _from(places, i * PIECE)), None

    if whole:
        running, _ = lax.scan(step, running, jnp.arange(whole))
    if whole * PIECE == t:
        return running
    rest = _cut(whole * PIECE, t - whole * PIECE, k, v, padding)
    return _added(running, q, *rest, _from(places, whole * PIECE))


def finished(running: Running, dtype: np.dtype) -> tuple[Array, Array]:
    """The output, n x queries x heads x features, and the logarithms of the sums of exponentials, n x heads x queries.

    A query that has seen no key has 0 as both.
    """
    nothing = running.total == 0
    total = jnp.where(nothing, 1, running.total)
    y = jnp.moveaxis(running.values / total[..., None], 1, 2).astype(dtype)
    return y, jnp.where(nothing, 0, running.top) + jnp.log(total)


def gradients(
    q: Array, k: Array, v: Array, padding: Array | None, places: Places, dy: Array, log_sum: Array, delta: Array
) -> tuple[Array, Array, Array]:
    """The gradients of queries, keys and values that one block of keys makes, in the dtype of sums.

    - `dy`: of the output. - `log_sum`: from `finished`.
    - `delta`, like it: the sum over a head's features of dy * y, less the gradient of `log_sum`.
    """
    whole, t = _pieces(k)

    def step(dq: Array, i: Array) -> tuple[Array, tuple[Array, Array]]:
        more, dk, dv = of_piece(i * PIECE, PIECE)
        return dq + more, (dk, dv)

    def of_piece(first: int | Array, n: int) -> tuple[Array, Array, Array]:
        return _gradients(q, *_cut(first, n, k, v, padding), _from(places, first), dy, log_sum, delta)

    if not whole:
        return of_piece(0, t)
    dq, (dk, dv) = lax.scan(step, jnp.zeros(q.shape, log_sum.dtype), jnp.arange(whole))
    dk, dv = (jnp.moveaxis(each, 0, 1).reshape(each.shape[1], whole * PIECE, *each.shape[3:]) for each in (dk, dv))
    if whole * PIECE == t:
        return dq, dk, dv
    more, *last = of_piece(whole * PIECE, t - whole * PIECE)
    return dq + more, jnp.concatenate([dk, last[0]], 1), jnp.concatenate([dv, last[1]], 1)


def _pieces(k: Array) -> tuple[int, int]:
    """How many whole pieces there are, where there is more than one, and how many keys."""
    t = k.shape[1]
    return (t // PIECE if t > PIECE else 0), t


def _cut(first: int | Array, n: int, k: Array, v: Array, padding: Array | None) -> tuple[Array, Array, Array | None]:
    k, v = (lax.dynamic_slice_in_dim(x, first, n, 1) for x in (k, v))
    return k, v, None if padding is None else lax.dynamic_slice_in_dim(padding, first, n, 1)


def _from(places: Places, first: int | Array) -> Places:
    return places._replace(keys=places.keys + first)


def _scores(q: Array, k: Array, padding: Array | None, places: Places) -> Array:
    """n x key heads x heads of each x queries x keys; -inf where a query doesn't see a key."""
    (n, s, heads, d), (_, t, groups, _) = q.shape, k.shape
    wide = accumulation_dtype(np.dtype(q.dtype))
    grouped = q.astype(wide).reshape(n, s, groups, heads // groups, d)
    scores = _dot("nsgrd,ntgd->ngrst", grouped, k.astype(wide)) / np.sqrt(d).astype(wide)
    hidden = None if padding is None else padding[:, None, None, None, :]
    if places.causal:
        ahead = places.keys + jnp.arange(t)[None, :] > places.queries + jnp.arange(s)[:, None]
        hidden = ahead if hidden is None else hidden | ahead
    return scores if hidden is None else jnp.where(hidden, -jnp.inf, scores)


def _added(running: Running, q: Array, k: Array, v: Array, padding: Array | None, places: Places) -> Running:
    (n, s, heads, d), wide = q.shape, running.top.dtype
    scores = _scores(q, k, padding, places)
    top = jnp.maximum(running.top, jnp.max(scores, axis=-1).reshape(n, heads, s))
    base = jnp.where(jnp.isneginf(top), 0, top)
    weights = jnp.exp(scores - base.reshape(scores.shape[:-1])[..., None])
    shrunk = jnp.exp(running.top - base)
    values = _dot("ngrst,ntgd->ngrsd", weights, v.astype(wide)).reshape(n, heads, s, d)
    total = jnp.sum(weights, axis=-1).reshape(n, heads, s)
    return Running(top, running.total * shrunk + total, running.values * shrunk[..., None] + values)


def _gradients(
    q: Array, k: Array, v: Array, padding: Array | None, places: Places, dy: Array, log_sum: Array, delta: Array
) -> tuple[Array, Array, Array]:
    (n, s, heads, d), groups, wide = q.shape, k.shape[2], log_sum.dtype
    scores = _scores(q, k, padding, places)
    by_group = (*scores.shape[:-1], 1)
    weights = jnp.exp(scores - log_sum.reshape(by_group))
    dy = dy.astype(wide).reshape(n, s, groups, heads // groups, d)
    dv = _dot("ngrst,nsgrd->ntgd", weights, dy)
    of_weights = _dot("nsgrd,ntgd->ngrst", dy, v.astype(wide))
    of_scores = weights * (of_weights - delta.reshape(by_group)) / np.sqrt(d).astype(wide)
    dq = _dot("ngrst,ntgd->nsgrd", of_scores, k.astype(wide)).reshape(q.shape)
    return dq, _dot("ngrst,nsgrd->ntgd", of_scores, q.astype(wide).reshape(dy.shape)), dv


def _dot(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)


def rotated(x: Array, first: int | Array, base: float) -> Array:
    """Rotary positions: the pairs (x_i, x_{i + d/2}) of each head, turned by place * base^(-2i/d).

    Places are those from `first` on.
    """
    d, wide = x.shape[-1], accumulation_dtype(np.dtype(x.dtype))
    speeds = base ** (-np.arange(0, d, 2) / d)
    angles = ((first + jnp.arange(x.shape[1]))[:, None] * speeds[None, :].astype(wide))[None, :, None, :]
    low, high = jnp.split(x.astype(wide), 2, axis=-1)
    cos, sin = jnp.cos(angles).astype(wide), jnp.sin(angles).astype(wide)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
