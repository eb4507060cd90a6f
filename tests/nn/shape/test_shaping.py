"""Layers that change shapes beside the sequential ones: output and gradients, however the tensor is split."""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from jax import lax
from launcher.examples import LONG
from matrix.partitions import On, on
from sequential import Beside, beside, check_beside, close, cut

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.functional.sampling import Taps


def transposed(
    sizes: Any, P_x: On, *others: On, channels: int = 3, kernel: tuple[int, ...], extra: Any = 0, **options: Any
) -> Beside:
    """The adjoint of a plain convolution of the output, as JAX transposes it."""
    dims, groups = len(kernel), options.get("groups", 1)
    stride, dilation = (options.get(name, (1,) * dims) for name in ("stride", "dilation"))
    padding = [(p, p) for p in options.get("padding", (0,) * dims)]

    def whole(params: Any, x: Any) -> Any:
        along = zip(x.shape[2:], stride, padding, dilation, kernel, np.broadcast_to(extra, dims).tolist(), strict=True)
        lengths = [(n - 1) * s - 2 * p[0] + d * (k - 1) + 1 + e for n, s, p, d, k, e in along]

        def convolved(y: Any) -> Any:
            y = lax.conv_general_dilated(
                y, params["weight"], stride, padding, rhs_dilation=dilation, feature_group_count=groups
            )
            return y[tuple(map(slice, x.shape))]  # it may end before the outputs do

        y = jax.ShapeDtypeStruct((x.shape[0], channels, *lengths), float)
        return jax.linear_transpose(convolved, y)(x)[0] + params["bias"].reshape(-1, *(1,) * dims)

    given = {"in_channels": sizes[1], "out_channels": channels, "kernel_size": kernel, "output_padding": extra}
    return beside(f"ConvTranspose{dims}d", sizes, whole, P_x, *(others or [None]), **given, **options)


