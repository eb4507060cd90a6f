"""Normalisations beside the sequential ones, however the tensor is split, and what batch normalisation keeps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from launcher.examples import LONG
from matrix.partitions import On, on
from sequential import Beside, check_beside, cut

import distdl_jax as dj
from distdl_jax import nn


def normalised(x: Any, axes: tuple[int, ...], eps: float = 1e-5) -> Any:
    return (x - x.mean(axes, keepdims=True)) / jnp.sqrt(x.var(axes, keepdims=True) + eps)


def scaled(params: Any, x: Any, axis: int = 1) -> Any:
    shape = [-1 if d == axis else 1 for d in range(x.ndim)]
    return x * params["weight"].reshape(shape) + params["bias"].reshape(shape) if params else x


def norm(kind: str, whole: Callable[[Any, Any], Any], P_x: On, sizes: Any, *args: Any, **options: Any) -> Beside:
    """The normalisation `kind` with these arguments, and the same of the whole."""
    layer_type = getattr(nn, f"Distributed{kind}Norm")
    name = f"{kind} {args} {sizes} {P_x} {options}"
    return Beside(name, sizes, lambda P: layer_type(P_x.partition(P), *args, **options), whole, P_x, y_sizes=sizes)


def batch_norm(P_x: On, *sizes: Any, **options: Any) -> Beside:
    channels = sizes[1] if isinstance(sizes[1], int) else sum(sizes[1])
    axes = tuple(d for d in range(len(sizes)) if d != 1)
    eps = options.get("eps", 1e-5)
    return norm("Batch", lambda params, x: scaled(params, normalised(x, axes, eps)), P_x, sizes, channels, **options)


def dims_of(shape: tuple[int, ...], options: Any) -> tuple[int, ...]:
    """The dimensions that a norm of features averages over: those of `dim`, or the last ones."""
    dim = options.get("dim", range(-len(shape), 0))
    return (dim,) if isinstance(dim, int) else tuple(dim)


def others(x: Any, axes: tuple[int, ...]) -> list[int]:
    return [d for d in range(x.ndim) if d not in [axis % x.ndim for axis in axes]]


def layer_norm(P_x: On, shape: tuple[int, ...], *sizes: Any, **options: Any) -> Beside:
    axes = dims_of(shape, options)

    def whole(params: Any, x: Any) -> Any:
        wide = {name: jnp.expand_dims(its, others(x, axes)) for name, its in params.items()}
        return normalised(x, axes) * wide.get("weight", 1.0) + wide.get("bias", 0.0)

    return norm("Layer", whole, P_x, sizes, shape, **options)


def rms_norm(P_x: On, shape: tuple[int, ...], *sizes: Any, **options: Any) -> Beside:
    axes = dims_of(shape, options)

    def whole(params: Any, x: Any) -> Any:
        weight = jnp.expand_dims(params["weight"], others(x, axes)) if params else 1.0
        return x / jnp.sqrt((x**2).mean(axes, keepdims=True) + 1e-6) * weight

    return norm("RMS", whole, P_x, sizes, shape, **options)


def group_norm(P_x: On, groups: int, *sizes: Any, **options: Any) -> Beside:
    def whole(params: Any, x: Any) -> Any:
        grouped = x.reshape(x.shape[0], groups, -1)
        return scaled(params, normalised(grouped, (2,)).reshape(x.shape))

    return norm("Group", whole, P_x, sizes, groups, sizes[1], **options)


def instance_norm(P_x: On, *sizes: Any, **options: Any) -> Beside:
    axes = tuple(range(2, len(sizes)))
    return norm("Instance", lambda params, x: scaled(params, normalised(x, axes)), P_x, sizes, sizes[1], **options)


CASES = (
    batch_norm(on(2, 2, ranks=(3, 1, 2, 0)), 5, 3),
    batch_norm(on(2, 1, 2), [0, 4], 2, [1, 3], eps=1e-3),
    layer_norm(on(1, 1, 3, ranks=(3, 0, 1)), (3, 2), 2, 3, 2),
    rms_norm(on(2, 2), (5,), 3, 5),
    layer_norm(on(1, 2, 2, ranks=(3, 1, 2, 0)), (5,), 2, 5, [0, 3], dim=1),
    rms_norm(on(2, 1, 2), (3, 4), 3, 4, [2, 1], dim=(1, 0), elementwise_affine=True),
    group_norm(on(1, 3, 1, ranks=(2, 0, 3)), 2, 2, 6, 3),
    group_norm(on(1, 2, 2), 3, 2, 6, [0, 5], affine=False),
    instance_norm(on(2, 1, 1, 2, ranks=(1, 0, 3, 2)), 2, 3, 3, [4, 1], affine=True),
    group_norm(on(1, 1, 2, 1, 1, 2), 2, 1, 4, 3, 1, 2, 3),
    *(batch_norm(on(2, 1, 1), n, 4, 3) for n in (0, 1)),  # of no sample on both workers, or on one
    *(layer_norm(on(2, 1), (4,), n, 4) for n in (0, 1)),
)
MORE = (
    batch_norm(on(1, 3, 1, 1, ranks=(2, 0, 3)), 2, 2, 3, 2, affine=False),
    rms_norm(on(1, 2, 2), (3, 4), 2, 3, 4, elementwise_affine=False),
    layer_norm(on(2, 2, 1), (4,), [3, 0], 3, 4, bias=False),
    layer_norm(on(1, 1, 2, 2), (2, 4), 2, 2, 3, 4, dim=(-1, 1)),
    layer_norm(on(1, 4), (3,), 2, 3, elementwise_affine=False),
    group_norm(on(1, 4), 1, 3, 5),
    batch_norm(on(1, 1, 1, 2, 2, 1), 2, 2, 2, 3, 2, 2),
    instance_norm(on(1, 2, 1, 1, 2, 1), 2, 3, 2, 1, 3, 2),
    layer_norm(on(1, 1, 2, 1, 1, 2), (2, 2, 3, 2, 3), 2, 2, 2, 3, 2, 3),
)


@pytest.mark.simulated(4)
def test_beside_the_sequential_ones() -> None:
    """Output and all gradients: channels, batch and features split, evenly or not, with empty blocks, on any teams."""
    check_beside(CASES if LONG == 1 else CASES + MORE)


@pytest.mark.simulated(4)
def test_without_cancellation() -> None:
    """A variance of 1 around a mean of 10^7: as exact as two passes over the whole are, in float32 too.

    Of a layer that keeps no statistics, which takes those of x in evaluation too.
    """
    P = dj.Partition()
    x = 1e7 + np.random.default_rng(0).standard_normal((64, 2))
    P_x = on(4, 1)
    layer = nn.DistributedBatchNorm(P_x.partition(P), 2, affine=False, eps=0.0, track_running_stats=False)
    apply = jax.jit(partial(layer, training=False))
    wide = apply({}, cut(x, P_x, P.rank))
    np.testing.assert_allclose(wide, cut(np.asarray(normalised(x, (0,), 0.0)), P_x, P.rank), atol=1e-8)
    single = (1e3 + np.random.default_rng(0).standard_normal((64, 2))).astype(np.float32)
    want = np.asarray(normalised(single.astype(float), (0,), 0.0))
    np.testing.assert_allclose(apply({}, cut(single, P_x, P.rank)), cut(want, P_x, P.rank), atol=5e-4)


@pytest.mark.simulated(4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precisions_are_summed_in_float32(dtype: str) -> None:
    """3,000 numbers of 100 and 102: their sum is beyond float16, and their variance beyond bfloat16's digits."""
    P, P_x = dj.Partition(), on(4, 1)
    x = np.tile([100.0, 102.0], 1500)[:, None]
    layer = nn.DistributedBatchNorm(P_x.partition(P), 1)
    params = jax.tree.map(lambda p: p.astype(dtype), layer.init())
    y = jax.jit(layer)(params, jnp.asarray(cut(x, P_x, P.rank), dtype))
    assert y.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(y, np.asarray(cut(np.tile([-1.0, 1.0], 1500)[:, None], P_x, P.rank)))


