"""Layers that mix channels, or work on each of them, beside the sequential ones, however the tensor is split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from matrix.partitions import On, on
from sequential import Beside, check_beside, close, cut

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax import nn


def pointwise(P_x: On, dim: int, features: int, *sizes: Any, **options: Any) -> Beside:
    def whole(params: Any, x: Any) -> Any:
        return jnp.moveaxis(jnp.tensordot(x, params["weight"], (dim, 1)) + params.get("bias", 0.0), -1, dim)

    length, y_sizes = int(np.sum(sizes[dim])), list(sizes)
    y_sizes[dim] = features
    return beside("Pointwise", sizes, P_x, whole, y_sizes, length, features, dim, **options)


def beside(kind: str, sizes: Any, P_x: On, whole: Any, y_sizes: Any, *args: Any, **options: Any) -> Beside:
    """The layer of this kind with these arguments."""
    layer_type, name = getattr(nn, f"Distributed{kind}"), f"{kind} {args} {sizes} {P_x} {options}"
    return Beside(name, sizes, lambda P: layer_type(P_x.partition(P), *args, **options), whole, P_x, y_sizes=y_sizes)


def prelu(P_x: On, number: int, *sizes: Any) -> Beside:
    def whole(params: Any, x: Any) -> Any:
        slopes = params["weight"].reshape(-1, *(1,) * max(x.ndim - 2, 0))
        return jnp.where(x > 0, x, slopes * x)

    return beside("PReLU", sizes, P_x, whole, sizes, number)


def squeeze_excitation(P_x: On, squeeze: int, *sizes: Any) -> Beside:
    def whole(params: Any, x: Any) -> Any:
        s = x.mean(tuple(range(2, x.ndim)))
        s = jax.nn.silu(s @ params["fc1"]["weight"].T + params["fc1"]["bias"])
        s = jax.nn.sigmoid(s @ params["fc2"]["weight"].T + params["fc2"]["bias"])
        return x * jnp.expand_dims(s, tuple(range(2, x.ndim)))

    return beside("SqueezeExcitation", sizes, P_x, whole, sizes, sizes[1], squeeze, jax.nn.silu)


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
def test_conditioned_on_a_vector_and_on_another_tensor() -> None:
    """FiLM and AdaIN as the docs write them: the gradients of all parameters, of the vector and of both tensors."""
    P, on_x, sizes = dj.Partition(), on(1, 2, 2, ranks=(3, 1, 2, 0)), (2, 3, [0, 4])
    P_x, P_c = on_x.partition(P), on(1, 1, 4).partition(P)
    embed, norm = nn.DistributedPointwise(P_c, 3, 4), nn.DistributedInstanceNorm(P_x, 3)
    layers = {"embed": embed} | {
        name: nn.DistributedPointwise(P_x, 4, 3, replicated=True) for name in ("scale", "shift")
    }
    draw = np.random.default_rng(5).normal
    x, style, weight, time = draw(size=(2, 3, 4)), 1 + draw(size=(2, 3, 5)), draw(size=(2, 3, 4)), draw(size=(2, 3, 1))
    key = jax.random.key(1)
    params = {name: layer.init(key, float) for name, layer in layers.items()}
    params["time"] = jnp.asarray(time)
    specs = {name: layer.param_specs() for name, layer in layers.items()}
    specs["time"] = dj.TensorSpec(time.shape, P_x, replicated=True)

    def loss(params: Any, x: Any, style: Any) -> Any:
        time = jnp.tanh(embed(params["embed"], dj.replicated(params["time"], P_x)))
        scale, shift = (layers[name](params[name], time) for name in ("scale", "shift"))
        y = norm({}, jnp.sin((1 + scale) * x + shift))
        y = y * F.std(style, P_x, axes=2) + F.mean(style, P_x, axes=2)
        return jnp.sum(jnp.cos(y) * cut(weight, on_x, P.rank, sizes))

    def plain(params: Any, x: Any, style: Any) -> Any:
        def pointwise(name: str, x: Any) -> Any:
            return jnp.einsum("oi,nid->nod", params[name]["weight"], x) + params[name]["bias"][:, None]

        time = jnp.tanh(pointwise("embed", params["time"]))
        y = jnp.sin((1 + pointwise("scale", time)) * x + pointwise("shift", time))
        y = (y - y.mean(2, keepdims=True)) / jnp.sqrt(y.var(2, keepdims=True) + 1e-5)
        y = y * style.std(2, keepdims=True) + style.mean(2, keepdims=True)
        return jnp.sum(jnp.cos(y) * weight)

    own = cut(x, on_x, P.rank, sizes), cut(style, on_x, P.rank)
    value, (of_params, *of_tensors) = dj.jit(dj.value_and_grad(loss, (0, 1, 2)))(params, *own)
    gathered, slopes = dj.gather(params, specs), dj.gather(of_params, specs)
    both = P.broadcast_data(
        (jax.tree.map(np.asarray, gathered), jax.tree.map(np.asarray, slopes)) if P.rank == 0 else None
    )
    want, (its_params, *its_tensors) = jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(both[0], x, style)
    close(value, want, 1e-12, "value")
    jax.tree.map(lambda got, its: close(got, its, 1e-12, "parameters"), both[1], its_params)
    close(of_tensors[0], cut(np.asarray(its_tensors[0]), on_x, P.rank, sizes), 1e-12, "x")
    close(of_tensors[1], cut(np.asarray(its_tensors[1]), on_x, P.rank), 1e-12, "style")


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
    assert "`x` (4 x 3 x 4) must have length 4, `in_features`, in dimension 1, `dim`, but has [3] there." in sentence