def upsample(sizes: Any, P_x: On, P_y: On | None = None, **options: Any) -> Beside:
    """Along each dimension a matrix, from PyTorch's formulas."""

    def matrix(n: int, d: int) -> np.ndarray:
        scale = options.get("scale_factor")
        m = int(n * scale) if scale else options["size"][d]
        result = np.zeros((m, n))
        for o in range(m):
            if options.get("mode", "nearest") == "nearest":
                result[o, min(int(o / scale) if scale else o * n // m, n - 1)] = 1
                continue
            if options["mode"] == "nearest-exact":
                result[o, min(int((o + 0.5) / scale if scale else Fraction(2 * o + 1, 2 * m) * n), n - 1)] = 1
                continue
            if options.get("align_corners"):
                place = o * (n - 1) / max(m - 1, 1)
            else:
                place = max((o + 0.5) * (1 / scale if scale else n / m) - 0.5, 0)
            low = min(int(place), n - 1)
            result[o, low] += 1 - (place - low)
            result[o, min(low + 1, n - 1)] += place - low
        return result

    def whole(params: Any, x: Any) -> Any:
        for d in range(2, x.ndim):
            x = jnp.moveaxis(jnp.tensordot(x, matrix(x.shape[d], d - 2), (d, 1)), -1, d)
        return x

    return beside("Upsample", sizes, whole, P_x, P_y, **options)


def adaptive(sizes: Any, P_x: On, *output: int | None) -> Beside:
    def whole(params: Any, x: Any) -> Any:
        for d, m in enumerate(output, 2):
            n = x.shape[d]
            if m is not None:
                windows = [x.take(jnp.arange(o * n // m, -(-(o + 1) * n // m)), d).mean(d) for o in range(m)]
                x = jnp.stack(windows, d)
        return x

    return beside("AdaptiveAvgPool", sizes, whole, P_x, output)


def pad(sizes: Any, P_x: On, *pairs: tuple[int, int], mode: str = "constant", value: float = 0.0) -> Beside:
    def whole(params: Any, x: Any) -> Any:
        widths = [(0, 0)] * (x.ndim - len(pairs)) + list(pairs)
        if min(min(pair) for pair in pairs) < 0:
            return lax.pad(x, value, [(*pair, 0) for pair in widths])
        options = {"constant_values": value} if mode == "constant" else {}
        return jnp.pad(x, widths, mode={"replicate": "edge", "circular": "wrap"}.get(mode, mode), **options)

    return beside("Pad", sizes, whole, P_x, pairs, mode, value)


def reshape(kind: str, sizes: Any, P_x: On, P_y: On, *shape: int) -> Beside:
    """`Reshape` to this shape, `Unflatten` of features to it, or `Flatten`."""

    def whole(params: Any, x: Any) -> Any:
        return x.reshape({"Reshape": shape, "Unflatten": (len(x), *shape), "Flatten": (len(x), -1)}[kind])

    return beside(kind, sizes, whole, P_x, P_y, *([shape] if shape else []))


def global_pool(kind: str, sizes: Any, P_x: On, copies: bool = False) -> Beside:
    """With copies the output is compared as a tensor of as many features as there are workers along them."""

    def whole(params: Any, x: Any) -> Any:
        of = jnp.mean if kind == "Avg" else jnp.max
        y = of(x, tuple(range(2, x.ndim)), keepdims=True)
        return jnp.broadcast_to(y, (*y.shape[:2], *P_x.shape[2:])) if copies else y

    # Below 0: no zero is the largest.
    return beside(f"Global{kind}Pool", sizes, whole, P_x, copies, offset=-3.0)


CASES = (
    transposed((2, 3, 5), on(1, 1, 3, ranks=(3, 1, 0)), kernel=(3,), stride=(2,), padding=(1,), extra=1),
    transposed((2, 3, 3), on(1, 2, 1), on(1, 2, 1, ranks=(3, 2)), on(2, 2, 1), kernel=(2,), stride=(3,), channels=5),
    transposed((2, 4, 5), on(1, 2, 1), on(1, 2, 1), on(2, 1, 1), kernel=(3,), groups=2, stride=(2,), channels=6),
    transposed((1, 2, 5), on(1, 1, 2), kernel=(2,), dilation=(3,), channels=2),
    transposed((3, 2, 4), on(2, 1, 2), kernel=(3,), channels=2, sharded=True),
    transposed((1, 2, 2, 3, 2, 2), on(1, 1, 2, 1, 1, 2), kernel=(2, 1, 2, 3), stride=(2, 1, 1, 2), extra=(1, 0, 0, 1)),
    transposed((2, 2, 3, [0, 4]), on(1, 1, 2, 2), kernel=(3, 2), dilation=(2, 1), stride=(1, 2), padding=(2, 0)),
    upsample((2, 3, 5), on(1, 2, 2), on(2, 1, 1, ranks=(3, 0)), size=(7,), mode="linear"),
    upsample((1, 2, 2, 3, 2, [1, 3]), on(1, 1, 2, 1, 1, 2), size=(3, 3, 4, 5), mode="linear"),
    upsample((2, 2, [1, 0, 4]), on(1, 1, 3), size=(4,), mode="linear", align_corners=True),
    adaptive((2, 3, 7, 4), on(1, 1, 2, 2), 3, None),
    *(adaptive((n, 1, 10), on(2, 1, 1), 2) for n in (0, 1)),  # of no sample on both workers, or on one
    pad((3, 2, 5), on(1, 1, 4), (2, 3), value=1.5),
    pad((3, 5), on(1, 3, ranks=(2, 0, 3)), (2, 4), mode="circular"),
    pad((3, 2, 4), on(1, 2, 2), (1, 0), (3, 2), mode="reflect"),
    pad((2, 3, 5), on(2, 1, 2), (4, 1), mode="replicate"),
    pad((1, 2, 3, 3, 2, 5), on(1, 1, 3, 1, 1, 1), (-1, 0), (0, 2), (0, -1), (-2, -1)),
    reshape("Flatten", (4, 3, 5), on(1, 2, 2, ranks=(3, 1, 2, 0)), on(2, 2)),
    reshape("Unflatten", (4, 15), on(1, 3), on(2, 1, 2), 3, 5),
    reshape("Reshape", (3, 5, 4), on(1, 2, 2, ranks=(3, 1, 2, 0)), on(2, 2), 4, -1),
    reshape("Reshape", (2, [0, 3], 70), on(1, 2, 2), on(3, ranks=(3, 1, 0)), 420),
    global_pool("Avg", (2, 3, 4, 3), on(1, 2, 2, 1)),
    global_pool("Max", (3, 2, [2, 0, 3]), on(1, 1, 3, ranks=(2, 0, 3))),
    global_pool("Avg", (2, 3, [0, 4]), on(1, 2, 2, ranks=(3, 1, 2, 0)), copies=True),
    global_pool("Max", (2, 3, [2, 0], 2), on(1, 1, 2, 2), copies=True),
)


@pytest.mark.simulated(4)
def test_beside_the_sequential_ones() -> None:
    """Output and gradients: everything split, evenly or not, with empty blocks, on any teams."""
    check_beside(CASES)


ONE_4D = on(1, 1, 1, 1)
TRANSPOSED = (  # on one worker: kernels as long as the stride, shorter and longer, with and without padding
    transposed((2, 4, 4, 5), ONE_4D, channels=6, kernel=(2, 2), stride=(2, 2)),
    transposed((2, 2, 3, 4), ONE_4D, channels=2, kernel=(2, 1), stride=(3, 4), padding=(1, 0), extra=(2, 0)),
    transposed((2, 4, 5, 3), ONE_4D, channels=2, kernel=(3, 5), stride=(2, 3), padding=(1, 4), extra=(1, 2)),
    transposed((2, 4, 6), on(1, 1, 1), channels=6, kernel=(4,), stride=(3,), padding=(2,), extra=1, groups=2),
    transposed((2, 2, 4), on(1, 1, 1), channels=2, kernel=(3,), stride=(2,), padding=(1,), extra=1, dilation=(3,)),
    transposed(
        (2, 2, 2, 1, 3, 2), on(1, 1, 1, 1, 1, 1), channels=4, kernel=(2, 1, 2, 3), stride=(3, 1, 2, 1),
        padding=(1, 0, 0, 2), extra=(2, 0, 0, 1), dilation=(2, 1, 1, 2), groups=2,
    ),
    transposed((2, 2, 1), on(1, 1, 1), channels=2, kernel=(5,), stride=(4,), padding=(2,)),
)  # fmt: skip


@pytest.mark.simulated(1)
def test_transposed_convolutions_of_every_stride_and_kernel() -> None:
    check_beside(TRANSPOSED)


def test_what_outputs_read() -> None:
    """In the modes that no short run has above: of the unit vectors the outputs, the columns of a matrix."""
    n, one = 5, on(1, 1, 1)
    for case in (
        pad((n, 1, n), one, (4, 1), mode="replicate"),
        pad((n, 1, n), one, (2, 3), mode="reflect"),
        pad((n, 1, n), one, (-2, 3)),
        upsample((n, 1, n), one, size=(8,)),
        upsample((n, 1, n), one, scale_factor=1.5),
        upsample((n, 1, n), one, scale_factor=1.5, mode="linear"),
        upsample((n, 1, n), one, scale_factor=1.7, mode="nearest-exact"),
    ):
        taps = case.layer(dj.planning_world(1))._taps((n, 1, n))[2]
        matrix = np.zeros((n, taps.outputs))
        np.add.at(matrix, (taps.inputs, np.arange(taps.outputs)), taps.weights)
        close(matrix, case.whole({}, np.eye(n)[:, None])[:, 0], 1e-15, case.name)


@pytest.mark.simulated(4)
def test_concatenation_of_three() -> None:
    """Along a split dimension, and along one that is not, where nothing moves. Its gradients: networks' skips."""
    P = dj.Partition()
    wholes = np.split(np.random.default_rng(4).standard_normal((5, 8)), [3, 4], 1)
    for on_them in (on(2, 2, ranks=(3, 1, 2, 0)), on(4, 1)):
        joined, own = nn.Concatenate(on_them.partition(P)), [cut(x, on_them, P.rank) for x in wholes]
        np.testing.assert_array_equal(joined(*own), cut(np.concatenate(wholes, 1), on_them, P.rank))
    assert "sampling" not in str(jax.make_jaxpr(lambda xs: joined(*xs))(own))
    with pytest.raises(dj.PlanError, match=r"must have the blocks of .* but along dimension 0 their lengths are \(0, "):
        joined(own[0], own[1][:0])


def test_concatenation_of_other_blocks_of_the_same_shape() -> None:
    """The sentence shows the lengths that differ, not the shapes, which don't."""
    images, grid = (2, 1, 14, 16), on(1, 1, 2, 1)
    blocks = [{r: dj.ShapeDtype((2, 1, n, 16), np.dtype(float)) for r, n in enumerate(ns)} for ns in ((7, 7), (8, 6))]
    sentence = refusal(2, lambda P: nn.Concatenate(grid.partition(P)).plan(blocks), dj.PlanError)
    assert sentence == (
        f"`xs[1]` (of shape {images}) must have the blocks of `xs[0]` (of shape {images}) in every dimension but 1, "
        "but along dimension 2 their lengths are (8, 6), not (7, 7)."
    )


@pytest.mark.simulated(4)
def test_dropout_does_not_depend_on_the_partition() -> None:
    """The elements of jax.random's mask for the whole tensor, on unbalanced blocks too; whole channels; no key."""
    P, key = dj.Partition(), jax.random.key(3)
    x = 1 + np.arange(5 * 4 * 3.0).reshape(5, 4, 3)
    want = np.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0)
    by_channel = np.where(jax.random.bernoulli(key, 0.7, (5, 4, 1)), x / 0.7, 0)
    for P_x, sizes in ((on(2, 2, 1, ranks=(3, 1, 2, 0)), (5, 4, 3)), (on(1, 1, 3), (5, 4, [0, 1, 2]))):
        own = cut(x, P_x, P.rank, sizes)
        own = np.zeros((5, 0)) if own is None else own
        layers = [nn.Dropout(P_x.partition(P), 0.3, channels) for channels in (False, True)]
        of = (*((layer, float) for layer in layers), (layers[0], "bfloat16"))
        *got, narrow = dj.jit(lambda x, of=of: [layer(x.astype(dtype), key=key) for layer, dtype in of])(own)
        for y, whole in zip(got, (want, by_channel), strict=True):
            mine = cut(whole, P_x, P.rank, sizes)
            np.testing.assert_allclose(y, own if mine is None else mine, rtol=1e-14)
        assert narrow.dtype == jnp.bfloat16  # x's own, and yet of the same numbers
        np.testing.assert_array_equal(np.asarray(narrow, float) == 0, np.asarray(got[0]) == 0)
    nothing = nn.Dropout(on(4, 1, 1).partition(P), 0)
    assert not nothing.draws and nothing(own) is own
    network = nn.Sequential(jnp.sin, nn.Sequential(layers[0]))
    assert network.draws and not network[:1].draws
    one = jax.random.split(jax.random.split(key, 2)[1], 1)[0]
    np.testing.assert_array_equal(network(({}, ({},)), own, key=key), layers[0](jnp.sin(own), key=one))
    np.testing.assert_array_equal(network(({}, ({},)), own, training=False), jnp.sin(own))
    with pytest.raises(dj.InvalidArgumentError, match=r"`key` \(=None\) must be a random key in training"):
        network(({}, ({},)), own)
    with pytest.raises(dj.InvalidTypeError, match=r"`key` \(=3\) must be a random key"):
        layers[0](own, key=3)
    with pytest.raises(dj.PlanError, match=r"`x` must hold floating-point numbers, but is int32\."):
        nn.Dropout(on(4, 1, 1).partition(P), 0.3)(np.ones((1, 2, 3), np.int32), key=key)


RESIZED = (  # lengths that divide or don't, larger and smaller, and blocks of x
    *(((5,), (m,), on(1, 1, 3, ranks=(3, 0, 2))) for m in (1, 2, 3, 5, 7, 8, 13, 15)),
    *((([4, 0, 3],), (m,), on(1, 1, 3)) for m in (4, 9, 14, 17)),
    ((5, [1, 3]), (8, 7), on(1, 1, 2, 2)),
    (([0, 3], 6, 2), (4, 4, 5), on(1, 1, 2, 2, 1, ranks=(2, 3, 1, 0))),
)


@pytest.mark.simulated(4)
def test_resizing_like_jax() -> None:
    """Output and gradients: "nearest-exact" is JAX's "nearest", and "linear" its own without smoothing."""

    def resized(features: Any, size: tuple[int, ...], P_x: On, mode: str) -> Beside:
        def whole(params: Any, x: Any) -> Any:
            return jax.image.resize(x, (*x.shape[:2], *size), mode.removesuffix("-exact"), antialias=False)

        return beside("Upsample", (2, 3, *features), whole, P_x, None, size=size, mode=mode)

    check_beside([resized(*each, mode) for each in RESIZED for mode in ("nearest-exact", "linear")])


def test_an_upsampling_to_nothing_is_refused() -> None:
    held = dict.fromkeys(range(4), dj.ShapeDtype((1, 1, 2), np.dtype("float32")))
    layer = refusal(4, lambda P: nn.DistributedUpsample(P.grid([1, 1, 4]), scale_factor=0.1).plan(held), dj.PlanError)
    assert layer == "`scale_factor` (=0.1 in feature dimension 0) leaves nothing of 8 elements."


def test_transposed_convolutions_differ_by_output_padding() -> None:
    P = dj.planning_world(1).grid([1, 1, 1])
    make = nn.DistributedConvTranspose1d
    layers = [make(P, in_channels=1, out_channels=1, kernel_size=2, stride=2, output_padding=e) for e in (0, 1, 1)]
    assert layers[0] != layers[1] == layers[2] and hash(layers[1]) == hash(layers[2])


def test_gradients_of_what_is_read_unevenly() -> None:
    """Gathered where inputs are read about equally often, else as JAX has them: beside the product with a matrix."""
    for inputs, even in ((np.array([[0, 1, 1, 2, 3], [1, 1, 2, 3, 3]]), True), (np.array([[0] * 30 + [9]]), False)):
        taps = Taps(inputs, np.arange(1.0, inputs.size + 1).reshape(inputs.shape))
        matrix = np.zeros((inputs.shape[1], 10))
        np.add.at(matrix, (np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape), inputs), taps.weights)
        x = jnp.arange(20.0).reshape(2, 10)
        y, pullback = jax.vjp(lambda x, taps=taps: taps.apply(x, 1, 0), x)
        assert taps.is_even(10) == even
        np.testing.assert_allclose(y, x @ matrix.T)
        np.testing.assert_allclose(pullback(jnp.cos(y))[0], jnp.cos(y) @ matrix, atol=1e-9)


@pytest.mark.simulated(2)
@pytest.mark.parametrize("seed", range(8 * LONG))
def test_the_largest_of_what_is_rounded_in_two_ways(seed: int) -> None:
    """XLA works a norm out anew for each that reads it, with or without fused multiplications as flags have it: none
    may then be equal to the largest. The gradient goes to some all the same."""
    P = dj.Partition().grid([2, 1, 1, 1])
    norm, largest = nn.DistributedGroupNorm(P, 1, 4), nn.DistributedGlobalMaxPool(P)
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(6, 4, 3, 2)), "float32")[P.rank :: 2]

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(largest(norm(params, x)))

    gradient = dj.jit(dj.grad(loss))(norm.init(jax.random.key(0), jnp.float32), x)
    assert gradient["bias"].tolist() == [6] * 4


@pytest.mark.simulated(2)
def test_largest_elements_share_the_gradient() -> None:
    """Those that tie alike, also of second derivatives; -inf is one like others."""
    P = dj.Partition().grid([2, 1, 1])
    largest = nn.DistributedGlobalMaxPool(P)
    x = jnp.asarray([[[3.0, 1, 3], [0, -1, -2], [-jnp.inf] * 3]])

    def loss(x: Any) -> Any:
        return jnp.sum(jnp.maximum(largest(x), -5) ** 2)

    third, half = [1 / 3] * 3, [0.5, 0, 0.5]
    got = dj.jit(dj.grad(lambda x: jnp.sum(largest(x))))(x)
    np.testing.assert_allclose(got[0], [half, [1, 0, 0], third])
    direction = jnp.asarray([[[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]])
    product = dj.jit(lambda x, v: dj.hvp(loss, (x,), (v,)))(x, direction)
    np.testing.assert_allclose(product[0], [[2.0, 0, 2.0], [8, 0, 0], [0, 0, 0]])


@pytest.mark.simulated(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_upsampling_half_precision_rounds_once(dtype: str) -> None:
    """Outputs are inputs; gradients, of inputs that are read 4 to 12 times, are those in float32, rounded."""
    layer = nn.DistributedUpsample(dj.Partition().grid([1, 1, 1, 1]), size=(7, 11))
    rng = np.random.default_rng(3)
    x, dy = (jnp.asarray(rng.normal(size=(1, 2, *sizes))).astype(dtype) for sizes in ((3, 4), (7, 11)))
    y, pullback = jax.vjp(layer, x)
    wide, pullback_wide = jax.vjp(layer, x.astype("float32"))
    np.testing.assert_array_equal(y, wide.astype(dtype))
    np.testing.assert_array_equal(pullback(dy)[0], pullback_wide(dy.astype("float32"))[0].astype(dtype))
