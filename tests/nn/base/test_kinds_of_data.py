"""What layers make of data that is not floating, not finite, or of another dtype than its placeholders."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from blocks import block_of
from matrix.partitions import on
from sequential import made

import distdl_jax as dj
from distdl_jax import nn

ONE = on(1, 1, 1)


def cut(whole: Any, P: dj.Partition) -> jax.Array:
    return jnp.asarray(block_of(whole, dj.TensorSpec(whole.shape, P)))


@pytest.mark.simulated(2)
@pytest.mark.parametrize("dtype", ["uint8", "int8", "bool", "float16"])
def test_means_are_of_sums_that_fit(dtype: str) -> None:
    """Sums of bytes are no bytes, those of booleans no booleans, and those of float16 may be above its largest."""
    P = dj.Partition().grid([1, 1, 2])
    largest = {"bool": 1, "float16": 60000}.get(dtype) or np.iinfo(dtype).max
    whole = np.array([[[largest, largest, 0, largest, 0, 0, largest, largest]]]).astype(dtype)
    expected = whole.reshape(1, 1, 4, 2).astype(np.float64).mean(-1)
    held = {worker: dj.ShapeDtype((1, 1, 4), np.dtype(dtype)) for worker in (0, 1)}
    for layer in (nn.DistributedAvgPool1d(P, 2), nn.DistributedAdaptiveAvgPool(P, 4)):
        y = layer(cut(whole, P))
        assert y.dtype == layer.plan(held).outputs[P.rank].dtype == (dtype if dtype == "float16" else np.float32)
        np.testing.assert_array_equal(np.asarray(y, np.float64), cut(expected, P))


@pytest.mark.simulated(3)
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "bool", "float16", "complex64"])
def test_global_pools_of_every_dtype(dtype: str) -> None:
    """Where all workers have features, and where one has none: its part is what nothing is smaller than."""
    P = dj.Partition().grid([1, 1, 3])
    least, most = (np.iinfo(dtype).min, np.iinfo(dtype).max) if "int8" in dtype else (0, 1)
    for n in (5, 2):
        whole = np.full((2, 1, n), least, dtype)
        whole[1, 0, n - 1 :] = most
        mean, first = whole.astype(complex if dtype == "complex64" else float).mean(2, keepdims=True), P.rank == 0
        y = nn.DistributedGlobalAvgPool(P)(cut(whole, P))
        assert y.dtype == (dtype if dtype in ("float16", "complex64") else np.float32)
        np.testing.assert_allclose(y, mean if first else mean[..., :0], 1e-3 if dtype == "float16" else 1e-6)
        if dtype != "complex64":
            y = nn.DistributedGlobalMaxPool(P)(cut(whole, P))
            assert y.dtype == dtype
            np.testing.assert_array_equal(y, whole.max(2, keepdims=True) if first else np.zeros((2, 1, 0)))


@pytest.mark.simulated(2)
def test_a_gradient_past_a_pool_of_integers_and_a_maximum_of_booleans() -> None:
    """They have none; what goes round them has its own."""
    P = dj.Partition().grid([1, 1, 2])

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(nn.DistributedGlobalMaxPool(P)(x.astype(int))) + jnp.sum(x**2)

    np.testing.assert_array_equal(dj.jit(dj.grad(loss))(jnp.full((1, 1, 3), 2.5)), np.full((1, 1, 3), 5.0))
    y = nn.DistributedMaxPool1d(P, 3, 1, padding=1)(cut(np.array([[[True, False, False, False]]]), P))
    assert y.dtype == bool
    np.testing.assert_array_equal(y, cut(np.array([[[True, True, False, False]]]), P))


@pytest.mark.parametrize(
    ("layer", "dtype", "message"),
    [
        (partial(nn.DistributedMaxPool1d, kernel_size=2), "complex64", "`x` must hold real numbers"),
        (nn.DistributedGlobalMaxPool, "complex64",
         "`x` must hold real numbers, which have an order, but is complex64"),
        (300, "uint8", "`value` (=300) must be a number that `x`, of"),
        (0.5, "int32", "`value` (=0.5) must be a number that `x`"),
        (1e9, "float16", "`value` (=1000000000.0) must be a number"),
        (1j, "float32", "`value` (=1j) must be a number that `x`, of"),
    ],
)  # fmt: skip
def test_what_a_dtype_can_not_hold_is_refused(layer: Any, dtype: str, message: str) -> None:
    x = {worker: dj.ShapeDtype((1, 1, 4), np.dtype(dtype)) for worker in (0, 1)}
    make = layer if callable(layer) else partial(nn.DistributedPad, padding=[(1, 1)], value=layer)
    assert refusal(2, lambda P: make(P.grid([1, 1, 2])).plan(x), dj.PlanError).startswith(message)


@pytest.mark.simulated(2)
def test_an_infinity_stays_in_its_group() -> None:
    P = dj.Partition().grid([1, 2, 1])
    whole = np.random.default_rng(0).normal(size=(2, 6, 4))  # groups of 2 channels: the second one is split
    whole[0, 1, 2] = np.inf
    layer, expected = nn.DistributedGroupNorm(P, num_groups=3, num_channels=6), np.zeros((2, 6, 4), bool)
    expected[0, :2] = True
    y = jax.jit(layer)(layer.init(), cut(whole, P))
    np.testing.assert_array_equal(np.isnan(y), cut(expected, P))


@pytest.mark.simulated(2)
@pytest.mark.parametrize("kind", ["adaptive", "linear"])
def test_an_infinity_stays_where_it_is_read(kind: str) -> None:
    """0 times infinity is no number: outputs that don't read it are not multiplied with it, nor are the gradients."""
    P = dj.Partition().grid([1, 1, 2])
    whole = np.random.default_rng(0).normal(size=(1, 2, 23))
    whole[0, 0, 9], whole[0, 1, 20] = np.inf, np.nan
    weights = np.zeros((23, 4 if kind == "adaptive" else 69))
    for o in range(weights.shape[1]):
        if kind == "adaptive":  # windows of 6 and 7: more than are taken one after the other
            start, stop = o * 23 // 4, -(-(o + 1) * 23 // 4)
            weights[start:stop, o] = 1 / (stop - start)
        else:
            place = min(max((o + 0.5) / 3 - 0.5, 0), 22)
            weights[int(place), o] += 1 - place % 1
            weights[min(int(place) + 1, 22), o] += place % 1
    linear = nn.DistributedUpsample(P, scale_factor=3, mode="linear")
    layer: Any = nn.DistributedAdaptiveAvgPool(P, 4) if kind == "adaptive" else linear

    def times(x: np.ndarray, matrix: np.ndarray) -> Any:
        y = np.stack([(x[..., column != 0] * column[column != 0]).sum(-1) for column in matrix.T], -1)
        return cut(y, P)

    dy = np.random.default_rng(1).normal(size=(1, 2, weights.shape[1]))
    dy[0, 0, 1] = -np.inf
    y, (dx,) = jax.jit(lambda x, dy: (layer(x), jax.vjp(layer, x)[1](dy)))(cut(whole, P), cut(dy, P))
    np.testing.assert_allclose(y, times(whole, weights), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(dx, times(dy, weights.T), rtol=1e-12, atol=1e-12)


@pytest.mark.simulated(2)
def test_a_label_that_is_no_class_has_no_loss() -> None:
    """Counted from 1, say: then every loss would be of the wrong class, and the last class would have none."""
    P = dj.Partition().grid([1, 2])
    logits = cut(np.random.default_rng(0).normal(size=(2, 3)), P)

    @partial(jax.jit, static_argnums=1)
    def loss(labels: jax.Array, its: Any) -> jax.Array:
        return dj.all_reduce(its(logits, labels), P)

    for options in ({}, {"ignore_index": None, "reduction": "sum"}):
        its = nn.DistributedCrossEntropyLoss(P, **options)
        assert [bool(jnp.isnan(loss(jnp.array([1, label]), its))) for label in (2, 3, -1)] == [False, True, True]
    assert not jnp.isnan(loss(jnp.array([1, 3]), nn.DistributedCrossEntropyLoss(P, ignore_index=3)))


@pytest.mark.simulated(2)
def test_nothing_is_read_of_what_does_not_count() -> None:
    """Not even of a class that is masked: a padding token, say, whose label is ignored and whose logit is -inf."""
    P, logits = dj.Partition().grid([1, 2]), np.random.default_rng(0).normal(size=(3, 4))
    logits[:, 0] = -np.inf
    value, gradient = jax.jit(jax.value_and_grad(nn.DistributedCrossEntropyLoss(P, ignore_index=0)))(
        cut(logits, P), jnp.array([2, 0, 3])
    )
    expected = -np.mean(jax.nn.log_softmax(logits)[np.array([0, 2]), np.array([2, 3])])
    assert np.isclose(float(dj.all_reduce(value, P)), expected, rtol=1e-12) and np.all(np.isfinite(gradient))


@pytest.mark.simulated(2)
@pytest.mark.parametrize(("dtype", "placeholder"), [("float32", "float16"), ("bfloat16", None)])
def test_the_dtype_of_parameters_is_where_they_live(dtype: str, placeholder: str | None) -> None:
    """Workers that hold none get copies; of what kind their placeholders are is all that counts of these."""
    P = dj.Partition()
    rows, one, index = P.grid([2, 1]), P.grid([2, 1, 1]), np.array([[4, 2]])
    linear = nn.DistributedLinear(rows, rows, one, 3, 2)
    embedding = nn.DistributedEmbedding(rows, one, one, 5, 3)
    for layer, x, expected in (
        (linear, jnp.ones((1, 3), dtype), lambda p: (p["weight"].sum(1) + p["bias"])[None]),
        (embedding, jnp.asarray(index), lambda p: p["weight"][index]),
    ):
        params = layer.init(jax.random.key(0), dtype)
        whole = P.broadcast_data({name: np.asarray(its, np.float64) for name, its in params.items()})
        if P.rank != 0:
            params = dict.fromkeys(params, dj.zero_volume_tensor(dtype=placeholder))
        y = jax.jit(layer)(params, x)
        assert y.dtype == dtype
        np.testing.assert_allclose(np.asarray(y, np.float64), expected(whole), 1e-2 if layer is linear else 0)


# What computes locally in a way of its own.
OF_ONE: dict[str, Any] = {
    "conv": made("Conv1d", ONE, in_channels=4, out_channels=2, kernel_size=3, padding=1),
    "transposed": made("ConvTranspose1d", ONE, in_channels=4, out_channels=3, kernel_size=2, stride=2),
    "largest": made("MaxPool1d", ONE, 3, 2, padding=1),
    "mean": made("AvgPool1d", ONE, 2),
    "upsample": made("Upsample", ONE, scale_factor=1.5, mode="linear"),
    "norm": made("LayerNorm", ONE, 8),
}


@pytest.mark.simulated(1)
@pytest.mark.parametrize("name", OF_ONE)
def test_arrays_of_numpy(name: str) -> None:
    """Eagerly and in every transformation, where JAX hands numpy's arrays on as they are, the same as JAX's own."""
    layer = OF_ONE[name](dj.Partition())
    both = np.random.default_rng(0).normal(size=(2, 2, 4, 8))
    params = jax.tree.map(np.asarray, layer.init(jax.random.key(0), float))
    dy = np.asarray(layer(params, both[0]))
    programs: dict[str, Any] = {
        "eager": lambda params, both, dy: layer(params, both[0]),
        "vmap": lambda params, both, dy: jax.vmap(lambda x: layer(params, x))(both),
        "vjp of checkpoint": lambda params, both, dy: jax.vjp(jax.checkpoint(layer), params, both[0])[1](dy),
    }
    for how, program in programs.items():
        got, wanted = program(params, both, dy), program(*jax.tree.map(jnp.asarray, (params, both, dy)))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-12, err_msg=how), got, wanted)


