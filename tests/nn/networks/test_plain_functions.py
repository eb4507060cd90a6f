"""Plain functions in networks: results and gradients are those of the sequential network."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax import nn
from distdl_jax.tracing.program_reader import read_program
from distdl_jax.watchdog.programs.ir import Operation

Function = Callable[[jax.Array], jax.Array]


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def filled(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, x.shape[0], lambda i, y: y.at[i].set(jnp.sin(x[i])), jnp.zeros_like(x))


def written_in_place(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, x.shape[1], lambda i, y: y.at[:, i].set(y[:, i] * 2 + x[:, i]), x)


def root(a: jax.Array) -> jax.Array:
    return lax.while_loop(lambda y: jnp.abs(y * y - a) > 1e-9, lambda y: (y + a / y) / 2, a)


def pooled(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID")


# x is 8 x 12 x 6, and split over two workers in dimension 0 and two in dimension 1.
ALONG_WHOLE: dict[str, Function] = {
    "gelu": jax.nn.gelu,
    "cast": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    "where": lambda x: jnp.where(x > 0, x, jnp.expm1(3 * x**2 - jnp.arange(6.0) + jnp.ones((1, 1, 6)))),
    "dropout": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 1.0, x.shape), x, 0),
    "softmax": jax.nn.softmax,
    "standardize": jax.nn.standardize,
    "matmul": lambda x: x @ jnp.arange(18.0).reshape(6, 3),
    "einsum": lambda x: jnp.einsum("btc,dc->btd", x, jnp.arange(18.0).reshape(3, 6)),
    "squares": lambda x: jnp.einsum("btc,btc->bt", x, x)[..., None],
    "flip": lambda x: jnp.flip(x, -1),
    "sort": lambda x: jnp.sort(x, -1),
    "median": lambda x: jnp.median(x, -1, keepdims=True),
    "cumsum": lambda x: jnp.cumsum(x, axis=-1),
    "roll": lambda x: jnp.roll(x, 2, axis=2),
    "pad": lambda x: jnp.pad(x, ((0, 0), (0, 0), (1, 2))),
    "glu": jax.nn.glu,
    "index": lambda x: x[..., 2:3],
    "indices": lambda x: x[:, :, jnp.array([4, 0])],
    "one-hot": lambda x: jax.nn.one_hot(jnp.argmax(x, axis=-1), 6),
    "along axis": lambda x: jnp.take_along_axis(x, jnp.argmax(x, axis=-1, keepdims=True), axis=-1),
    "positions": lambda x: x[jnp.arange(x.shape[0]), :, jnp.zeros(x.shape[0], int)][..., None],
    "set": lambda x: x.at[..., 0].set(1),
    "fft": lambda x: jnp.fft.fft(x, axis=-1).real,
    "inverse": lambda x: jnp.linalg.solve(jnp.eye(3) + x[..., :3, None] * x[..., None, :3], x[..., :3, None])[..., 0],
    "vmap": jax.vmap(jax.vmap(lambda row: row / jnp.linalg.norm(row))),
    "map in batches": lambda x: lax.map(jnp.sin, x, batch_size=2),
    "scan": lambda x: lax.scan(lambda y, row: (y + row, None), 0 * x[..., 0], jnp.moveaxis(x, -1, 0))[0][..., None],
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(x) * 2),
    "cond": lambda x: lax.cond(jnp.array(True), jnp.sin, jnp.cos, x),
    "while": lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.cos(s[1])), (0, x))[1],
    "one by one": filled,
    "in place": written_in_place,
    "masked": lambda x: lax.fori_loop(
        0, x.shape[0], lambda i, y: jnp.where(jnp.arange(x.shape[0])[:, None, None] == i, jnp.sin(x[i]), y), x
    ),
    "branches of rows": lambda x: lax.fori_loop(
        0, x.shape[0], lambda i, y: lax.cond(x[i, 0, 0] == 7, lambda y: y, lambda y: y.at[i].add(1), y), x
    ),
    "mapped by number": lambda x: lax.map(lambda i: jnp.sin(x[i]), jnp.arange(x.shape[0])),
    "roots": lambda x: jax.vmap(jax.vmap(jax.vmap(root)))(jnp.abs(x) + 1),
    "unstacked": lambda x: sum(jnp.unstack(x, axis=2))[..., None] * x,
    "a cond by its shape": lambda x: lax.cond(x.shape[2] == 6, jnp.sin, jnp.cos, x),
    "custom_vjp": doubled,
    "jit": jax.jit(lambda x: jnp.tanh(x) + 1),
    "there and back": lambda x: (jnp.swapaxes(x, 0, 1) * 2).swapaxes(0, 1),
    "merged and cut": lambda x: jnp.tanh(x.reshape(-1, 6)).reshape(*x.shape[:2], 3, 2).sum(-1),
    "heads": lambda x: jnp.moveaxis(x.reshape(*x.shape[:2], 2, 3), 2, 0).mean(0),
    "patches": lambda x: x.reshape(x.shape[0], -1, 2, 6).mean(2),
    "pooling": pooled,
    "repeat": lambda x: jnp.repeat(x, 2, axis=1),
    "another axis": lambda x: x[:, :, None].repeat(2, 2).max(2),
    "loss": lambda x: jnp.sum(x**2) / 576,
}  # fmt: skip


def split(P: dj.Partition) -> tuple[dj.CartesianPartition, nn.Layer]:
    P_x = P.grid([2, 2, 1])
    return P_x, nn.Repartition(P_x, P_x)


NO_GRADIENT = {"while", "roots", "while, split", "body of a while, split"}
"""Loops of unknown length."""

ALONG_SPLIT: dict[str, Function] = {
    "softmax": partial(jax.nn.softmax, axis=1),
    "log_softmax": partial(jax.nn.log_softmax, axis=0),
    "mean": lambda x: x.mean((1, 2)),
    "norm": lambda x: x / jnp.linalg.norm(x),
    "max": lambda x: x - x.max(1, keepdims=True),
    "argmax": lambda x: jnp.argmax(x, 1),
    "any": lambda x: x * jnp.any(x > 0, axis=0),
    "flip": lambda x: jnp.flip(x, 1),
    "sort": lambda x: jnp.sort(x, 0),
    "median": lambda x: jnp.median(x, 1),
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "roll": lambda x: jnp.roll(x, 1, 0),
    "diff": lambda x: jnp.diff(x, axis=1),
    "cross": lambda x: jnp.cross(x[:, :3], x[:, 3:6], axis=1),
    "first": lambda x: x[:, 0],
    "reversed": lambda x: x[::-1],
    "lookup": lambda x: x[:, jnp.array([1, 0])],
    "along axis": lambda x: jnp.take_along_axis(x, jnp.argmax(x, 1, keepdims=True), 1),
    "segments": lambda x: jax.ops.segment_sum(x, jnp.zeros(len(x), int), 2),
    "set": lambda x: x.at[0].set(1),
    "matmul": lambda x: jnp.einsum("btc,tu->buc", x, jnp.ones((x.shape[1], 6))),
    "one-hot": lambda x: jnp.einsum("btc,tu->buc", x, jax.nn.one_hot(jnp.arange(x.shape[1]), 6)),
    "pairs": lambda x: x[:, :, None] - x[:, None],
    "gram": lambda x: jnp.einsum("btc,dtc->tbd", x, x),
    "transposed": lambda x: x[:4, :4] + x[:4, :4].swapaxes(0, 1),
    "pad": lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0))),
    "concatenate": lambda x: jnp.concatenate([x, x], axis=1),
    "tile": lambda x: jnp.tile(x, (2, 1, 1)),
    "fft": lambda x: jnp.fft.fft(x, axis=1).real,
    "pooling": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 1), (1, 1, 1), "SAME"),
    "convolution": lambda x: lax.conv(x, jnp.ones((2, x.shape[1], 1)), (1,), "SAME"),
    "moving mean": lambda x: jax.vmap(partial(jnp.convolve, v=jnp.ones(3), mode="same"))(x[..., 0]),
    "scan": lambda x: lax.scan(lambda carry, row: (carry + row, carry), jnp.zeros(x.shape[1:]), x)[1],
    "checkpoint": jax.checkpoint(lambda x: x / x.sum(1, keepdims=True)),
    "cond": lambda x: lax.cond(jnp.array(True), lambda x: x - x.max(), jnp.cos, x),
    "resize": lambda x: jax.image.resize(x, (4, 12, 6), "linear"),
    "vmap": jax.vmap(lambda row: row / row.sum(0)),
    "unstacked": lambda x: jnp.stack(jnp.unstack(x, axis=1)[::-1], 1) * x,
    "cond by a sum": lambda x: lax.cond(x.sum(1).max() > 0, jnp.sin, jnp.cos, x),
    "switch by argmax": lambda x: lax.switch(jnp.argmax(x) % 2, [jnp.sin, jnp.cos], x),
    "while": lambda x: lax.while_loop(lambda x: x.max() > 1, lambda x: x / 2, x),
    "body of a while": lambda x: lax.while_loop(
        lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] - s[1].sum(1)[:, None]), (0, x)
    )[1],
    "sum by number": lambda x: lax.fori_loop(0, x.shape[1], lambda i, y: y + x[:, i, None], 0 * x),
    "glu": partial(jax.nn.glu, axis=1),
    "inverse": lambda x: jnp.linalg.inv(jnp.eye(6) + x[:, :6, :6]),
    "flattened": lambda x: jnp.moveaxis(x, 2, 1).reshape(x.shape[0], -1),
}  # fmt: skip


FUNCTIONS = ALONG_WHOLE | {f"{name}, split": function for name, function in ALONG_SPLIT.items()}


def sent_by(function: Function, x: jax.Array) -> list[Operation]:
    """Return this worker's messages."""
    read = read_program(dj.Partition().world.transport, jax.make_jaxpr(function)(x).jaxpr)
    return [operation for operation in read if isinstance(operation, Operation)]


