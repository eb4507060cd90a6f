"""Attention in all its kinds, and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from distdl_jax import nn

from layer_cases import Case, Tensor, on

BATCH, LENGTH, FEATURES, HEADS = 2, 512, 256, 8
KEY, DROPPED = 7, 0.1


def rotated(x: Any, base: float) -> Any:
    low, high = jnp.split(x, 2, -1)
    angles = np.arange(x.shape[1])[:, None, None] * base ** (-2 * np.arange(low.shape[-1]) / x.shape[-1])
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def attention(told: str = "", **options: Any) -> Callable[..., Any]:
    """In plain JAX; `told` is what comes behind x: "memory", "mask" or "padding"."""

    def plain(p: Any, x: Any, more: Any = None) -> Any:
        def projected(name: str, of: Any) -> Any:
            return jnp.einsum("nse,hde->nshd", of, p[name]) + p[f"{name}_bias"]

        memory = more if told == "memory" else x
        if options.get("fused"):
            y = jnp.einsum("nse,gkde->nsgkd", x, p["qkv"]) + p["qkv_bias"]
            q, k, v = y[:, :, :, :-2].reshape(*x.shape[:2], HEADS, -1), y[:, :, :, -2], y[:, :, :, -1]
        else:
            q, k, v = (projected(*both) for both in (("query", x), ("key", memory), ("value", memory)))
        if options.get("rotary"):
            q, k = rotated(q, options["rotary"]), rotated(k, options["rotary"])
        k, v = (each.repeat(HEADS // each.shape[2], 2) for each in (k, v))
        scores = jnp.einsum("nshd,nthd->nhst", q, k) / np.sqrt(FEATURES / HEADS).astype(np.float32)
        if options.get("causal"):
            scores = jnp.where(np.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
        if told in ("mask", "padding"):
            hidden = more if told == "mask" else more[:, None, None]
            scores = jnp.where(hidden, -jnp.inf, scores)
        weights = jax.nn.softmax(scores)
        if options.get("dropout"):
            kept = jax.random.bernoulli(jax.random.key(KEY), 1 - DROPPED, weights.shape)
            weights = jnp.where(kept, weights / (1 - DROPPED), 0)
        return jnp.einsum("nhst,nthd,ehd->nse", weights, v, p["out"]) + p["out_bias"]

    return plain


def told(name: str) -> Callable[..., Any]:
    """Calls the layer with an argument of that name."""
    return lambda layer, params, x, more: layer(params, x, **{name: more})


def continued(layer: Any, params: Any, x: Any) -> Any:
    """Continue by one element, behind all places of a cache but one."""
    cache = layer.init_cache(BATCH, LENGTH)
    return layer(params, x, cache={**cache, "length": cache["length"] + LENGTH - 1})[0]


def continued_alone(p: Any, x: Any) -> Any:
    """Continue in plain JAX, with a cache of as many places, of zeros."""
    q, k, v = (jnp.einsum("nse,hde->nshd", x, p[name]) + p[f"{name}_bias"] for name in ("query", "key", "value"))
    k, v = (jnp.zeros((len(x), LENGTH, *each.shape[2:])).at[:, LENGTH - 1 :].set(each) for each in (k, v))
    scores = jnp.einsum("nshd,nthd->nhst", q, k) / np.sqrt(FEATURES / HEADS).astype(np.float32)
    return jnp.einsum("nhst,nthd,ehd->nse", jax.nn.softmax(scores), v, p["out"]) + p["out_bias"]


def lstm_steps(p: Any, x: Any, h: Any, c: Any, end: str = "") -> Any:
    """Compute all steps of an LSTM in plain JAX, of samples x steps x features."""
    (_, n_h, n_in), bias = p[f"weight_ih{end}"].shape, (p[f"bias_ih{end}"] + p[f"bias_hh{end}"]).reshape(-1)
    w_x, w_h = p[f"weight_ih{end}"].reshape(-1, n_in), p[f"weight_hh{end}"].reshape(-1, n_h)

    def step(both: Any, of_x: Any) -> Any:
        h, c = both
        i, f, g, o = jnp.split(of_x + h @ w_h.T, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    _, ys = jax.lax.scan(step, (h, c), jnp.moveaxis(x @ w_x.T + bias, 1, 0))
    return jnp.moveaxis(ys, 0, 1)


def gru_steps(p: Any, x: Any, end: str = "") -> Any:
    """Compute all steps of a GRU in plain JAX, from zeros."""
    of_x = jnp.einsum("nsi,ghi->sngh", x, p[f"weight_ih{end}"]) + p[f"bias_ih{end}"]

    def step(h: Any, of_x: Any) -> Any:
        of_h = jnp.einsum("ni,ghi->ngh", h, p[f"weight_hh{end}"]) + p[f"bias_hh{end}"]
        r, z = jnp.moveaxis(jax.nn.sigmoid(of_x + of_h)[:, :2], 1, 0)
        h = (1 - z) * jnp.tanh(of_x[:, 2] + r * of_h[:, 2]) + z * h
        return h, h

    return jnp.moveaxis(jax.lax.scan(step, jnp.zeros((len(x), of_x.shape[-1])), of_x)[1], 0, 1)


def recurrent(n: int) -> Iterator[Case]:
    """Yield cases of recurrent layers on n workers: a step of a cell, and all steps of a layer."""
    step, steps, size = (256, 512), (64, 32, 512), {"input_size": 512, "hidden_size": 512}
    zeros = np.zeros(step, np.float32)
    for what, grid in (("features", (1, n)), ("batch", (n, 1))):
        over = (grid[0], 1, grid[1])
        yield Case(f"DistributedGRUCell, {what} split", [Tensor(step, grid)],
                   lambda grid=grid: nn.DistributedGRUCell(on(*grid), **size),
                   lambda p, x: gru_steps(p, x[:, None])[:, 0])  # fmt: skip
        yield Case(f"DistributedLSTMCell, {what} split", [Tensor(step, grid)],
                   lambda grid=grid: nn.DistributedLSTMCell(on(*grid), **size),
                   lambda p, x: lstm_steps(p, x[:, None], zeros, zeros)[:, 0])  # fmt: skip
        yield Case(f"DistributedGRU, {what} split", [Tensor(steps, over)],
                   lambda over=over: nn.DistributedGRU(on(*over), **size),
                   lambda p, x: gru_steps(p, x, "_l0"))  # fmt: skip
        yield Case(f"DistributedLSTM, {what} split", [Tensor(steps, over)],
                   lambda over=over: nn.DistributedLSTM(on(*over), **size),
                   lambda p, x: lstm_steps(p, x, zeros[:64], zeros[:64], "_l0"))  # fmt: skip


def cases(n: int) -> Iterator[Case]:
    """Yield cases on n workers."""
    shape, heads, sequence = (BATCH, LENGTH, FEATURES), (1, 1, n), (1, n, 1)
    name = "DistributedMultiHeadAttention"

    def made(grid: tuple[int, ...], **options: Any) -> Callable[[], Any]:
        return lambda: nn.DistributedMultiHeadAttention(on(*grid), FEATURES, HEADS, **options)

    for what, grid, options in (
        ("heads split", heads, {}),
        ("heads split, causal, rotary, keys grouped, fused", heads,
         {"causal": True, "rotary": 1e4, "num_key_heads": 4, "fused": True}),
        ("ring", sequence, {}),
        ("ring, causal, rotary", sequence, {"causal": True, "rotary": 1e4}),
        ("sequence for heads (Ulysses)", sequence, {"exchange": "heads"}),
        ("sequence for heads, causal, keys grouped", sequence,
         {"exchange": "heads", "causal": True, "num_key_heads": 4}),
        ("sequence gathered", sequence, {"exchange": "gather"}),
    ):  # fmt: skip
        yield Case(f"{name}, {what}", [Tensor(shape, grid)], made(grid, **options), attention(**options))

    memory, mask = Tensor((BATCH, LENGTH // 2, FEATURES), heads), Tensor((LENGTH, LENGTH), kind="bool")
    padding = Tensor((BATCH, LENGTH), kind="bool")
    x, cut = Tensor(shape, heads), Tensor(shape, sequence)
    for what, first, grid, more, its in (
        ("heads split, to a memory", x, heads, memory, "memory"),
        ("heads split, masked", x, heads, mask, "mask"),
        ("heads split, padded", x, heads, padding, "padding"),
        ("ring, to a memory", cut, sequence, Tensor(memory.shape, sequence), "memory"),
        ("ring, masked", cut, sequence, Tensor(mask.shape, (n, 1), "bool"), "mask"),
        ("ring, padded", cut, sequence, Tensor(padding.shape, (1, n), "bool"), "padding"),
    ):
        argument = {"memory": "memory", "mask": "attn_mask", "padding": "key_padding_mask"}[its]
        yield Case(f"{name}, {what}", [first, more], made(grid), attention(its), told(argument))

    for what, given, grid in (("heads split", x, heads), ("ring", cut, sequence)):
        yield Case(f"{name}, {what}, with dropout", [given], made(grid, dropout=DROPPED), attention(dropout=True),
                   lambda layer, params, x: layer(params, x, key=jax.random.key(KEY)))  # fmt: skip
    yield from recurrent(n)
    yield Case(f"{name}, heads split, one element behind a cache", [Tensor((BATCH, 1, FEATURES), heads)],
               made(heads, causal=True), continued_alone, continued, backward=False)  # fmt: skip
