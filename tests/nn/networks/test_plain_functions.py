"""Plain functions in networks: what works on each block alone is the sequential network's, or is refused."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
RIGHT: dict[str, Function] = {
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


@pytest.mark.simulated(4)
@pytest.mark.parametrize("name", RIGHT)
def test_what_works_on_whole_dimensions_is_what_one_worker_computes(name: str) -> None:
    P_x, layer = split(dj.Partition())
    x = np.random.default_rng(0).standard_normal((8, 12, 6))
    block, expected = dj.TensorSpec(x.shape, P_x).block(x), RIGHT[name](jnp.asarray(x))
    y = nn.Sequential(layer, RIGHT[name])(({}, {}), block)
    if not expected.ndim:
        assert np.isclose(sum(P_x.allgather_data(float(y))), float(expected))
        return
    assert np.array_equal(y, nn.Sequential(RIGHT[name], layer)(({}, {}), block))
    whole = dj.gather(y, dj.TensorSpec(expected.shape, P_x))
    assert P_x.rank != 0 or np.allclose(whole, expected, atol=1e-6)


WRONG: dict[str, tuple[Function, str, int]] = {
    "softmax": (partial(jax.nn.softmax, axis=1), "dj.functional.max", 1),
    "log_softmax": (partial(jax.nn.log_softmax, axis=0), "dj.functional.max", 0),
    "mean": (lambda x: x.mean((1, 2)), "dj.functional.mean", 1),
    "norm": (lambda x: x / jnp.linalg.norm(x), "sum` of x", 0),
    "max": (lambda x: x - x.max(1, keepdims=True), "dj.functional.max", 1),
    "argmax": (lambda x: jnp.argmax(x, 1), "dj.functional.argmax", 1),
    "any": (lambda x: x * jnp.any(x > 0, axis=0), "Repartition", 0),
    "flip": (lambda x: jnp.flip(x, 1), "Repartition", 1),
    "sort": (lambda x: jnp.sort(x, 0), "Repartition", 0),
    "median": (lambda x: jnp.median(x, 1), "Repartition", 1),
    "cumsum": (lambda x: jnp.cumsum(x, 1), "dj.functional.cumsum", 1),
    "roll": (lambda x: jnp.roll(x, 1, 0), "dj.functional.roll", 0),
    "diff": (lambda x: jnp.diff(x, axis=1), "halo_exchange", 1),
    "cross": (lambda x: jnp.cross(x[:, :3], x[:, 3:6], axis=1), "Repartition|Crop", 1),
    "first": (lambda x: x[:, 0], "halo_exchange", 1),
    "reversed": (lambda x: x[::-1], "Repartition", 0),
    "lookup": (lambda x: x[:, jnp.array([1, 0])], "dj.functional.take", 1),
    "along axis": (lambda x: jnp.take_along_axis(x, jnp.argmax(x, 1, keepdims=True), 1), "dj.functional.take", 1),
    "segments": (lambda x: jax.ops.segment_sum(x, jnp.zeros(len(x), int), 2), "segment_sum", 0),
    "set": (lambda x: x.at[0].set(1), "Repartition", 0),
    "matmul": (lambda x: jnp.einsum("btc,tu->buc", x, jnp.ones((x.shape[1], 6))), "nn.DistributedLinear", 1),
    "one-hot": (lambda x: jnp.einsum("btc,tu->buc", x, jax.nn.one_hot(jnp.arange(x.shape[1]), 6)), "Linear", 1),
    "pairs": (lambda x: x[:, :, None] - x[:, None], "Repartition", 1),
    "gram": (lambda x: jnp.einsum("btc,dtc->tbd", x, x), "nn.DistributedLinear", 0),
    "transposed": (lambda x: x[:4, :4] + x[:4, :4].swapaxes(0, 1), "Crop", 1),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0))), "nn.DistributedPad", 1),
    "concatenate": (lambda x: jnp.concatenate([x, x], axis=1), "nn.Concatenate", 1),
    "tile": (lambda x: jnp.tile(x, (2, 1, 1)), "Repartition", 0),
    "fft": (lambda x: jnp.fft.fft(x, axis=1).real, "dj.functional.fftn", 1),
    "pooling": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 1), (1, 1, 1), "SAME"), "pooling layer", 1),
    "convolution": (lambda x: lax.conv(x, jnp.ones((2, x.shape[1], 1)), (1,), "SAME"), "convolution", 1),
    "moving mean": (lambda x: jax.vmap(partial(jnp.convolve, v=jnp.ones(3), mode="same"))(x[..., 0]), "convolution", 1),
    "scan": (
        lambda x: lax.scan(lambda carry, row: (carry + row, carry), jnp.zeros(x.shape[1:]), x)[1],
        "associative_scan",
        0,
    ),
    "checkpoint": (jax.checkpoint(lambda x: x / x.sum(1, keepdims=True)), "dj.functional.sum", 1),
    "cond": (lambda x: lax.cond(jnp.array(True), lambda x: x - x.max(), jnp.cos, x), "dj.functional.max", 0),
    "resize": (lambda x: jax.image.resize(x, (4, 12, 6), "linear"), "nn.DistributedUpsample", 1),
    "vmap": (jax.vmap(lambda row: row / row.sum(0)), "dj.functional.sum", 1),
    "unstacked": (lambda x: jnp.stack(jnp.unstack(x, axis=1)[::-1], 1) * x, "halo_exchange", 1),
    "cond by a sum": (lambda x: lax.cond(x.sum(1).max() > 0, jnp.sin, jnp.cos, x), "dj.functional.max", 0),
    "switch by argmax": (lambda x: lax.switch(jnp.argmax(x) % 2, [jnp.sin, jnp.cos], x), "dj.functional.argmax", 0),
    "while": (lambda x: lax.while_loop(lambda x: x.max() > 1, lambda x: x / 2, x), "dj.functional.max", 0),
    "body of a while": (
        lambda x: lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] - s[1].sum(1)[:, None]), (0, x))[1],
        "dj.functional.sum",
        1,
    ),
    "sum by number": (lambda x: lax.fori_loop(0, x.shape[1], lambda i, y: y + x[:, i, None], 0 * x), "Repartition", 1),
    "glu": (partial(jax.nn.glu, axis=1), "Repartition", 1),
    "inverse": (lambda x: jnp.linalg.inv(jnp.eye(6) + x[:, :6, :6]), "Repartition", 1),
    "flattened": (lambda x: jnp.moveaxis(x, 2, 1).reshape(x.shape[0], -1), "nn.Flatten", 1),
}


@pytest.mark.simulated(4)
@pytest.mark.parametrize("name", WRONG)
def test_what_mixes_a_dimension_that_is_split_is_refused(name: str) -> None:
    """On all workers, after a layer and, where the function keeps dimensions, in front of one; not as `nn.Local`."""
    P_x, layer = split(dj.Partition())
    function, cure, dim = WRONG[name]
    x = dj.TensorSpec((8, 12, 6), P_x).block(np.ones((8, 12, 6)))
    after = [nn.Repartition(P_x.grid([2, 2]), P_x.grid([2, 2]))] if name == "flattened" else []
    with pytest.raises(dj.InvalidArgumentError, match=rf"dimension {dim} of the block.*over 2 workers.*{cure}"):
        network = nn.Sequential(layer, function, *after)
        network(network.init(jax.random.key(0)), x)
    if function(jnp.ones((8, 12, 6))).shape == (8, 12, 6):
        with pytest.raises(dj.InvalidArgumentError, match=f"dimension {dim} "):
            nn.Sequential(jax.nn.relu, function, layer)(({}, {}, {}), x)
    assert np.array_equal(nn.Sequential(layer, nn.Local(function))(({}, {}), x), function(x), equal_nan=True)


@pytest.mark.simulated(2)
@pytest.mark.parametrize("dim", [0, 1])
def test_what_mixes_the_other_dimensions_passes(dim: int) -> None:
    P_x = dj.Partition().grid([2, 1, 1] if dim == 1 else [1, 2, 1])
    layer, x = nn.Repartition(P_x, P_x), jnp.asarray(np.random.default_rng(0).standard_normal((6, 6, 6)))
    others = {"norm", "median", "gram", "cond", "cond by a sum", "switch by argmax", "while", "transposed"}
    for name in set(WRONG) - others - {"flattened", "convolution", "resize"}:
        function, _, mixed = WRONG[name]
        if mixed == dim:
            y = nn.Sequential(layer, function)(({}, {}), x)
            assert np.array_equal(y, function(x), equal_nan=True), name


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
    P = dj.Partition()
    P_x, P_y = P.grid([1, 2, 1]), P.grid([1, 1, 2])
    x = jnp.arange(8.0).reshape(2, 2, 2) + P.rank
    for function in (lambda x: jnp.swapaxes(x, 1, 2), lambda x: jnp.moveaxis(x, 0, 2), lambda x: x.T):
        turned = function(jnp.ones((1, 2, 3))).shape.index(2)
        for P_next in (P_x, P_y):
            network = nn.Sequential(nn.Repartition(P_x, P_x), function, nn.Repartition(P_next, P_next))
            if P_next.shape[turned] == 2:
                assert np.array_equal(network(({}, {}, {}), x), function(x))
            else:
                with pytest.raises(dj.InvalidArgumentError, match=rf"leaves dimension 1 .* as dimension {turned} of"):
                    network(({}, {}, {}), x)


@pytest.mark.simulated(2)
def test_what_follows_a_local_function_is_checked() -> None:
    P_x = dj.Partition().grid([1, 2])
    layer, x, local = nn.Repartition(P_x, P_x), jnp.ones((3, 2)), nn.Local(jax.nn.softmax)
    assert "softmax" in local.__name__ and local == nn.Local(jax.nn.softmax)  # type: ignore[attr-defined]
    with pytest.raises(dj.InvalidArgumentError, match=r"softmax works along dimension 1"):
        nn.Sequential(layer, local, jax.nn.softmax)(({}, {}, {}), x)
    others = jnp.sin, nn.Local(lambda x: x.sum(1)), lambda x: x / x.sum()  # whose dimensions nobody knows
    assert nn.Sequential(layer, local, *others)(({}, {}, {}, {}, {}), x).shape == (3,)
    with pytest.raises(dj.InvalidTypeError, match="function"):
        nn.Local(3)  # type: ignore[arg-type]


@pytest.mark.simulated(3)
def test_workers_without_a_block_are_told() -> None:
    """The function runs between two teams; a function outside of both is nobody's."""
    P = dj.Partition()
    one, two = P.grid([1, 2]), P.grid([1, 1], [2])
    network = nn.Sequential(nn.Repartition(one, one), jax.nn.softmax, nn.Repartition(one, two))
    x = jnp.ones((3, 2)) if one.active else dj.zero_volume_tensor(3)
    with pytest.raises(dj.InvalidArgumentError, match=r"softmax.*dimension 1"):
        jax.jit(network)(({}, {}, {}), x)
    y = nn.Sequential(nn.Repartition(one, one), lambda x: x * 2, nn.Repartition(one, two))(({}, {}, {}), x)
    assert not two.active or np.array_equal(y, 2 * np.ones((3, 4)))


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
    linear, spec = nn.DistributedLinear(P_x, P_x, P_x, 8, 8), dj.TensorSpec((3, 8), P_x)
    functions, x = nn.Sequential(jnp.tanh, jax.nn.softmax), jnp.ones((3, 2))
    along_features = partial(jax.nn.softmax, axis=2)
    for network, its in (
        (nn.Sequential(linear, functions, jnp.sin), x),
        (nn.Sequential(linear, nn.Remat(nn.Residual(functions))), x),
        (nn.Residual(functions, shortcut=linear), x),
        (nn.Sequential(nn.Input(spec), functions), x),
        (nn.Sequential(functions, x_spec=spec), x),
        (nn.DistributedFNOBlock(P_x.grid([1, 1, 4]), 2, 2, (2,), along_features), jnp.ones((1, 2, 2))),
    ):
        with pytest.raises(
            dj.InvalidArgumentError,
            match=r"works along dimension [12] of the block .reduce_max.*Use `dj.functional.max`",
        ):
            network(network.init(jax.random.key(0)), its)


@pytest.mark.simulated(2)
def test_map_blocks_refuses_what_uses_a_part_for_the_whole() -> None:
    P = dj.Partition()
    P_x, x, weights = P.grid([1, 2]), jnp.ones((3, 2)), jnp.ones((2, 5))
    for wrong in (partial(jax.nn.softmax, axis=1), lambda x: x / x.sum(), lambda x: jnp.roll(x, 1, 1)):
        with pytest.raises(dj.InvalidArgumentError, match=r"dimension [01] of the block"):
            dj.map_blocks(wrong, P_x)(x)
        assert np.array_equal(dj.map_blocks(nn.Local(wrong), P_x)(x), wrong(x))
    for right in (lambda x: x.sum(1), jnp.mean, lambda x: (x @ weights, x.sum(0)), jax.nn.gelu):
        assert jax.tree.map(jnp.shape, dj.map_blocks(right, P_x)(x)) == jax.tree.map(jnp.shape, right(x))
    assert dj.map_blocks(lambda x, w: x @ (w / w.sum(1, keepdims=True)), P_x)(x, weights).shape == (3, 5)
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
