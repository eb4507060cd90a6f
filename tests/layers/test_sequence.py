"""Embedding and attention beside the sequential ones, however batch, sequence, heads and vocabulary are split."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from imaginary import refusal
from launcher.examples import LONG
from matrix.partitions import On, on
from sequential import Beside, block_of, check_beside, close

import distdl_jax as dj
from distdl_jax import nn


def embedding(sizes: tuple[int, ...], P_x: On, P_y: On, P_W: On, rows: int, features: int, **options: Any) -> Beside:
    def layer(P: dj.Partition) -> Any:
        grids = (each.partition(P) for each in (P_x, P_y, P_W))
        return nn.DistributedEmbedding(*grids, rows, features, **options)

    def whole(params: Any, x: Any) -> Any:
        weight = params["weight"]
        if options:
            fixed = (np.arange(rows) == options["padding_idx"])[:, None]
            weight = jnp.where(fixed, jax.lax.stop_gradient(weight), weight)
        return weight[x]

    name = f"embedding {sizes} {P_x} {P_y} {P_W} {rows} {options}"
    return Beside(name, sizes, layer, whole, P_x, P_y, integers=rows)


def turned(x: Any, base: float) -> Any:
    """Rotary positions, with complex numbers."""
    half = x.shape[-1] // 2
    speeds = base ** (-2 * np.arange(half) / x.shape[-1])
    turns = np.exp(1j * np.arange(x.shape[1])[:, None, None] * speeds)
    y = (x[..., :half] + 1j * x[..., half:]) * turns
    return jnp.concatenate([y.real, y.imag], -1)


def attention(sizes: tuple[int, int, int], P_x: On, heads: int, **options: Any) -> Beside:
    d = sizes[2] // heads

    def whole(params: Any, x: Any) -> Any:
        def projected(name: str) -> Any:
            y = jnp.einsum("nse,hde->nshd", x, params[name])
            return y + params[f"{name}_bias"] if options.get("bias", True) else y

        q, k, v = (projected(name) for name in ("query", "key", "value"))
        if options.get("rotary"):
            q, k = (turned(each, options["rotary"]) for each in (q, k))
        k, v = (each.repeat(heads // each.shape[2], 2) for each in (k, v))
        scores = jnp.einsum("nshd,nthd->nhst", q, k) / np.sqrt(d)
        if options.get("causal"):
            scores = jnp.where(np.tri(sizes[1], dtype=bool), scores, -jnp.inf)
        y = jnp.einsum("nhst,nthd,ehd->nse", jax.nn.softmax(scores), v, params["out"])
        return y + params["out_bias"] if options.get("bias", True) else y

    def layer(P: dj.Partition) -> Any:
        return nn.DistributedMultiHeadAttention(P_x.partition(P), sizes[2], heads, **options)

    return Beside(f"attention {sizes} {P_x} {heads} {options}", sizes, layer, whole, P_x)


CASES = (
    embedding((3, 4), on(1, 1, ranks=(2,)), on(1, 1, 2, ranks=(3, 1)), on(2, 2, ranks=(1, 3, 0, 2)), 5, 3),
    attention((2, 3, 8), on(1, 2, 2, ranks=(3, 1, 2, 0)), 4, num_key_heads=2, causal=True, rotary=100.0, bias=False),
    attention((2, 3, 6), on(1, 3, 1, ranks=(2, 0, 3)), 3, exchange="heads"),
)
MORE = (
    embedding((4,), on(2, ranks=(0, 3)), on(2, 1), on(2, 2, 1), 3, 2, padding_idx=1),
    attention((2, 3, 6), on(1, 1, 2, ranks=(3, 1)), 3, causal=True),
    attention((2, 5, 4), on(1, 4, 1, ranks=(3, 1, 2, 0)), 2, causal=True, rotary=100.0),
    attention((2, 3, 8), on(1, 2, 2), 4, num_key_heads=2, bias=False),
    attention((2, 5, 6), on(1, 2, 2, ranks=(3, 1, 2, 0)), 3, exchange="heads", causal=True),
    embedding((3, 2), on(1, 1), on(1, 1, 1), on(4, 1), 3, 2),
    embedding((2, 2), on(2, 1), on(2, 1, 2), on(2, 1, 2), 4, 3),
    attention((4, 3, 4), on(2, 2, 1), 2, causal=True),
    attention((2, 2, 4), on(1, 4, 1), 2),
    attention((2, 6, 8), on(1, 4, 1), 4, exchange="heads", rotary=10.0),
    attention((2, 4, 4), on(1, 1, 4), 2),
)


@pytest.mark.simulated(4)
def test_beside_the_sequential_ones() -> None:
    """Output and gradients: heads that do not divide, sequences with empty blocks, grouped keys, on any teams."""
    check_beside(CASES if LONG == 1 else CASES + MORE)


@pytest.mark.world(4)
def test_over_mpi() -> None:
    check_beside(CASES[:1] if LONG == 1 else CASES + MORE)


@pytest.mark.simulated(4)
def test_an_output_layer_that_is_tied_to_the_embedding() -> None:
    """One table for both: its gradient is the sum of both uses."""
    P = dj.Partition()
    P_x, P_h, P_W = on(1, 1), on(1, 1, 2, ranks=(0, 1)), on(2, 2)
    P_logits = on(1, 1, 2, ranks=(0, 2))
    embed = nn.DistributedEmbedding(*(each.partition(P) for each in (P_x, P_h, P_W)), 7, 4)
    output = nn.DistributedLinear(*(each.partition(P) for each in (P_h, P_logits, P_W)), 4, 7, bias=False)
    assert embed.param_specs() == output.param_specs()
    table = np.random.default_rng(0).standard_normal((7, 4))
    x = np.array([[1, 6, 3]])
    own = {"weight": block_of(table, embed.param_specs()["weight"])}
    mine = x if P.rank == 0 else np.zeros((1, 0), int)
    gradient = dj.jit(dj.grad(lambda p: jnp.sum(jnp.sin(output(p, jnp.tanh(embed(p, mine)))))))(own)
    want = np.asarray(jax.grad(lambda w: jnp.sum(jnp.sin(jnp.tanh(w[x]) @ w.T)))(table))
    close(gradient["weight"], block_of(want, embed.param_specs()["weight"]), 1e-12, "the table's gradient")


@pytest.mark.simulated(4)
def test_a_ring_keeps_no_scores() -> None:
    """For the way back, with each worker more: a block of keys and values, and three numbers for a head and query."""
    P = dj.Partition()
    x, kept = jnp.ones((1, 16, 8)), []
    for workers in (2, 4):
        layer = nn.DistributedMultiHeadAttention(on(1, workers, 1).partition(P), 8, 2, bias=False)
        params = layer.init(jax.random.key(0), float)
        forward = jax.make_jaxpr(lambda x, layer=layer, params=params: jax.vjp(partial(layer, params), x)[1])(x)
        kept.append(sum(int(np.prod(out.aval.shape)) for out in set(forward.jaxpr.outvars)))
    block, scores = 16 * 16, 2 * 16 * 16
    assert P.rank > 1 or kept[1] - kept[0] <= 2 * (block + 3 * 2 * 16) < 2 * scores, kept


def test_refusals() -> None:
    """When a layer is made, in one sentence on every worker."""
    make = nn.DistributedMultiHeadAttention
    for sentence, work in {
        "`embed_dim` (=5) must be divisible by `num_heads` (=2).": lambda P: make(on(1, 2, 2).partition(P), 5, 2),
        "`num_heads` (=4) must be divisible by `num_key_heads` (=3).": lambda P: make(
            on(1, 2, 2).partition(P), 8, 4, num_key_heads=3
        ),
        "must be divisible by the 4 workers along the heads where they differ": lambda P: make(
            on(1, 1, 4).partition(P), 8, 4, num_key_heads=2
        ),
        "`P_x` (2 x 2) must have 3 dimensions: batch, sequence": lambda P: make(on(2, 2).partition(P), 8, 4),
        "`rotary` (=1) must be a base above 1": lambda P: make(on(1, 2, 2).partition(P), 8, 4, rotary=1),
        "`exchange` (='all') must be 'ring' or 'heads'.": lambda P: make(
            on(1, 2, 2).partition(P), 8, 4, exchange="all"
        ),
        "takes as many key heads as heads": lambda P: make(
            on(1, 4, 1).partition(P), 8, 4, num_key_heads=2, exchange="heads"
        ),
        "`padding_idx` (=7) must be an index, 0 to 6.": lambda P: nn.DistributedEmbedding(
            on(1, 1).partition(P), on(1, 1, 2).partition(P), on(2, 2).partition(P), 7, 3, padding_idx=7
        ),
        "`P_y` (1 x 2) must have shape 1 x 1 x 2, where": lambda P: nn.DistributedEmbedding(
            on(1, 1).partition(P), on(1, 2).partition(P), on(2, 2).partition(P), 7, 3
        ),
        "must have two dimensions, P_v x P_e": lambda P: nn.DistributedEmbedding(
            on(1, 1).partition(P), on(1, 2).partition(P), P, 7, 3
        ),
    }.items():
        assert sentence in refusal(4, work, dj.InvalidArgumentError), sentence


@pytest.mark.simulated(2)
def test_refusals_when_it_is_called() -> None:
    P = dj.Partition()
    grid = P.create_cartesian_topology_partition([1, 2, 1])
    layer = nn.DistributedMultiHeadAttention(grid, 4, 2)
    params = layer.init(jax.random.key(0), float)
    with pytest.raises(dj.PlanError, match=r"`x` must have length 3 in dimension 1, balanced over 2.*\[1, 2\]"):
        layer(params, jnp.ones((1, 1 + P.rank, 4)))
    line = P.create_cartesian_topology_partition([1, 2])
    first = P.create_partition_inclusive([0]).create_cartesian_topology_partition([1])
    embed = nn.DistributedEmbedding(first, line, line, 3, 2)
    with pytest.raises(dj.PlanError, match="`x` must hold integers, indices of rows, but is float64"):
        embed(embed.init(jax.random.key(0), float), jnp.ones(2))
