"""What is worked out again, and in which precision, changes neither values nor gradients beyond that precision."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from blocks import block_of
from matrix.partitions import on
from sequential import Beside, check_beside, close

import distdl_jax as dj
from distdl_jax import nn

P_x, P_n = on(1, 2, ranks=(1, 0)), on(2, 1)


def inner(P: dj.Partition) -> nn.Sequential:
    """A network with a state, random numbers, and weights that are split."""
    return nn.Sequential(
        nn.DistributedBatchNorm(P_n.partition(P), 5),
        nn.DistributedLinear(P_n.partition(P), P_n.partition(P), on(2, 1, 1).partition(P), 5, 4),
        jnp.tanh,
        nn.Dropout(P_n.partition(P), 0.5),
    )


def row_parallel(P: dj.Partition, features: int) -> nn.DistributedLinear:
    return nn.DistributedLinear(P_x.partition(P), on(1, 1).partition(P), on(1, 2).partition(P), features, 4)


def loss(network: Any, params: Any, x: Any, state: Any, key: Any) -> Any:
    y, state = network(params, x, state=state, key=key, training=True)
    return jnp.sum(jnp.sin(y).astype(float)), state


@pytest.mark.simulated(2)
def test_remat_changes_nothing() -> None:
    """Bit for bit, state and random numbers too; and less is kept. In a network it is a layer like others."""
    P, policy = dj.Partition(), jax.checkpoint_policies.dots_saveable
    whole = lambda p, x: x @ p["weight"].T + p["bias"]  # noqa: E731
    check_beside([Beside("remat", (3, 5), lambda P: nn.Remat(row_parallel(P, 5), policy), whole, P_x, on(1, 1))])
    plain, remat = inner(P), nn.Sequential(nn.Remat(inner(P)))
    held = {rank: dj.ShapeDtype((2 - rank, 5), np.dtype(float)) for rank in range(2)}
    assert remat.draws and remat.layers[0].plan(held).outputs[1].shape == (1, 4)
    params, state = plain.init(jax.random.key(0), float), plain.init_state(float)
    jax.tree.map(np.testing.assert_array_equal, params, nn.Remat(plain).init(jax.random.key(0), float))
    x, key = np.random.default_rng(P.rank).normal(size=(2 - P.rank, 5)), jax.random.key(1)
    key_inside = jax.random.split(key, 1)[0]

    @dj.jit
    def both(params: Any, state: Any, x: Any) -> Any:
        differentiate = dj.value_and_grad(loss, argnums=1, has_aux=True)
        return differentiate(plain, params, x, state, key_inside), differentiate(remat, (params,), x, (state,), key)

    ((value, its), of_plain), ((again, (mine,)), (of_remat,)) = both(params, state, x)
    assert float(value) == float(again)
    jax.tree.map(np.testing.assert_array_equal, its, mine)
    jax.tree.map(lambda a, b: close(a, b, 1e-14, "gradient"), of_plain, of_remat)


@pytest.mark.simulated(2)
def test_precision() -> None:
    """Arithmetic in bfloat16 is that of rounded parameters and inputs; gradients arrive in the parameters' dtype."""
    P = dj.Partition()
    layer = row_parallel(P, 6)
    half, params = nn.Precision(layer), layer.init(jax.random.key(0))
    x = np.random.default_rng(P.rank).normal(size=(5, 3)).astype(np.float32)
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, jnp.asarray(x)))

    @dj.jit
    def run(*both: Any) -> Any:
        pairs = [jax.vjp(f, *given) for f, given in zip((half, layer), both, strict=True)]
        return [(y, pullback(jnp.ones_like(y))) for y, pullback in pairs]

    got, want = run((params, x), narrow)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {np.dtype(np.float32)}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(np.float32)), got, want)
    held = {rank: dj.ShapeDtype(x.shape, np.dtype(np.float32)) for rank in range(2)}
    assert half.plan(held).outputs[0] == dj.ShapeDtype((5, 4), np.dtype(np.float32))
    assert nn.Precision(layer, output="float16").plan(held).outputs[0].dtype == np.float16


@pytest.mark.simulated(2)
def test_a_loss_scale_decides_the_same_on_all_workers() -> None:
    """A gradient that overflows on one worker alone leaves out that step everywhere; copies stay equal."""
    P, optimiser = dj.Partition(), optax.adam(0.1)
    scale = dj.optim.LossScale(initial=2.0**16, period=2)

    @dj.jit
    def step(w: Any, state: Any, moments: Any) -> Any:
        def part(w: Any) -> Any:
            w = dj.replicated(w, P)
            return scale.scaled(jnp.sum(w.astype(jnp.float16) ** 2) if P.rank else 0.0, state)

        gradient, finite = scale.unscaled(dj.grad(part)(w), state)
        updates, new = optimiser.update(gradient, moments, w)
        w, moments = scale.chosen(finite, (optax.apply_updates(w, updates), new), (w, moments))
        return w, scale.next(state, finite), moments, finite

    w = jnp.ones(2)
    state, moments, found = scale.init(), optimiser.init(jnp.ones(2)), []
    for _ in range(4):
        w, state, moments, finite = step(w, state, moments)
        found.append((bool(finite), float(state["scale"]), *map(float, w)))
    assert P.allgather_data(found) == [found, found]
    assert [finite for finite, *_ in found] == [False, False, True, True]
    assert [its for _, its, *_ in found] == [2.0**15, 2.0**14, 2.0**14, 2.0**15]
    assert found[0][2] == 1.0 and found[2][2] < 1.0
    for worker in range(2):
        finite = dj.optim.all_finite([jnp.array([1.0, np.nan if P.rank == worker else 0.0])])
        assert not bool(finite), worker


