"""Layers that mix channels, or work on each of them, beside the sequential ones, however the tensor is split."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from matrix.partitions import On, on
from sequential import Beside, beside, check_beside, close, cut

import distdl_jax as dj
from distdl_jax import nn


def pointwise(P_x: On, dim: int, features: int, *sizes: Any, **options: Any) -> Beside:
    def whole(params: Any, x: Any) -> Any:
        return jnp.moveaxis(jnp.tensordot(x, params["weight"], (dim, 1)) + params.get("bias", 0.0), -1, dim)

    length, y_sizes = int(np.sum(sizes[dim])), list(sizes)
    y_sizes[dim] = features
    return beside("Pointwise", sizes, whole, P_x, length, features, dim, y_sizes=y_sizes, **options)


def prelu(P_x: On, number: int, *sizes: Any) -> Beside:
    def whole(params: Any, x: Any) -> Any:
        slopes = params["weight"].reshape(-1, *(1,) * max(x.ndim - 2, 0))
        return jnp.where(x > 0, x, slopes * x)

    return beside("PReLU", sizes, whole, P_x, number, y_sizes=sizes)


def squeeze_excitation(P_x: On, squeeze: int, *sizes: Any) -> Beside:
    def whole(params: Any, x: Any) -> Any:
        s = x.mean(tuple(range(2, x.ndim)))
        s = jax.nn.silu(s @ params["fc1"]["weight"].T + params["fc1"]["bias"])
        s = jax.nn.sigmoid(s @ params["fc2"]["weight"].T + params["fc2"]["bias"])
        return x * jnp.expand_dims(s, tuple(range(2, x.ndim)))

    return beside("SqueezeExcitation", sizes, whole, P_x, sizes[1], squeeze, jax.nn.silu, y_sizes=sizes)


CASES = (
    pointwise(on(2, 1, 2, ranks=(3, 1, 2, 0)), 1, 5, 3, 4, 3),
    pointwise(on(1, 3, 1, ranks=(2, 0, 3)), -1, 3, 2, [0, 4, 1], 5, bias=False),
    pointwise(on(1, 3, ranks=(3, 0, 1)), 1, 2, 2, [0, 1, 4]),
    prelu(on(1, 2, 2, ranks=(3, 1, 2, 0)), 3, 2, 3, [0, 4]),
    prelu(on(3, 1, ranks=(3, 0, 1)), 1, 4, 3),
    prelu(on(4), 1, 5),
    squeeze_excitation(on(1, 2, 2, ranks=(3, 1, 2, 0)), 2, 2, 3, [0, 4]),
    squeeze_excitation(on(2, 1, 1, 2, ranks=(2, 0, 3, 1)), 2, 3, 4, 2, 3),
)


@pytest.mark.simulated(4)
def test_beside_the_sequential_ones() -> None:
    """Output and all gradients: batch, channels and features split, evenly or not, with empty blocks, on any teams."""
    check_beside(CASES)


@pytest.mark.simulated(4)
def test_conditioned_on_a_vector() -> None:
    """FiLM as the docs write it: the gradients of all parameters, of the vector and of the tensor."""
    P, on_x, sizes, key = dj.Partition(), on(1, 2, 2, ranks=(3, 1, 2, 0)), (2, 3, [0, 4]), jax.random.key(1)
    P_x, draw = on_x.partition(P), np.random.default_rng(5).normal
    layers = {"embed": nn.DistributedPointwise(on(1, 1, 4).partition(P), 3, 4)}
    layers |= {name: nn.DistributedPointwise(P_x, 4, 3, replicated=True) for name in ("scale", "shift")}
    x, weight, time = draw(size=(2, 3, 4)), draw(size=(2, 3, 4)), draw(size=(2, 3, 1))
    params = {name: layer.init(key, float) for name, layer in layers.items()} | {"time": jnp.asarray(time)}
    specs = {name: layer.param_specs() for name, layer in layers.items()}
    specs["time"] = dj.TensorSpec(time.shape, P_x, replicated=True)

    def loss(apply: Any, weight: Any, params: Any, x: Any) -> Any:
        time = jnp.tanh(apply("embed", params, params["time"]))
        return jnp.sum(jnp.sin((1 + apply("scale", params, time)) * x + apply("shift", params, time)) * weight)

    def ours(name: str, params: Any, x: Any) -> Any:
        return layers[name](params[name], dj.replicated(x, P_x) if name == "embed" else x)

    def plain(name: str, params: Any, x: Any) -> Any:
        return jnp.einsum("oi,nid->nod", params[name]["weight"], x) + params[name]["bias"][:, None]

    own, own_weight = (cut(each, on_x, P.rank, sizes) for each in (x, weight))
    value, (of_params, of_x) = dj.jit(dj.value_and_grad(partial(loss, ours, own_weight), (0, 1)))(params, own)
    both = [jax.tree.map(np.asarray, dj.gather(tree, specs)) for tree in (params, of_params)]
    whole, slopes = P.broadcast_data(both if P.rank == 0 else None)
    want, (its_params, its_x) = jax.jit(jax.value_and_grad(partial(loss, plain, weight), (0, 1)))(whole, x)
    close(value, want, 1e-12, "value")
    jax.tree.map(lambda got, its: close(got, its, 1e-12, "parameters"), slopes, its_params)
    close(of_x, cut(np.asarray(its_x), on_x, P.rank, sizes), 1e-12, "x")


@pytest.mark.simulated(2)
def test_initial_weights_are_those_of_a_linear_layer() -> None:
    """For one key, with copies of all of them, or of the rows of this worker's outputs."""
    P = dj.Partition()
    one, key = P.grid([1, 1]), jax.random.key(7)
    whole = nn.DistributedLinear(one, one, one, 3, 5)
    linear = dj.gather(whole.init(key), whole.param_specs())
    for shape, rows in (([2, 1], 5), ([1, 2], 3 - P.rank)):
        layer = nn.DistributedPointwise(P.grid(shape), 3, 5)
        params = layer.init(key)
        assert {name: its.shape for name, its in params.items()} == {"weight": (rows, 3), "bias": (rows,)}
        mine = dj.gather(params, layer.param_specs())
        if P.rank == 0:
            jax.tree.map(np.testing.assert_array_equal, mine, linear)