@pytest.mark.simulated(4)
@pytest.mark.parametrize("momentum", [0.3, None])
def test_running_statistics(momentum: float | None) -> None:
    """Of three batches the running mean, and the unbiased variance; evaluation uses them, and changes nothing."""
    P, P_x = dj.Partition(), on(2, 2)
    layer = nn.DistributedBatchNorm(P_x.partition(P), 3, momentum=momentum)
    params, state = layer.init(jax.random.key(0), float), layer.init_state(float)
    step = dj.jit(lambda state, x, training: layer(params, x, state=state, training=training), static_argnums=2)
    mean, variance = np.zeros(3), np.ones(3)
    for number in range(3):
        x = np.random.default_rng(number).normal(2, 3, (5, 3))
        y, state = step(state, cut(x, P_x, P.rank), True)
        weight = 1 / (number + 1) if momentum is None else momentum
        mean += weight * (x.mean(0) - mean)
        variance += weight * (x.var(0, ddof=1) - variance)
        np.testing.assert_allclose(y, cut(np.asarray(normalised(x, (0,))), P_x, P.rank), atol=1e-12)
    its = cut(np.stack([mean, variance]), on(1, 2), P_x.grid.ravel()[P.rank] % 2)
    np.testing.assert_allclose(np.stack([state["running_mean"], state["running_var"]]), its, atol=1e-12)
    assert int(state["num_batches_tracked"]) == 3
    specs = layer.state_specs()
    assert jax.tree.map(lambda spec: spec.local_shape, specs) == jax.tree.map(np.shape, state)
    y, after = step(state, cut(x, P_x, P.rank), False)
    np.testing.assert_allclose(y, cut((x - mean) / np.sqrt(variance + 1e-5), P_x, P.rank), atol=1e-12)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    evaluation = jax.make_jaxpr(lambda x: layer(params, x, state=state, training=False))(y)
    assert "all_gather" not in str(evaluation) and "moments" not in str(evaluation)


