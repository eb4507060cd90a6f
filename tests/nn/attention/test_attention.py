"""Attention to another sequence, with masks, and with weights that are dropped, beside plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from attention_programs import Drawn, check_attentions
from matrix.partitions import On, on
from sequential import cut

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.nn.attention import online_softmax

DROPPED: dict[str, Any] = {"dropout": 0.3}
GROUPS, HEADS = {**DROPPED, "num_key_heads": 2}, {**DROPPED, "exchange": "heads"}
CACHED = {"causal": True, "bias": False, "num_key_heads": 2}
TWO = [
    Drawn(on(1, 2, 1, ranks=(1, 0)), (2, 3), 8, 4, 5, (1, 1), padded=True, options=GROUPS),
    Drawn(on(1, 2, 1), (2, 3), 8, 4, None, "queries", padded=True, options=HEADS),
    Drawn(on(1, 1, 2), (2, 4), 8, 4, None, "queries", True, (3, 1), {"causal": True, "rotary": 50.0}, seed=2),
    Drawn(on(1, 2, 1), (2, 5), 8, 4, None, None, True, (3, 2), {"causal": True, "exchange": "gather"}, seed=3),
]
# Where XLA rounded scores in two ways, its gradients were NaN.
OVER_MPI = Drawn(on(1, 1, 2, ranks=(1, 0)), (1, 5), 8, 4, None, (0, 1), False, (2, 1, 1, 1), CACHED, seed=17)


@pytest.mark.simulated(2)
def test_beside_plain_jax() -> None:
    """Output and gradients, those of memory and mask too; the weights that are dropped are jax.random.bernoulli's; a
    cache remembers padding."""
    check_attentions(TWO)


@pytest.mark.world(2)
def test_a_cache_with_an_added_mask_over_mpi() -> None:
    check_attentions([OVER_MPI])


@pytest.mark.simulated(1)
def test_keys_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """More keys than are looked at together, of which some are padding, with masks; a query that sees nothing else."""
    monkeypatch.setattr(online_softmax, "PIECE", 3)
    one = on(1, 1, 1)
    cases = [
        Drawn(one, (3, 8), 8, 4, None, (0, 1), True, options={"causal": True, "num_key_heads": 2}, seed=8),
        Drawn(one, (2, 3), 4, 2, 8, (1, 1), True, options=DROPPED, seed=6),
        Drawn(one, (2, 7), 4, 2, None, "queries", True, (5, 1, 1), {"causal": True}, seed=7),
    ]
    assert cases[0].whole(cases[0].layer().param_specs())["padding"][:, 0].any()
    check_attentions(cases)


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


@pytest.mark.simulated(3)
@pytest.mark.parametrize("exchange, kinds", [("ring", {}), ("heads", {"num_key_heads": 3})])
def test_a_mask_means_what_it_means_in_jax(exchange: str, kinds: dict[str, Any]) -> None:
    """`jax.nn.dot_product_attention` of the whole, with an uneven sequence: output and all gradients.

    It has a softmax in float32, in float64 too.
    """
    P, rng = dj.Partition(), np.random.default_rng(4)
    P_x = P.grid([1, P.size, 1])
    layer = nn.DistributedMultiHeadAttention(P_x, 12, 3, exchange=exchange, **kinds)  # type: ignore[arg-type]
    spec = dj.TensorSpec((2, 7, 12), P_x)
    whole = rng.normal(size=spec.global_shape)
    seen = rng.random((2, 1, 7, 7)) < 0.5
    seen |= np.eye(7, dtype=bool)
    start, stop = spec.box[1] if exchange == "ring" else (0, 7)
    params = layer.init(jax.random.key(0), float)

    def loss(params: Any, x: Any) -> Any:
        y = layer(params, x, mask=jnp.asarray(seen[:, :, start:stop]))
        return jnp.sum(jnp.sin(y)), y

    def plain(params: Any, x: Any) -> Any:
        q, k, v = (
            jnp.einsum("nse,hde->nshd", x, params[name]) + params[f"{name}_bias"] for name in ("query", "key", "value")
        )
        heads = jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(seen))
        y = jnp.einsum("nshd,ehd->nse", heads, params["out"]) + params["out_bias"]
        return jnp.sum(jnp.sin(y)), y

    (_, y), gradient = dj.jit(dj.value_and_grad(loss, (0, 1), has_aux=True))(params, spec.block(whole))
    specs = (layer.param_specs(), spec)
    whole_params, gathered = dj.gather(params, specs[0]), dj.gather((y, gradient), (spec, specs))
    if P.rank == 0:
        (_, expected), wanted = jax.jit(jax.value_and_grad(plain, (0, 1), has_aux=True))(whole_params, whole)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), gathered, (expected, wanted))


def test_refusals() -> None:
    make, x = nn.DistributedMultiHeadAttention, jnp.ones((1, 1, 8))
    for sentence, work in (
        ("A cache requires `causal` (=True), and a sequence that", lambda P: make(P, 8, 4).init_cache(1, 5)),
        ("`key` (=None) must be a random key in training", lambda P: make(P, 8, 2, dropout=0.1)({}, x)),
        ("`memory` requires a layer that is not `causal`, and no `cache`.",
         lambda P: make(P, 8, 2, causal=True)({}, x, memory=x)),
    ):  # fmt: skip
        refused = refusal(2, lambda P, w=work: w(on(1, 2, 1).partition(P)), dj.InvalidArgumentError)
        assert sentence in refused, refused


@pytest.mark.simulated(2)
def test_refusals_when_it_is_called() -> None:
    P = dj.Partition()
    layer = nn.DistributedMultiHeadAttention(on(1, 2, 1).partition(P), 4, 2)
    params, x, flags = layer.init(jax.random.key(0), float), jnp.ones((1, 2, 4)), np.zeros((2, 4), bool)
    for sentence, told in (
        ("`attn_mask` must be of bool or floating, with rows for its own queries and columns for all keys: 2 x 4",
         {"attn_mask": flags[:, :3]}),
        ("`mask` must be of bool, with rows for its own queries and columns for all keys: 2 x 4",
         {"mask": flags.astype(float)}),
        ("`attn_mask` must be an array on all workers if it is on one, but is None",
         {"mask" if P.rank else "attn_mask": flags}),
        ("On worker 1: `attn_mask` must be an array on all workers if it is on one",
         {} if P.rank else {"attn_mask": flags}),
        (r"On worker 1: `key_padding_mask` \(=bool\[1, 3\]\) must be bool\[1, 2\]",
         {"key_padding_mask": flags[:1, : 2 + P.rank]}),
        ("on all workers if it is on one, but is", {"key_padding_mask": None if P.rank else flags[:1, :2]}),
        (r"`memory` \(of shape \(2, 4, 4\)\) must have the samples of `x`", {"memory": jnp.ones((2, 2, 4))}),
        ("`memory` must have length 4 in dimension 2, balanced over 1", {"memory": jnp.ones((1, 2, 3))}),
    ):  # fmt: skip
        with pytest.raises(dj.PlanError, match=sentence):
            layer(params, x, **told)
    with pytest.raises(dj.PlanError, match=r"`x` must have length 3 in dimension 1, balanced over 2.*\[1, 2\]"):
        layer(params, x[:, : 1 + P.rank])
    with pytest.raises(dj.InvalidArgumentError, match=r"`attn_mask` \(True: not seen.* exclude each other"):
        layer(params, x, attn_mask=flags, mask=flags)
    for name in ("attn_mask", "mask", "key_padding_mask"):
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
    with pytest.raises(
        dj.PlanError, match=r'`cache\["key"\]` must be 1 x length x 1 x 4 real .*, of one length on all workers'
    ):
        layer(params, x, cache=layer.init_cache(2, 4))
    for cache in ({}, []):
        with pytest.raises(dj.InvalidTypeError, match=r"`cache` .* must be a dictionary from `init_cache`"):
            layer(params, x, cache=cache)
    for dtype in ("int8", "bool", "complex64", "nothing"):
        with pytest.raises(dj.InvalidTypeError, match=r"`dtype` .* must be a "):
            layer.init_cache(1, 4, dtype)