@pytest.mark.simulated(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precisions_are_summed_in_float32(dtype: str) -> None:
    """3,008 products of 1: their sum is beyond the digits of both, before another number and the bias come to it."""
    P = dj.Partition()
    layer = nn.DistributedPointwise(P.grid([2, 1, 1]), 3009, 1)
    x = jnp.ones((1, 3009, 2), dtype).at[:, 0].set(-3008.0)
    params = {"weight": jnp.ones((1, 3009), dtype), "bias": jnp.ones(1, dtype)}

    def loss(params: Any) -> Any:
        y = layer(params, x)
        return jnp.sum(y.astype("float32")), y

    (value, y), gradient = jax.jit(dj.value_and_grad(loss, has_aux=True))(params)
    assert y.dtype == gradient["bias"].dtype == jnp.dtype(dtype) and float(value) == 4
    np.testing.assert_array_equal(y, np.full((1, 1, 2), 1, dtype))
    assert float(gradient["bias"][0]) == 4


def test_a_length_that_does_not_fit_is_refused() -> None:
    x = dict.fromkeys((0, 1), dj.ShapeDtype((2, 3, 4), np.dtype("float32")))
    sentence = refusal(2, lambda P: nn.DistributedPointwise(P.grid([2, 1, 1]), 4, 3).plan(x), dj.PlanError)
    assert "`x` (4 x 3 x 4) must have length 4, `in_features`, in dimension 1, `dim`, but has [3]." in sentence
