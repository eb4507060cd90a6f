"""Attention of one worker's queries to keys that come block by block, with a running maximum and sum."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.plans.decomposition import Range
from distdl_jax.primitives.team_operations import accumulation_dtype


class Running(NamedTuple):
    """What is known after some blocks of keys: per query and head the largest score, and sums relative to it.

    - `top`, `total`: n x heads x queries. - `values`: n x heads x queries x features, not yet divided by `total`.
    """

    top: Array
    total: Array
    values: Array


def start(q: Array) -> Running:
    """Before the first block, of queries n x s x heads x d."""
    n, s, heads, d = q.shape
    wide = accumulation_dtype(np.dtype(q.dtype))
    return Running(
        jnp.full((n, heads, s), -jnp.inf, wide), jnp.zeros((n, heads, s), wide), jnp.zeros((n, heads, s, d), wide)
    )


def of_block(top: Array, q: Array, k: Array, v: Array, queries: Range, keys: Range, causal: bool) -> Running:
    """What a block of keys and values adds, n x t x (key heads) x d, whose places in the sequence are `keys`.

    `top` are the largest scores so far; those of the result count the block too, and its sums are relative to them.
    Each key head serves the heads of one group of neighbours. Some key of the first block has to be seen by each query.
    """
    (n, s, heads, d), (_, t, groups, _) = q.shape, k.shape
    wide = top.dtype
    grouped = q.astype(wide).reshape(n, s, groups, heads // groups, d)
    scores = jnp.einsum("nsgrd,ntgd->ngrst", grouped, k.astype(wide), precision=lax.Precision.HIGHEST)
    scores = scores.reshape(n, heads, s, t) / np.sqrt(d).astype(wide)
    if causal and keys[1] > queries[0] + 1:
        seen = np.arange(*keys)[None, :] <= np.arange(*queries)[:, None]
        scores = jnp.where(seen, scores, -jnp.inf)
    top = lax.stop_gradient(jnp.maximum(top, jnp.max(scores, axis=-1)))
    weights = jnp.exp(scores - top[..., None])
    by_group = weights.reshape(n, groups, heads // groups, s, t)
    values = jnp.einsum("ngrst,ntgd->ngrsd", by_group, v.astype(wide), precision=lax.Precision.HIGHEST)
    return Running(top, jnp.sum(weights, axis=-1), values.reshape(n, heads, s, d))


def added(running: Running, block: Running) -> Running:
    """All blocks so far and one more. It is linear in the sums, so the way back needs none of them."""
    shrunk = lax.stop_gradient(jnp.exp(running.top - block.top))
    return Running(block.top, running.total * shrunk + block.total, running.values * shrunk[..., None] + block.values)


def finished(running: Running, dtype: np.dtype) -> Array:
    """The output, n x queries x heads x features."""
    return jnp.moveaxis(running.values / running.total[..., None], 1, 2).astype(dtype)


def rotated(x: Array, first: int, base: float) -> Array:
    """Rotary positions: the pairs (x_i, x_{i + d/2}) of each head, turned by place * base^(-2i/d).

    Places are those from `first` on.
    """
    d, wide = x.shape[-1], accumulation_dtype(np.dtype(x.dtype))
    speeds = base ** (-np.arange(0, d, 2) / d)
    angles = ((first + np.arange(x.shape[1]))[:, None] * speeds[None, :])[None, :, None, :]
    low, high = jnp.split(x.astype(wide), 2, axis=-1)
    cos, sin = np.cos(angles).astype(wide), np.sin(angles).astype(wide)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