@pytest.mark.simulated(4)
def test_a_network_threads_its_states() -> None:
    """Trained with batch normalisation between linear layers, nested too, as plain JAX trains it; then evaluated."""
    P = dj.Partition()
    P_x, P_W = on(2, 2).partition(P), on(2, 2, 1).partition(P)
    P_y = on(2, 2).partition(P)
    linear = nn.DistributedLinear(on(2, 1, ranks=(0, 2)).partition(P), P_y, P_W, 3, 4)
    network = nn.Sequential(
        linear, nn.Sequential(nn.DistributedBatchNorm(P_x, 4), jnp.tanh), nn.DistributedBatchNorm(P_x, 4, affine=False)
    )
    params, state = network.init(jax.random.key(0), float), network.init_state(float)
    x = np.random.default_rng(0).standard_normal((6, 3))
    own = cut(x, on(2, 1, ranks=(0, 2)), P.rank)
    own = dj.zero_volume_tensor(3, float) if own is None else own
    optimiser = optax.sgd(0.1)

    @dj.jit
    def step(params: Any, state: Any) -> Any:
        def loss(params: Any) -> Any:
            y, new = network(params, own, state=state)
            moments = sum(jnp.sum(its) for its in jax.tree.leaves(new) if its.dtype == float)
            # 0, and so is its derivative: the state has none.
            return jnp.sum(jnp.sin(y) ** 2) + moments - jax.lax.stop_gradient(moments), new

        (value, new), gradient = dj.value_and_grad(loss, has_aux=True)(params)
        return optax.apply_updates(params, optimiser.update(gradient, optimiser.init(params))[0]), new, value

    specs = network.param_specs()
    plain_params = dj.gather(params, specs)
    plain_state = [np.zeros((2, 4)), np.ones((2, 4))]

    def plain(params: Any, x: Any) -> Any:
        first, (norm, _), _ = params
        y = x @ first["weight"].T + first["bias"]
        z = jnp.tanh(scaled(norm, normalised(y, (0,))))
        return normalised(z, (0,)), [
            jnp.stack([u.mean(0) for u in (y, z)]),
            jnp.stack([u.var(0, ddof=1) for u in (y, z)]),
        ]

    differentiated = jax.jit(
        jax.value_and_grad(lambda p: (jnp.sum(jnp.sin((out := plain(p, x))[0]) ** 2), out[1]), has_aux=True)
    )
    for _ in range(3):
        params, state, value = step(params, state)
        if P.rank == 0:
            (want, moments), gradient = differentiated(plain_params)
            plain_params = jax.tree.map(lambda p, g: p - 0.1 * g, plain_params, gradient)
            plain_state = [0.9 * old + 0.1 * new for old, new in zip(plain_state, moments, strict=True)]
            np.testing.assert_allclose(value, want, rtol=1e-11)
    whole_params, whole_state = dj.gather(params, specs), dj.gather(state, network.state_specs())
    evaluated = dj.jit(lambda p, s: network(p, own, state=s, training=False))(params, state)
    assert jax.tree.map(np.shape, evaluated[1]) == jax.tree.map(np.shape, state)
    if P.rank == 0:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), whole_params, plain_params)
        means = np.stack([whole_state[1][0]["running_mean"], whole_state[2]["running_mean"]])
        np.testing.assert_allclose(means, plain_state[0], atol=1e-11)
        np.testing.assert_allclose(whole_state[1][0]["running_var"], plain_state[1][0], atol=1e-11)
    with pytest.raises(dj.InvalidArgumentError, match="`state` has 2 entries, but there are 3 layers"):
        network(params, own, state=state[:2])


