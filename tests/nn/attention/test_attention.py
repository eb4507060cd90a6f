"""Attention to another sequence, with masks, and with weights that are dropped, beside plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from attention_programs import Drawn, check_attentions, drawn
from launcher.examples import LONG
from matrix.partitions import On, on
from sequential import close, cut

import distdl_jax as dj
from distdl_jax import nn

DROPPED: dict[str, Any] = {"dropout": 0.3}
GROUPS, HEADS = {**DROPPED, "num_key_heads": 2}, {**DROPPED, "exchange": "heads"}
TWO = [
    Drawn(on(1, 2, 1, ranks=(1, 0)), (2, 3), 8, 4, 5, (1, 1), padded=True, options=GROUPS),
    Drawn(on(1, 2, 1), (2, 3), 8, 4, None, "queries", padded=True, options=HEADS),
]
RANDOM = [range(first, first + 4) for first in range(0, 32, 4)] if LONG > 1 else [range(17, 18)]


@pytest.mark.simulated(2)
def test_beside_plain_jax() -> None:
    """Output and gradients, those of memory and mask too; the weights that are dropped are jax.random.bernoulli's."""
    check_attentions(TWO)


@pytest.mark.parametrize(
    "P_x, exchange",
    [
        (on(2, 2, 2, ranks=(3, 1, 2, 0, 7, 6, 5, 4)), "ring"),
        (on(2, 2, 2, ranks=(3, 1, 2, 0, 7, 6, 5, 4)), "heads"),
        (on(2, 3, 1), "gather"),
    ],
    ids=str,
)
def test_who_attends_with_what(P_x: On, exchange: str) -> None:
    """Each head's weight of each sample and query is on one worker, which has that sample; heads do not divide."""
    sizes, heads = (3, 5, 6), 3
    grid = P_x.partition(dj.planning_world(len(P_x.ranks)))
    layer = nn.DistributedMultiHeadAttention(grid, sizes[2], heads, exchange=exchange)
    blocks = {rank: cut(np.moveaxis(np.indices(sizes), 0, -1), P_x, rank) for rank in P_x.ranks}
    plan = layer.plan({rank: dj.ShapeDtype(block.shape[:3], np.dtype(float)) for rank, block in blocks.items()})
    count = np.zeros((sizes[0], heads, sizes[1]), int)
    for place, rank in enumerate(P_x.ranks):
        samples, its_heads, queries = (range(*its) for its in plan.regions[rank])
        count[np.ix_(samples, its_heads, queries)] += 1
        assert {*samples} == {*blocks[rank][..., 0].ravel().tolist()}
        if exchange == "ring":
            assert {*queries} == {*blocks[rank][..., 1].ravel().tolist()}
        if exchange != "gather":  # keys and values that are sent, or all three
            sent = plan.steps[0].fetch if exchange == "ring" else plan.to_heads.there[0]
            own = np.array_split(range(heads), P_x.shape[2])[place % P_x.shape[2]]
            assert sent.inputs[rank].shape == (*blocks[rank].shape[:2], len(own), 4 if exchange == "ring" else 6)
    assert np.all(count == 1)