def test_a_loss_scale_stays_within_bounds() -> None:
    """It grows after each `period` of good steps, to what float32 holds, and shrinks to 1; nothing raises it to 1."""
    for scale, steps, wanted in (
        (dj.optim.LossScale(initial=2.0, factor=4.0, period=2), (1, 1, 1, 1, 0, 1, 0, 0), [2, 8, 8, 32, 8, 8, 2, 1]),
        (dj.optim.LossScale(initial=0.25, period=1), (0, 1, 1, 0, 0, 0), [0.25, 0.5, 1, 0.5, 0.25, 0.25]),
    ):
        state, step, found = scale.init(), jax.jit(scale.next), []
        for finite in steps:
            state = step(state, bool(finite))
            found.append(float(state["scale"]))
        assert found == wanted
    largest = {"scale": jnp.float32(2.0**127), "good_steps": jnp.int32(1)}
    assert float(step(largest, True)["scale"]) == 2.0**127


def test_a_loss_scale_takes_a_plain_number() -> None:
    """What a worker without a part of the loss returns."""
    scale = dj.optim.LossScale(initial=8.0)
    for loss, want in ((0.0, 0), (2, 16), (np.float16(0.5), 4)):
        scaled = scale.scaled(loss, scale.init())
        assert scaled == want and scaled.dtype == np.float32
    with pytest.raises(dj.InvalidTypeError, match=r"`loss` \(=None\) must be a real number"):
        scale.scaled(None, scale.init())  # type: ignore[arg-type]


def test_half_precisions_are_accumulated_in_float32() -> None:
    """In float16 2048 + 1 is 2048."""
    batches = jnp.array([2048, 1, 1, 2046], jnp.float16)
    value, gradient = jax.jit(dj.optim.accumulated(lambda w, x: (w * x, x)))(jnp.float16(1), batches)
    assert value.dtype == gradient.dtype == jnp.float16 and value == gradient == 1024


@pytest.mark.simulated(2)
def test_accumulated_gradients() -> None:
    """Of batches one after the other as of all at once, of which one worker has no data; differentiable in turn."""
    P = dj.Partition()
    layer = row_parallel(P, 6)
    specs, x = layer.param_specs(), np.random.default_rng(0).normal(size=(3, 4, 6))
    whole = {name: np.random.default_rng(1).normal(size=spec.global_shape) for name, spec in specs.items()}
    mine = np.array_split(x, 2, axis=2)[P_x.ranks.index(P.rank)]

    def part(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(layer(params, x))) / 4

    step = dj.optim.accumulated(dj.value_and_grad(part))
    params = jax.tree.map(block_of, whole, specs)

    def of_gradient(params: Any) -> Any:
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(step(params, mine)[1]))

    (value, gradient), twice = dj.jit(lambda params: (step(params, mine), dj.grad(of_gradient)(params)))(params)

    def plain(params: Any) -> Any:
        return jnp.sum(jnp.sin(x.reshape(12, 6) @ params["weight"].T + params["bias"])) / 12

    def squares(params: Any) -> Any:
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(jax.grad(plain)(params)))

    want, wanted = jax.value_and_grad(plain)(whole)
    close(value, want, 1e-12, "value")
    jax.tree.map(lambda a, b, spec: close(a, block_of(b, spec), 1e-12, "gradient"), gradient, wanted, specs)
    jax.tree.map(lambda a, b, spec: close(a, block_of(b, spec), 1e-12, "twice"), twice, jax.grad(squares)(whole), specs)


def test_refusals() -> None:
    for sentence, work in (
        ("`layer` (=3) must be a layer.", lambda: nn.Remat(3)),
        ("`policy` (=1) must be one of jax.checkpoint_policies, or None.", lambda: nn.Remat(nn.Sequential(), 1)),
        ("`compute` (='int32') must be a floating dtype.", lambda: nn.Precision(nn.Sequential(), "int32")),
        ("`factor` (=1.0) must be a finite number above 1.", lambda: dj.optim.LossScale(factor=1.0)),
        ("`initial` (=0) must be a number above 0 that float32 can hold.", lambda: dj.optim.LossScale(initial=0)),
        ("`batches` must hold the same number of batches",
         lambda: dj.optim.accumulated(lambda p, x: (0.0, p))(1.0, (np.ones((2, 3)), np.ones((3, 2))))),
    ):  # fmt: skip
        with pytest.raises((dj.InvalidArgumentError, dj.InvalidTypeError)) as error:
            work()
        assert sentence in str(error.value)