@pytest.mark.simulated(2)
def test_refusals_when_it_is_called() -> None:
    P = dj.Partition()
    P_x = P.grid([1, 2])
    layer = nn.DistributedBatchNorm(P_x, 3)
    params = layer.init(dtype=float)
    with pytest.raises(dj.PlanError, match=r"`x` must have length 3 in dimension 1, balanced over 2 workers.*\[1, 2\]"):
        layer(params, jnp.ones((4, 1 + P.rank)))
    with pytest.raises(dj.PlanError, match="must hold real floating-point numbers, but is int32"):
        layer(params, jnp.ones((4, 2 - P.rank), "int32"))
    with pytest.raises(dj.PlanError, match=r"`x` \(of shape \(1, 3\)\) must have more than one value per channel"):
        layer(params, jnp.ones((1, 2 - P.rank)))
    with pytest.raises(dj.InvalidArgumentError, match=r"`state` \(=None\) must be given if `training` is False"):
        layer(params, jnp.ones((4, 2 - P.rank)), training=False)
    x, state = jnp.ones((4, 2 - P.rank)), layer.init_state(float)
    some = {name: its for name, its in state.items() if name == "running_mean" or P.rank == 0}
    for training in (True, False):
        with pytest.raises(dj.PlanError, match='On worker 1: `state` must hold "running_var" on every worker'):
            layer(params, x, state=some, training=training)
        with pytest.raises(dj.PlanError, match=r'On worker 1: `state\["running_mean"\]` has shape \(3,\), but this'):
            layer(params, x, state=state | ({"running_mean": jnp.ones(3)} if P.rank else {}), training=training)
    with pytest.raises(dj.InvalidTypeError, match=r"`state` \(=\[\]\) must be a dictionary, from `init_state` or"):
        layer(params, x, state=[])
    for wrong in (None, [params["weight"]]):
        with pytest.raises(
            dj.InvalidTypeError, match=r"`params` is .*, but must be a dictionary of \['bias', 'weight'\]"
        ):
            layer(wrong if P.rank else params, x)


def test_a_layer_has_the_state_and_the_parameters_that_it_needs() -> None:
    P_x = on(1, 1).partition(dj.planning_world(1))
    layer = nn.DistributedBatchNorm(P_x, 2, track_running_stats=False)
    assert layer.init_state() == layer.state_specs() == {}
    assert {*nn.DistributedLayerNorm(P_x, 2, bias=False).init()} == {"weight"}


def of_ones(function: Any) -> Any:
    """Its result, and the gradients where that of the result is 1."""

    def both(*args: Any) -> Any:
        y, pullback = jax.vjp(function, *args)
        return y, pullback(jnp.ones_like(y))

    return both


@pytest.mark.simulated(2)
def test_a_variance_that_overflows_leaves_numbers() -> None:
    """As in plain JAX: y and the gradients are 0, where the variance of a row is beyond its dtype."""
    P_x = on(1, 2).partition(dj.Partition())
    layer = nn.DistributedLayerNorm(P_x, 4)
    x = jnp.float32([[1e30, -2e30], [1.0, 2.0]]) * (1 if P_x.rank else -1)
    y, (dparams, dx) = jax.jit(of_ones(layer.apply))(layer.init(), x)
    assert not y[0].any() and not dx[0].any() and np.isfinite(dx).all() and np.isfinite(dparams["weight"]).all()


@pytest.mark.simulated(2)
def test_an_infinity_makes_nan_of_its_row() -> None:
    """And of the whole gradient of that row, as in plain JAX; of nothing else. With another row, and alone."""
    P, P_x = dj.Partition(), on(1, 2)
    layer = nn.DistributedRMSNorm(P_x.partition(P), 4)
    two = np.array([[1.0, 2.0, 3.0, np.inf], [1.0, 2.0, 3.0, 4.0]])
    params, wholes = layer.init(None, float), [two, two[:1]]
    sequential = rms_norm(P_x, (4,), 2, 4).whole
    want = jax.jit(lambda xs: [of_ones(lambda x: sequential({}, x))(x) for x in xs])(wholes)
    blocks = [cut(x, P_x, P.rank) for x in wholes]
    got = jax.jit(lambda xs: [of_ones(lambda x: layer(params, x))(x) for x in xs])(blocks)
    for mine, whole in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, cut(np.asarray(whole), P_x, P.rank), atol=1e-12)