@pytest.mark.simulated(2)
def test_an_infinity_that_is_padding_has_no_gradient() -> None:
    """Outputs are NaN, as in plain JAX (0 times infinity); yet nothing comes back to a key that nobody sees."""
    P = dj.Partition().grid([1, 2, 1])
    layer, draw = nn.DistributedMultiHeadAttention(P, 4, 2, bias=False), np.random.default_rng(0)
    params = layer.init(jax.random.key(0), jnp.float64)
    x, memory = draw.normal(size=(1, 2, 4)), draw.normal(size=(1, 4, 4))
    memory[0, 3] = -np.inf
    padding = jnp.array([[False, False, False, True]])

    def plain(memory: Any) -> Any:
        q = jnp.einsum("nse,hde->nhsd", x, params["query"])
        k, v = (jnp.einsum("nse,hde->nhsd", memory, params[name]) for name in ("key", "value"))
        scores = jnp.where(padding[:, None, None], -jnp.inf, q @ k.mT / np.sqrt(2))
        return jnp.einsum("nhsd,ehd->nse", jax.nn.softmax(scores) @ v, params["out"])

    own, keys = (each[:, P.rank * each.shape[1] // 2 :][:, : each.shape[1] // 2] for each in (x, memory))
    flags = padding[:, 2 * P.rank :][:, :2]

    def both(keys: Any) -> Any:
        y = layer(params, own, memory=keys, key_padding_mask=flags)
        return jnp.sum(y), y

    (_, y), got = dj.jit(dj.value_and_grad(both, has_aux=True))(keys)
    np.testing.assert_allclose(y, jax.jit(plain)(memory)[:, P.rank : P.rank + 1])
    want = jax.jit(jax.grad(lambda memory: jnp.sum(plain(memory))))(memory)
    assert np.all(np.isnan(y)) and np.all(want[0, 3] == 0)
    np.testing.assert_allclose(got, want[:, 2 * P.rank :][:, :2])


@pytest.mark.simulated(2)
def test_a_cache_remembers_padding() -> None:
    """Sequences that begin with padding, in two pieces, with a mask for all places: as all at once."""
    P = dj.Partition()
    grid = on(1, 1, 2)
    layer = nn.DistributedMultiHeadAttention(grid.partition(P), 8, 4, causal=True)
    params, x = layer.init(jax.random.key(0), float), np.random.default_rng(1).normal(size=(2, 4, 8))
    padding = np.arange(4) < np.array([[0], [3]])
    mask = np.random.default_rng(2).random((4, 6)) < 0.3

    @dj.jit
    def both(params: Any, x: Any, cache: Any) -> Any:
        want, found = layer(params, x, key_padding_mask=padding, attn_mask=mask[:, :4]), []
        for part in (slice(0, 3), slice(3, 4)):
            told = {"key_padding_mask": padding[:, part], "attn_mask": mask[part]}
            y, cache = layer(params, x[:, part], cache=cache, **told)
            found.append(y)
        return want, found, cache

    want, found, cache = both(params, cut(x, grid, P.rank), layer.init_cache(2, 6, float))
    close(np.concatenate(found, 1), want, 1e-12, "y")
    assert cache["padding"].tolist() == np.pad(padding, [(0, 0), (0, 2)]).tolist()


def test_refusals() -> None:
    make = nn.DistributedMultiHeadAttention
    x = jnp.ones((1, 1, 8))
    for sentence, work in {
        "A cache requires `causal` (=True), and a sequence that is not split": lambda P: make(P, 8, 4).init_cache(1, 5),
        "`key` (=None) must be a random key in training": lambda P: make(P, 8, 2, dropout=0.1)({}, x),
        "`memory` requires a layer that is not `causal`, and no `cache`.": lambda P: make(P, 8, 2, causal=True)(
            {}, x, memory=x
        ),
    }.items():
        refused = refusal(2, lambda P, w=work: w(on(1, 2, 1).partition(P)), dj.InvalidArgumentError)
        assert sentence in refused, refused


@pytest.mark.simulated(2)
def test_refusals_when_it_is_called() -> None:
    P = dj.Partition()
    layer = nn.DistributedMultiHeadAttention(on(1, 2, 1).partition(P), 4, 2)
    params, x = layer.init(jax.random.key(0), float), jnp.ones((1, 2, 4))
    for sentence, told in {
        "`attn_mask` must be of bool or floating, 2 x 4 or 1 x 2 x 2 x 4": {"attn_mask": np.zeros((2, 3), bool)},
        "On worker 1: `attn_mask` must be an array on all workers if it is on one": (
            {} if P.rank else {"attn_mask": np.zeros((2, 4), bool)}
        ),
        r"`memory` \(of shape \(2, 4, 4\)\) must have the samples of `x`": {"memory": jnp.ones((2, 2, 4))},
        "`memory` must have length 4 in dimension 2, balanced over 1": {"memory": jnp.ones((1, 2, 3))},
    }.items():
        with pytest.raises(dj.PlanError, match=sentence):
            layer(params, x, **told)
    for name in ("attn_mask", "key_padding_mask"):
        with pytest.raises(dj.InvalidTypeError, match=rf"`{name}` \(=\[\[True\]\]\) must be an array"):
            layer(params, x, **{name: [[True]]})


@pytest.mark.simulated(2)
def test_refusals_of_caches() -> None:
    """Each entry of another kind or shape, or not there, and what is none of them."""
    layer = nn.DistributedMultiHeadAttention(on(1, 1, 2).partition(dj.Partition()), 8, 2, causal=True)
    params, x = layer.init(jax.random.key(0)), jnp.ones((1, 2, 4))
    good = layer.init_cache(1, 4)
    for name, its in good.items():
        wrong = [its.astype(complex), jnp.zeros((*its.shape, 2), its.dtype), *([its[:, :3]] if its.ndim == 2 else [])]
        for cache in ({**good, name: each} for each in wrong):
            with pytest.raises(
                dj.PlanError, match=rf'`cache\["{name}"\]` must be .*as returned by `init_cache`, but is '
            ):
                layer(params, x, cache=cache)
        with pytest.raises(dj.PlanError, match=rf'`cache\["{name}"\]` must be .*, but is not there'):
            layer(params, x, cache={other: its for other, its in good.items() if other != name})
        with pytest.raises(dj.InvalidTypeError, match=rf'`cache\["{name}"\]` \(=\[1\]\) must be an array'):
            layer(params, x, cache={**good, name: [1]})
    with pytest.raises(dj.PlanError, match='`cache` holds "more", but must hold'):
        layer(params, x, cache={**good, "more": x})
    with pytest.raises(dj.PlanError, match="`x` has 5 elements of the sequence, but `cache` has a capacity of 4"):
        layer(params, jnp.ones((1, 5, 4)), cache=good)
    for cache in ({}, []):
        with pytest.raises(dj.InvalidTypeError, match=r"`cache` .* must be a dictionary from `init_cache`"):
            layer(params, x, cache=cache)
    for dtype in ("int8", "bool", "complex64", "nothing"):
        with pytest.raises(dj.InvalidTypeError, match=r"`dtype` .* must be a "):
            layer.init_cache(1, 4, dtype)


@pytest.mark.world(*((2, 4) if LONG > 1 else (2,)))
@pytest.mark.parametrize("seeds", RANDOM)
def test_random_ones_over_mpi(seeds: range, world_size: int) -> None:
    """Memory, masks, padding, weights that are dropped, and caches in pieces: output and gradients.

    Those of a cache with a mask that is added, the one of a short run, were NaN where XLA rounded scores in two ways.
    """
    check_attentions([drawn(seed, world_size) for seed in seeds])