@pytest.mark.simulated(3)
def test_what_follows_an_embedding_elsewhere_gets_a_placeholder_of_numbers() -> None:
    """Workers that take no part in it have integers in front of it, and floating-point numbers behind."""
    P = dj.Partition()
    here, there = (lambda *shape, its=its: P.grid(shape, its) for its in ([0], [1, 2]))
    embed = nn.DistributedEmbedding(here(1, 1), here(1, 1, 1), here(1, 1), 7, 4)
    network = nn.Sequential(embed, jax.nn.silu, nn.Repartition(here(1, 1, 1), there(1, 2, 1)))
    params, indices = network.init(jax.random.key(0), float), np.array([[1, 5, 1], [0, 6, 2]])
    x = jnp.asarray(indices) if P.rank == 0 else dj.zero_volume_tensor(2, dtype=int)
    specs = [network.output_spec(dj.TensorSpec(indices.shape, here(1, 1))), *[embed.param_specs()["weight"]] * 2]

    def loss(params: Any) -> Any:
        y = network(params, x)
        return jnp.sum(y**2), y

    (value, y), gradient = dj.jit(dj.value_and_grad(loss, has_aux=True))(params)
    y, weight, slope = dj.gather([y, params[0]["weight"], gradient[0]["weight"]], specs)
    if P.rank == 0:
        want, back = jax.value_and_grad(lambda w: jnp.sum(jax.nn.silu(w[indices]) ** 2))(weight)
        for got, its in ((y, jax.nn.silu(weight[indices])), (slope, back), (value, want)):
            np.testing.assert_allclose(got, its, 1e-12)
