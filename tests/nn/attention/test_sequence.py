"""Embedding and attention beside the sequential ones, however batch, sequence, heads and vocabulary are split."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import Drawn, check_attentions
from blocks import block_of
from matrix.partitions import On, on
from sequential import Beside, beside, check_beside, close, cut

import distdl_jax as dj
from distdl_jax import nn


def embedding(sizes: tuple[int, ...], P_x: On, P_y: On, P_W: On, rows: int, features: int, **options: Any) -> Beside:
    def whole(params: Any, x: Any) -> Any:
        weight = params["weight"]
        if "padding_idx" in options:
            fixed = (np.arange(rows) == options["padding_idx"])[:, None]
            weight = jnp.where(fixed, jax.lax.stop_gradient(weight), weight)
        return weight[x]

    return beside("Embedding", sizes, whole, P_x, P_y, P_W, rows, features, integers=rows, **options)


def linear(sizes: tuple[int, int, int], P_x: On, P_y: On, P_W: On, out: int) -> Beside:
    return beside("Linear", sizes, lambda p, x: x @ p["weight"].T + p["bias"], P_x, P_y, P_W, sizes[2], out)


SHUFFLED, TABLE = (3, 1, 2, 0), on(2, 2, ranks=(1, 3, 0, 2))
ATTENTIONS = (
    Drawn(on(1, 2, 2, ranks=SHUFFLED), (2, 3), 8, 4, padded=True,
          options={"num_key_heads": 2, "causal": True, "rotary": 100.0}),
    Drawn(on(1, 2, 1, ranks=(2, 0)), (2, 4), 24, 12, padded=True,
          options={"exchange": "heads", "num_key_heads": 3, "fused": True}),
    Drawn(on(1, 2, 1, ranks=(3, 1)), (2, 3), 6, 3, options={"exchange": "gather", "causal": True, "bias": False}),
    Drawn(on(1, 3, 1, ranks=(2, 0, 3)), (1, 2), 4, 2, options={"causal": True, "bias": False}),
)  # fmt: skip
CASES = (
    linear((2, 3, 5), on(1, 2, 2, ranks=SHUFFLED), on(1, 2, 2, ranks=(3, 2, 1, 0)), on(2, 2, ranks=SHUFFLED), 3),
    embedding((2, 3), on(1, 1, ranks=(2,)), on(1, 2, 2, ranks=(1, 3, 0, 2)), TABLE, 5, 3, padding_idx=4),
    embedding((3, 2), on(2, 1), on(2, 1, 1), on(2, 2, 1, ranks=(3, 1, 0, 2)), 5, 3, sharded=True),
    embedding((4,), on(2, ranks=(0, 3)), on(2, 1), on(2, 2, 1), 3, 2, padding_idx=1),
)


@pytest.mark.simulated(4)
def test_beside_the_sequential_ones() -> None:
    """Output and gradients: heads that do not divide, sequences with empty blocks, grouped keys, on any teams."""
    check_beside(CASES)
    check_attentions(ATTENTIONS)


@pytest.mark.world(4)
def test_over_mpi() -> None:
    check_beside(CASES[1:2])


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
    want = np.asarray(jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(jnp.tanh(w[x]) @ w.T))))(table))
    close(gradient["weight"], block_of(want, embed.param_specs()["weight"]), 1e-12, "the table's gradient")


@pytest.mark.simulated(1, 2, 3, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatrons_pair(sequence_parallel: bool, world_size: int) -> None:
    """Around a nonlinearity, with a way around both: y, and all gradients, those of copies in shares that add up."""
    p = 2 if world_size == 4 else world_size
    P = dj.Partition().grid([world_size // p, 1, p])
    first = nn.ColumnParallelLinear(P, in_features=3, out_features=5, sequence_parallel=sequence_parallel)
    second = nn.RowParallelLinear(P, in_features=5, out_features=3, sequence_parallel=sequence_parallel)
    assert (first.output_partition, second.input_partition) == (P, P)
    copies = not sequence_parallel
    stream = dj.TensorSpec((2, 4, 3), P.grid([P.shape[0], p, 1, *[1] * copies]), replicated=(1,) if copies else ())
    rng, specs = np.random.default_rng(0), (first.param_specs(), second.param_specs())
    whole = jax.tree.map(lambda spec: rng.normal(size=spec.global_shape), specs)
    x, c = rng.normal(size=(2, 2, 4, 3))

    def loss(params: Any, x: Any, layers: Any, c: Any) -> Any:
        y = x + layers[1](params[1], jnp.sin(layers[0](params[0], x)))
        return jnp.sum(c * jnp.sin(y)), y

    def plain(params: Any, x: Any) -> Any:
        return x @ params["weight"].T + params["bias"]

    own_c = block_of(c, stream) / (p if copies else 1)
    differentiate = dj.jit(lambda params, x: dj.grad(loss, (0, 1), has_aux=True)(params, x, (first, second), own_c))
    (of_params, of_x), y = differentiate(jax.tree.map(block_of, whole, specs), block_of(x, stream))
    of_whole = jax.jit(lambda params, x: jax.grad(loss, (0, 1), has_aux=True)(params, x, (plain, plain), c))
    (want, want_x), want_y = of_whole(whole, x)
    close(y, block_of(np.asarray(want_y), stream), 1e-12, "y")
    if copies:
        of_x = dj.functional.all_sum_reduce(of_x, stream.partition, axes_reduce=(1,))
    close(of_x, block_of(np.asarray(want_x), stream), 1e-12, "gradient of x")
    jax.tree.map(lambda got, its, spec: close(got, block_of(its, spec), 1e-12, "weights"), of_params, want, specs)


@pytest.mark.simulated(4)
def test_a_ring_keeps_neither_blocks_nor_scores() -> None:
    """For the way back each worker keeps what is as large as its own block, however many others there are."""
    P = dj.Partition()
    x, kept = jnp.ones((1, 16, 8)), []
    for workers in (2, 4):
        block = x if P.rank < workers else x[:, :0]
        layer = nn.DistributedMultiHeadAttention(on(1, workers, 1).partition(P), 8, 2, bias=False)
        params = layer.init(jax.random.key(0), float)
        forward = jax.make_jaxpr(lambda x, layer=layer, params=params: jax.vjp(partial(layer, params), x)[1])(block)
        kept.append(sum(int(np.prod(out.aval.shape)) for out in set(forward.jaxpr.outvars)))
    assert P.rank > 1 or kept[0] == kept[1] < 8 * x.size, kept


@pytest.mark.simulated(2)
def test_a_cache_continues_a_sequence() -> None:
    """Elements of a sequence go through one compiled step; beyond a cache's places everything is NaN."""
    P = dj.Partition()
    grid = on(1, 1, 2, ranks=(1, 0))
    layer = nn.DistributedMultiHeadAttention(grid.partition(P), 8, 4, num_key_heads=2, causal=True, exchange="heads")
    params, x = layer.init(jax.random.key(0), float), np.random.default_rng(1).normal(size=(3, 3, 8))
    cache, traces = layer.init_cache(3, 2, float), []
    for name, spec in layer.cache_specs(3, 2).items():
        assert cache[name].shape == spec.local_shape

    @dj.jit
    def step(params: Any, x: Any, cache: Any) -> Any:
        traces.append(x.shape)
        return layer(params, x, cache=cache)

    for place in range(3):
        y, cache = step(params, cut(x[:, place : place + 1], grid, P.rank), cache)
        assert int(cache["length"]) == place + 1 and np.all(np.isnan(y)) == (place == 2)
        if not place:
            traced = len(traces)
    assert len(traces) == traced


