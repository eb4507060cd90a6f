"""Normalisations beside the sequential ones, however the tensor is split, and what batch normalisation keeps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix.partitions import On, on
from sequential import Beside, beside, check_beside, cut

import distdl_jax as dj
from distdl_jax import nn


def normalised(x: Any, axes: tuple[int, ...], eps: float = 1e-5) -> Any:
    return (x - x.mean(axes, keepdims=True)) / jnp.sqrt(x.var(axes, keepdims=True) + eps)


def scaled(params: Any, x: Any, axis: int = 1) -> Any:
    shape = [-1 if d == axis else 1 for d in range(x.ndim)]
    return x * params["weight"].reshape(shape) + params["bias"].reshape(shape) if params else x


def norm(kind: str, whole: Callable[[Any, Any], Any], P_x: On, sizes: Any, *args: Any, **options: Any) -> Beside:
    return beside(f"{kind}Norm", sizes, whole, P_x, *args, y_sizes=sizes, **options)


def batch_norm(P_x: On, *sizes: Any, **options: Any) -> Beside:
    channels = sizes[1] if isinstance(sizes[1], int) else sum(sizes[1])
    axes = tuple(d for d in range(len(sizes)) if d != 1)
    eps = options.get("eps", 1e-5)
    return norm("Batch", lambda params, x: scaled(params, normalised(x, axes, eps)), P_x, sizes, channels, **options)


def dims_of(shape: tuple[int, ...], options: Any) -> tuple[int, ...]:
    """The dimensions that a norm of features averages over: those of `dim`, or the last ones."""
    dim = options.get("dim", range(-len(shape), 0))
    return (dim,) if isinstance(dim, int) else tuple(dim)


def widened(params: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """Parameters of these dimensions, as they stand beside x."""
    others = [d for d in range(x.ndim) if d not in [axis % x.ndim for axis in axes]]
    return {name: jnp.expand_dims(its, others) for name, its in params.items()}


def layer_norm(P_x: On, shape: tuple[int, ...], *sizes: Any, **options: Any) -> Beside:
    axes = dims_of(shape, options)

    def whole(params: Any, x: Any) -> Any:
        wide = widened(params, x, axes)
        return normalised(x, axes) * wide.get("weight", 1.0) + wide.get("bias", 0.0)

    return norm("Layer", whole, P_x, sizes, shape, **options)


def rms_norm(P_x: On, shape: tuple[int, ...], *sizes: Any, **options: Any) -> Beside:
    axes = dims_of(shape, options)

    def whole(params: Any, x: Any) -> Any:
        return x / jnp.sqrt((x**2).mean(axes, keepdims=True) + 1e-6) * widened(params, x, axes).get("weight", 1.0)

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
    rms_norm(on(1, 2, 2), (3, 4), 2, 3, 4, elementwise_affine=False),
    layer_norm(on(1, 2, 2, ranks=(3, 1, 2, 0)), (5,), 2, 5, [0, 3], dim=1),
    rms_norm(on(2, 1, 2), (3, 4), 3, 4, [2, 1], dim=(1, 0), elementwise_affine=True),
    group_norm(on(1, 3, 1, ranks=(2, 0, 3)), 2, 2, 6, 3),
    group_norm(on(1, 2, 2), 3, 2, 6, [0, 5], affine=False),
    instance_norm(on(2, 1, 1, 2, ranks=(1, 0, 3, 2)), 2, 3, 3, [4, 1], affine=True),
    group_norm(on(1, 1, 2, 1, 1, 2), 2, 1, 4, 3, 1, 2, 3),
    *(batch_norm(on(2, 1, 1), n, 4, 3) for n in (0, 1)),  # of no sample on both workers, or on one
    *(layer_norm(on(2, 1), (4,), n, 4) for n in (0, 1)),
)


@pytest.mark.simulated(4)
def test_beside_the_sequential_ones() -> None:
    """Output and all gradients: channels, batch and features split, evenly or not, with empty blocks, on any teams."""
    check_beside(CASES)


@pytest.mark.simulated(4)
def test_without_cancellation() -> None:
    """A variance of 1 around a mean of 10^7: as exact as two passes over the whole are, in float32 too.

    Of a layer that keeps no statistics, which takes those of x in evaluation too.
    """
    P = dj.Partition()
    x = 1e7 + np.random.default_rng(0).standard_normal((64, 2))
    P_x = on(4, 1)
    layer = nn.DistributedBatchNorm(P_x.partition(P), 2, affine=False, eps=0.0, track_running_stats=False)
    assert layer.init_state() == layer.state_specs() == {}
    assert {*nn.DistributedLayerNorm(P_x.partition(P), 2, bias=False).init()} == {"weight"}
    apply = jax.jit(partial(layer, training=False))
    wide = apply({}, cut(x, P_x, P.rank))
    np.testing.assert_allclose(wide, cut(np.asarray(normalised(x, (0,), 0.0)), P_x, P.rank), atol=1e-8)
    single = (1e3 + np.random.default_rng(0).standard_normal((64, 2))).astype(np.float32)
    want = np.asarray(normalised(single.astype(float), (0,), 0.0))
    np.testing.assert_allclose(apply({}, cut(single, P_x, P.rank)), cut(want, P_x, P.rank), atol=5e-4)
    # Blocks of other means, whose rounding Chan's formula multiplies by their distance. The mean itself is rounded.
    apart = np.float32(1e6 + np.linspace(-2, 2, 64)[:, None] + np.random.default_rng(0).standard_normal((64, 2)))
    ys = P.allgather_data(np.asarray(apply({}, cut(apart, P_x, P.rank)), float))
    np.testing.assert_allclose(np.concatenate(ys).std(0), 1, rtol=1e-5)


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
    """Of three batches the running mean, and the unbiased variance; evaluation uses them, and changes nothing.

    Two layers of a network, one within another; no derivative goes through what they keep.
    """
    P, P_x = dj.Partition(), on(2, 2)
    layer = nn.DistributedBatchNorm(P_x.partition(P), 3, momentum=momentum)
    network = nn.Sequential(lambda x: 2 * x, nn.Sequential(layer, jnp.tanh), layer)
    params, state = network.init(jax.random.key(0), float), network.init_state(float)

    @dj.jit
    def step(state: Any, x: Any) -> Any:
        def of_state(params: Any) -> Any:
            y, new = network(params, x, state=state)
            return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(new) if leaf.dtype == float), (y, new)

        return dj.grad(of_state, has_aux=True)(params)

    running = [[np.zeros(3), np.ones(3)] for _ in range(2)]
    for number in range(3):
        x = np.random.default_rng(number).normal(2, 3, (5, 3))
        gradient, (y, state) = step(state, cut(x, P_x, P.rank))
        assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))
        weight, z = 1 / (number + 1) if momentum is None else momentum, 2 * x
        for moments in running:
            moments[0] += weight * (z.mean(0) - moments[0])
            moments[1] += weight * (z.var(0, ddof=1) - moments[1])
            z = np.tanh(normalised(z, (0,))) if moments is running[0] else normalised(z, (0,))
        np.testing.assert_allclose(y, cut(np.asarray(z), P_x, P.rank), atol=1e-12)
    for its, moments in zip((state[1][0], state[2]), running, strict=True):
        want = cut(np.stack(moments), on(1, 2), P.rank % 2)
        np.testing.assert_allclose(np.stack([its["running_mean"], its["running_var"]]), want, atol=1e-12)
        assert int(its["num_batches_tracked"]) == 3
    assert jax.tree.map(lambda spec: spec.local_shape, network.state_specs()) == jax.tree.map(np.shape, state)

    def of_y(x: Any, its: Any) -> Any:
        y = layer(params[2], x, state=its)
        return jnp.sum(jnp.sin(y if its is None else y[0]))

    slopes = [jax.jit(dj.grad(of_y))(cut(x, P_x, P.rank), its) for its in (None, state[2])]
    np.testing.assert_allclose(*slopes, rtol=0, atol=1e-14)  # they go through the batch's moments, kept or not
    evaluate = partial(layer, params[2], state=state[2], training=False)
    y, after = jax.jit(evaluate)(cut(x, P_x, P.rank))
    mean, variance = running[1]
    np.testing.assert_allclose(y, cut((x - mean) / np.sqrt(variance + 1e-5), P_x, P.rank), atol=1e-12)
    jax.tree.map(np.testing.assert_array_equal, after, state[2])
    evaluation = str(jax.make_jaxpr(evaluate)(y))
    assert "all_sum_reduce" not in evaluation and "allreduce" not in evaluation
    with pytest.raises(dj.InvalidArgumentError, match="`state` has 2 entries, but there are 3 layers"):
        network(params, cut(x, P_x, P.rank), state=state[:2])


@pytest.mark.simulated(2)
def test_refusals_when_it_is_called() -> None:
    P = dj.Partition()
    layer = nn.DistributedBatchNorm(P.grid([1, 2]), 3)
    params, state, x = layer.init(dtype=float), layer.init_state(float), jnp.ones((4, 2 - P.rank))
    some = {name: its for name, its in state.items() if name == "running_mean" or P.rank == 0}
    long = state | ({"running_mean": jnp.ones(3)} if P.rank else {})
    listed = [params["weight"]] if P.rank else params
    no_params = r"`params` is .*, but must be a dictionary of \['bias', 'weight'\]"
    for kind, sentence, work in (
        (dj.PlanError, r"`x` must have length 3 in dimension 1, balanced over 2 workers.*\[1, 2\]",
         lambda: layer(params, jnp.ones((4, 1 + P.rank)))),
        (dj.PlanError, "must hold real floating-point numbers, but is int32", lambda: layer(params, x.astype("int32"))),
        (dj.PlanError, r"`x` \(of shape \(1, 3\)\) must have more than one value per channel",
         lambda: layer(params, x[:1])),
        (dj.InvalidArgumentError, r"`state` \(=None\) must be given if `training` is False",
         lambda: layer(params, x, training=False)),
        *((dj.PlanError, 'On worker 1: `state` must hold "running_var" on every worker',
           lambda training=training: layer(params, x, state=some, training=training)) for training in (True, False)),
        *((dj.PlanError, r'On worker 1: `state\["running_mean"\]` has shape \(3,\), but this',
           lambda training=training: layer(params, x, state=long, training=training)) for training in (True, False)),
        (dj.InvalidTypeError, r"`state` \(=\[\]\) must be a dictionary, from `init_state` or",
         lambda: layer(params, x, state=[])),
        (dj.InvalidTypeError, no_params, lambda: layer(None if P.rank else params, x)),
        (dj.InvalidTypeError, no_params, lambda: layer(listed, x)),
    ):  # fmt: skip
        with pytest.raises(kind, match=sentence):
            work()


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


@pytest.mark.simulated(2)
def test_infinities_have_an_infinite_mean() -> None:
    """As in plain JAX, in which their variance is NaN; of nothing else."""
    P, P_x = dj.Partition(), on(2, 1)
    layer = nn.DistributedBatchNorm(P_x.partition(P), 3, momentum=1.0)
    x = np.arange(12.0).reshape(4, 3)
    x[1, 0], x[2, 1], x[3, 1] = np.inf, -np.inf, np.nan
    _, state = layer(layer.init(), cut(x, P_x, P.rank), state=layer.init_state(), training=True)
    np.testing.assert_allclose(state["running_mean"], x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(state["running_var"], jnp.var(jnp.asarray(x), 0, ddof=1), rtol=1e-6)