def is_a_block_of(y: np.ndarray, whole: np.ndarray) -> bool:
    """Say whether an array is a balanced block of another: in each dimension whole, or a half by an index of two."""
    halves = [[slice(None)] if n == m else [slice(0, -(-m // 2)), slice(-(-m // 2), m)]
              for n, m in zip(y.shape, whole.shape, strict=True)]  # fmt: skip
    return any(
        np.shape(whole[box]) == y.shape and np.allclose(y, whole[box], atol=1e-9, equal_nan=True)
        for box in product(*halves)
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_those_of_whole_arrays(name: str) -> None:
    """Along split dimensions and others; a number is a term. As `nn.Local` they are those of each block."""
    function = FUNCTIONS[name]
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((8, 12, 6))
        expected = np.asarray(function(jnp.asarray(x)))
        dy = np.random.default_rng(1).standard_normal(expected.shape)
        has_gradient = name not in NO_GRADIENT and np.issubdtype(expected.dtype, np.floating)
        gradient = jax.grad(lambda x: jnp.sum(function(x) * dy))(jnp.asarray(x)) if has_gradient else None

        def program() -> Any:
            P_x, layer = split(dj.Partition())
            spec, params = dj.TensorSpec(x.shape, P_x), ({}, {})
            block, network = spec.block(x), nn.Sequential(layer, function)
            y = network(params, block)
            if expected.ndim == 3:
                out = dj.TensorSpec(expected.shape, P_x)
                np.testing.assert_allclose(y, out.block(expected), rtol=1e-9, atol=1e-9)
            if has_gradient and expected.ndim in (0, 3):
                of_y = out.block(dy) if expected.ndim else dy
                found = dj.grad(lambda x: jnp.sum(network(params, x) * of_y))(block)
                np.testing.assert_allclose(found, spec.block(gradient), rtol=1e-9, atol=1e-9)
            if name == "softmax, split":
                local = nn.Sequential(layer, nn.Local(function))(params, block)
                np.testing.assert_array_equal(local, function(block))
            return np.asarray(y)

        ys = dj.simulate(4, program)
    if not expected.ndim:
        assert np.isclose(sum(ys), expected)
    elif expected.ndim != 3:  # as they fall
        assert all(is_a_block_of(y, expected) for y in ys)


def test_a_gradient_through_copies_is_refused() -> None:
    """A result of fewer dimensions has copies: which of them count is unclear."""

    def program() -> None:
        _, layer = split(dj.Partition())
        network, x = nn.Sequential(layer, lambda x: x.mean((1, 2))), jnp.ones((4, 6, 6))
        assert network(({}, {}), x).shape == (4,)
        with pytest.raises(dj.PlanError, match="workers have copies"):
            dj.grad(lambda x: jnp.sum(network(({}, {}), x)))(x)

    dj.simulate(4, program)


@pytest.mark.simulated(2)
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 2, 4), (2, 1, 4)])
def test_merged_dimensions_of_length_1_pass(shape: tuple[int, ...]) -> None:
    """Also where a single worker's block has a single token, or none."""
    P_x, W = dj.Partition().grid([1, 2, 1]), np.random.default_rng(0).standard_normal((4, 4))
    spec, x = dj.TensorSpec(shape, P_x), np.random.default_rng(1).standard_normal(shape)
    for function in (
        lambda y: jnp.einsum("be,ef->bf", y, W),
        lambda y: (y - y.mean(1, keepdims=True)) / (y.var(1, keepdims=True) + 1),
        jax.vmap(jax.nn.softmax),
        lambda y: jax.nn.softmax(y.reshape(-1, 2, 2) @ y.reshape(-1, 2, 2), -1).reshape(-1, 4),
    ):

        def tokens(x: jax.Array, function: Function = function) -> jax.Array:
            return function(x.reshape(-1, 4)).reshape(x.shape)

        for network in (nn.Sequential(tokens, x_spec=spec).apply, lambda _, x, f=tokens: dj.map_blocks(f, P_x)(x)):
            y = dj.gather(network(({},), spec.block(x)), spec)
            assert P_x.rank or np.allclose(y, tokens(jnp.asarray(x)))


@pytest.mark.simulated(2)
def test_dimensions_are_turned_to_fit_the_next_layer() -> None:
    """Without a message, if they fall as it takes them."""
    P = dj.Partition()
    P_x, P_y = P.grid([1, 2, 1]), P.grid([1, 1, 2])
    whole = np.arange(24.0).reshape(2, 3, 4)
    x = dj.TensorSpec(whole.shape, P_x).block(whole)
    for function in (lambda x: jnp.swapaxes(x, 1, 2), lambda x: jnp.moveaxis(x, 0, 2), lambda x: x.T):
        expected = function(jnp.asarray(whole))
        turned = function(jnp.ones((1, 2, 3))).shape.index(2)
        for P_next in (P_x, P_y):
            network = nn.Sequential(nn.Repartition(P_x, P_x), function, nn.Repartition(P_next, P_next))
            y = network(({}, {}, {}), x)
            assert np.array_equal(y, dj.TensorSpec(expected.shape, P_next).block(expected))
            assert bool(sent_by(partial(network, ({}, {}, {})), x)) == (P_next.shape[turned] != 2)


@pytest.mark.simulated(2)
def test_what_follows_a_local_function_is_one_of_whole_arrays() -> None:
    P = dj.Partition()
    P_x = P.grid([1, 2])
    layer, x, local = nn.Repartition(P_x, P_x), jnp.ones((3, 2)), nn.Local(jax.nn.softmax)
    assert "softmax" in local.__name__ and local == nn.Local(jax.nn.softmax)  # type: ignore[attr-defined]
    y = nn.Sequential(layer, local, jax.nn.softmax)(({}, {}, {}), x * (1 + P.rank) * jnp.arange(2))
    both = jnp.concatenate([jax.nn.softmax(k * jnp.arange(2.0)) for k in (1, 2)])
    np.testing.assert_allclose(y[0], jax.nn.softmax(both)[2 * P.rank :][:2], rtol=1e-6)
    others = jnp.sin, nn.Local(lambda x: x.sum(1)), lambda x: x / x.sum()  # whose dimensions nobody knows
    assert nn.Sequential(layer, local, *others)(({}, {}, {}, {}, {}), x).shape == (3,)
    with pytest.raises(dj.InvalidTypeError, match="function"):
        nn.Local(3)  # type: ignore[arg-type]


@pytest.mark.simulated(3)
def test_workers_without_a_block_take_part() -> None:
    """The function runs between two teams; a function outside of both is nobody's."""
    P = dj.Partition()
    one, two = P.grid([1, 2]), P.grid([1, 1], [2])
    whole = jnp.arange(12.0).reshape(3, 4)
    x = dj.TensorSpec((3, 4), one).block(whole)
    for function in (jax.nn.softmax, lambda x: x * 2, lambda x: x[:, :3]):
        network = nn.Sequential(nn.Repartition(one, one), function, nn.Repartition(one, two))
        y = jax.jit(network)(({}, {}, {}), x)
        assert not two.active or np.allclose(y, function(whole))


@pytest.mark.simulated(2)
def test_functions_that_move_data_and_sums_that_a_layer_adds_pass() -> None:
    P = dj.Partition()
    P_x = P.grid([1, 2])
    layer, x = nn.Repartition(P_x, P_x), jnp.arange(6.0).reshape(3, 2) + 2 * P.rank

    def softmax(x: jax.Array) -> jax.Array:
        e = jnp.exp(x - F.max(x, P_x, 1))
        return e / F.sum(e, P_x, 1)

    y = dj.jit(nn.Sequential(layer, softmax))(({}, {}), x)
    y, whole = (dj.gather(its, dj.TensorSpec((3, 4), P_x)) for its in (y, x))
    assert P.rank or np.allclose(y, jax.nn.softmax(whole, axis=1))
    sums = nn.Sequential(layer, lambda x: x.sum(1, keepdims=True), nn.AllSumReduce(P_x, (1,)))(({}, {}, {}), x)
    assert np.allclose(sums, sum(P.allgather_data(np.asarray(x.sum(1, keepdims=True)))))


@pytest.mark.simulated(4)
def test_networks_within_networks_know_the_partition() -> None:
    P_x = dj.Partition().grid([1, 4])
    spec = dj.TensorSpec((3, 8), P_x)
    linear, whole = nn.DistributedLinear(P_x, P_x, P_x, 8, 8, bias=False), jnp.arange(24.0).reshape(3, 8) / 9
    functions, x, of_linear = nn.Sequential(jnp.tanh, jax.nn.softmax), spec.block(whole), None
    for network, function in (
        (nn.Sequential(linear, functions, jnp.sin), lambda y: jnp.sin(jax.nn.softmax(jnp.tanh(y)))),
        (nn.Sequential(linear, nn.Remat(nn.Residual(functions))), lambda y: jax.nn.softmax(jnp.tanh(y)) + y),
        (nn.Sequential(nn.Input(spec), functions), None),
        (nn.Sequential(functions, x_spec=spec), None),
    ):
        params = network.init(jax.random.key(0))
        y = dj.jit(network)(params, x)
        of_linear = whole if function is None else jnp.concatenate(P_x.allgather_data(linear(params[0], x)), 1)
        expected = jax.nn.softmax(jnp.tanh(whole)) if function is None else function(of_linear)
        np.testing.assert_allclose(y, spec.block(expected), rtol=1e-5)
    way = nn.Residual(functions, shortcut=linear)
    params = way.init(jax.random.key(0))
    expected = spec.block(jax.nn.softmax(jnp.tanh(whole))) + linear(params["shortcut"], x)
    np.testing.assert_allclose(way(params, x), expected, rtol=1e-5)


@pytest.mark.simulated(4)
def test_activations_of_layers_are_functions_of_whole_arrays() -> None:
    """Of a block of a Fourier neural operator; of scales, of which workers along the other dimensions have copies."""
    P = dj.Partition()
    P_x, whole = P.grid([1, 1, 4]), jnp.arange(16.0).reshape(1, 2, 8) / 9
    block, plain = (
        nn.DistributedFNOBlock(P_x, 2, 2, (2,), activation) for activation in (partial(jax.nn.softmax, axis=2), None)
    )
    params, spec = block.init(jax.random.key(0)), dj.TensorSpec(whole.shape, P_x)
    before = plain(params, spec.block(whole))
    sums = dj.all_reduce(jnp.exp(before).sum(2, keepdims=True), P_x)
    np.testing.assert_allclose(block(params, spec.block(whole)), jnp.exp(before) / sums, rtol=1e-5)
    P_c, x = P.grid([1, 2, 2]), np.random.default_rng(0).normal(size=(2, 4, 6)).astype(np.float32)
    scaling = nn.DistributedSqueezeExcitation(P_c, 4, 4, activation=jax.nn.softmax, scale_activation=jnp.tanh)
    params, spec = scaling.init(jax.random.key(0)), dj.TensorSpec(x.shape, P_c)
    assert np.isfinite(scaling(params, spec.block(x))).all()


@pytest.mark.simulated(2)
def test_map_blocks_of_one_tensor_is_a_function_of_it() -> None:
    P = dj.Partition()
    P_x, whole = P.grid([1, 2]), jnp.arange(12.0).reshape(3, 4)
    spec = dj.TensorSpec(whole.shape, P_x)
    x = spec.block(whole)
    for mixing in (partial(jax.nn.softmax, axis=1), lambda x: x / x.sum(), lambda x: jnp.roll(x, 1, 1)):
        np.testing.assert_allclose(dj.map_blocks(mixing, P_x)(x), spec.block(mixing(whole)), rtol=1e-5)
        assert np.array_equal(dj.map_blocks(nn.Local(mixing), P_x)(x), mixing(x))
    for adds in (lambda x: x.sum(1), jnp.mean, jnp.max, lambda x: (x.sum(0), x.sum(1), x.max(1))):
        y = dj.map_blocks(adds, P_x)(x)
        for part, expected in zip(jax.tree.leaves(y), jax.tree.leaves(adds(whole)), strict=True):
            if part.shape == (2,):
                assert np.array_equal(part, expected[2 * P.rank :][:2])
            else:  # terms
                np.testing.assert_allclose(sum(P.allgather_data(np.asarray(part))), expected, rtol=1e-6)


@pytest.mark.simulated(2)
def test_functions_of_several_blocks_are_called_on_them_or_refused() -> None:
    """Whether others are blocks or copies is unclear; and so it is of what is closed over."""
    P = dj.Partition()
    P_x, x, weights = P.grid([1, 2]), jnp.ones((3, 2)), jnp.ones((2, 5))
    own = jnp.ones((3, 2)) + P.rank
    assert dj.map_blocks(lambda x, w: x @ (w / w.sum(1, keepdims=True)), P_x)(x, weights).shape == (3, 5)
    assert dj.map_blocks(lambda x: (x @ weights, x.sum(0)), P_x)(x)[0].shape == (3, 5)
    layer = nn.Repartition(P_x, P_x)
    assert np.array_equal(nn.Sequential(layer, lambda x: x + own)(({}, {}), x), x + own)
    refused = (
        lambda: dj.map_blocks(lambda x, b: jax.nn.softmax(x + b, axis=1), P_x)(x, x),
        lambda: dj.map_blocks(lambda x: jax.nn.softmax(x @ weights.T.T[:, :2], axis=1) + own * x.max(1)[:, None], P_x)(
            x
        ),
        lambda: nn.Sequential(layer, lambda x: jax.nn.softmax(x + own, axis=1))(({}, {}), x),
    )
    for call in refused:
        with pytest.raises(dj.InvalidArgumentError, match=r"dimension 1 over 2 workers.*`dj.distribute`.*nn.Local"):
            call()
    with pytest.raises(dj.PlanError, match="on worker 2, which is outside of its partition"):
        dj.map_blocks(lambda y: y**2, dj.planning_world(3, 2).grid([2, 1]))(jnp.ones((3, 4)))


@dataclass
class Scaled:
    """Unhashable, as a dataclass that may change is; a function of an array, or an initializer."""

    factor: float

    def __call__(self, *args: Any) -> jax.Array:
        return self.factor * (jnp.ones(args[1], args[2]) if len(args) == 3 else args[0])


@pytest.mark.simulated(2)
@pytest.mark.parametrize("function", [Scaled(-3.0), eqx.nn.PReLU(0.5)], ids=["dataclass", "equinox"])
def test_functions_that_are_unhashable_are_called_like_others(function: Any) -> None:
    P = dj.Partition()
    P_x, rows = P.grid([2, 1]), jnp.arange(-3.0, 3).reshape(2, 3) + P.rank
    network = nn.Sequential(nn.Repartition(P_x, P_x), nn.Sequential(function))
    params = network.init(jax.random.key(0))
    for way in (network, nn.Remat(network), nn.Sequential(network[0], nn.Local(function))):
        for call in (way, dj.jit(way)):
            np.testing.assert_array_equal(call(params, rows), function(rows))
    slope = dj.jit(dj.grad(lambda x: jnp.sum(network(params, x))))(rows)
    np.testing.assert_allclose(slope, jax.grad(lambda x: jnp.sum(function(x)))(rows), 1e-6)
    for call in (dj.map_blocks(function, P_x), dj.jit(dj.map_blocks(function, P_x))):
        np.testing.assert_array_equal(call(rows), function(rows))
    scaling = nn.DistributedSqueezeExcitation(P.grid([1, 2, 1]), 2, 2, activation=function)
    x = jnp.ones((1, 1, 3))
    assert dj.jit(scaling)(scaling.init(jax.random.key(0)), x).shape == x.shape


def test_an_initializer_may_be_unhashable() -> None:
    P = dj.planning_world(2, 1).grid([2])
    block = dj.init_block(Scaled(2.0), jax.random.key(0), dj.TensorSpec((5,), P))
    np.testing.assert_array_equal(block, [2.0, 2.0])


@pytest.mark.simulated(3)
def test_a_whole_array_in_place_of_a_block_is_refused() -> None:
    """On all workers of the network, also where a single one passes it; a batch of another length is not."""
    P = dj.Partition()
    P_x, P_y = P.grid([1, 2]), P.grid([1, 1], [2])
    spec, whole = dj.TensorSpec((3, 8), P_x), jnp.arange(24.0).reshape(3, 8)
    layers, block = (nn.Repartition(P_x, P_y), jnp.sin), spec.block(whole)
    network = nn.Sequential(*layers, x_spec=spec)
    for its, params in ((network, ({}, {})), (nn.Sequential(nn.Input(spec), *layers), ({}, {}, {}))):
        y = jax.jit(its)(params, block)
        assert not P_y.active or np.array_equal(y, jnp.sin(whole))
        with pytest.raises(dj.PlanError, match=r"worker 1: `x` is 3 x 8, the whole tensor.*`spec.block\(x\)`"):
            jax.jit(its.apply)(params, whole if P.rank == 1 else block)
        with pytest.raises(dj.PlanError, match=r"`x` is 3 x 2, but must be this worker's block of .*3 x 4"):
            its(params, block[:, :2])
        assert its(params, block[:2]).ndim == 2  # a last batch of two samples
    assert network[:1].x_spec == spec and network[1:].x_spec is None
    assert nn.Sequential(*network, x_spec=dj.TensorSpec((2, 8), P_x))(({}, {}), block[:2]).ndim == 2
    with pytest.raises(dj.PlanError, match="whole tensor"):
        nn.Input(spec).plan({worker: dj.ShapeDtype((3, 8), np.dtype("float32")) for worker in range(2)})
    for wrong in (lambda: nn.Input(P_x), lambda: nn.Sequential(*layers, x_spec=3)):  # type: ignore[arg-type]
        with pytest.raises(dj.InvalidTypeError, match="TensorSpec"):
            wrong()
    rows = nn.Sequential(jnp.sin, x_spec=dj.TensorSpec((4, 8), P.grid([2, 1])))
    for length in (1, 2, 5, 11):  # but one whose block has the shape of the whole tensor
        x = dj.TensorSpec((length, 8), P.grid([2, 1])).block(jnp.ones((length, 8)))
        assert rows(({},), x).shape == x.shape