@pytest.mark.simulated(2)
def test_indices_that_are_no_integers_are_refused() -> None:
    P = dj.Partition()
    embed = nn.DistributedEmbedding(P.grid([1]), P.grid([1, 2]), P.grid([1, 2]), 3, 2)
    with pytest.raises(dj.PlanError, match="`x` must hold integers, indices of rows, but is float64"):
        embed(embed.init(jax.random.key(0), float), jnp.ones(0 if P.rank else 2))


@pytest.mark.simulated(2)
def test_indices_of_every_integer_dtype() -> None:
    """A vocabulary of as many rows as bytes have, or more."""
    P = dj.Partition()
    one = P.create_partition_inclusive([0])
    first, features = (one.grid([1] * dims) for dims in (2, 3))
    rows = P.grid([2, 1])
    for vocabulary, dtype in ((256, np.uint8), (128, np.int8), (70000, np.uint16)):
        embed = nn.DistributedEmbedding(first, features, rows, vocabulary, 2, padding_idx=vocabulary // 2)
        params = embed.init(jax.random.key(0))
        x = np.array([[0, vocabulary // 2 - 1, vocabulary // 2, min(vocabulary, np.iinfo(dtype).max) - 1]], dtype)
        y = jax.jit(embed)(params, jnp.asarray(x) if P.rank == 0 else dj.zero_volume_tensor(1, dtype=dtype))
        whole = dj.gather(params["weight"], embed.param_specs()["weight"])
        if P.rank == 0:
            np.testing.assert_array_equal(y, np.asarray(whole)[x])
            assert np.flatnonzero(~np.any(whole, 1)).tolist() == [embed.padding_idx]
