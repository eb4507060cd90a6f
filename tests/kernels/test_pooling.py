"""The pooling that a worker computes is `lax.reduce_window`, whatever way its window takes it; in one process."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from launcher.examples import examples

from distdl_jax.kernels import pooling as pool
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.pooling import Windows, max_pool, sum_pool

# features, kernel, stride
CASES = {
    "tiles": ((6, 8), (2, 2), (2, 2)),
    "tiles, rows and columns left over": ((7, 8), (2, 3), (2, 3)),
    "overlapping": ((7, 9), (3, 3), (2, 1)),
}
DTYPES = ("float64", "float32", "bfloat16")


def largest(x, windows):
    return max_pool(x, windows.kernel, windows.placement)


def total(x, windows):
    return sum_pool(x, windows.kernel, windows.placement)


FUNCTIONS = {"largest": (largest, -np.inf, lax.max), "total": (total, 0.0, lax.add)}


def spec(kernel, stride, dilation=None):
    """Windows without padding."""
    placement = Placement(stride, ((0, 0),) * len(kernel), dilation or (1,) * len(kernel))
    return Windows(kernel, placement, ())


def _ways(name, function):
    _, kernel, stride = CASES[name]
    ours, start, step = FUNCTIONS[function]

    def plain(x):
        return lax.reduce_window(x, np.asarray(start, x.dtype), step, (1, 1, *kernel), (1, 1, *stride), "VALID")

    return lambda x: ours(x, spec(kernel, stride)), plain


def _x(name, dtype="float64"):
    """Small whole numbers: sums are exact, and windows have several largest entries."""
    return jax.device_put(np.random.default_rng(len(name)).integers(-2, 3, (2, 3, *CASES[name][0])).astype(dtype))


def _drawn(rng):
    """A window and the shape of an x: windows apart, side by side or overlapping, dilated; or none."""
    rank = rng.integers(1, 4)
    kernel, stride, dilation = (tuple(map(int, rng.integers(1, most, rank))) for most in (4, 5, 3))
    most = 7 if rank == 3 else 12
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    features = [int(rng.integers(max(1, r - 1), most)) if r < most else r for r in reach]
    return spec(kernel, stride, dilation), (int(rng.integers(0, 3)), 2, *features)


def _by_hand(x, windows, dy=None):
    """The largest and the total of each window, or what the windows' cotangents come to in x, one after the other."""
    along = zip(x.shape[2:], windows.kernel, windows.stride, windows.placement.dilation, strict=True)
    count = [max(0, (n - (k - 1) * d - 1) // s + 1) for n, k, s, d in along]
    largest, total = np.zeros((2, *x.shape[:2], *count))
    dlargest, dtotal = np.zeros((2, *x.shape))
    for window in product(*map(range, (*x.shape[:2], *count))):
        start = [w * s for w, s in zip(window[2:], windows.stride, strict=True)]
        places = [
            (*window[:2], *(a + o * d for a, o, d in zip(start, offset, windows.placement.dilation, strict=True)))
            for offset in product(*map(range, windows.kernel))
        ]
        entries = [x[place] for place in places]
        largest[window], total[window] = max(entries), sum(entries)
        if dy is not None:
            dlargest[places[int(np.argmax(entries))]] += dy[window]
            for place in places:
                dtotal[place] += dy[window]
    return (largest, total) if dy is None else (dlargest, dtotal)


def test_any_window():
    """Against what is worked out window by window: forward, and what cotangents come to. All in one program.

    Whole numbers, of which no sum is above what bfloat16 counts to.
    """
    rng = np.random.default_rng(7)
    drawn = [_drawn(rng) for _ in range(examples(30))]
    xs = [rng.integers(-3, 4, shape).astype(float) for _, shape in drawn]
    dys = [
        rng.integers(1, 9, _by_hand(x, windows)[0].shape).astype(float)
        for x, (windows, _) in zip(xs, drawn, strict=True)
    ]
    assert any(0 in dy.shape[2:] for dy in dys) and any(0 in x.shape for x in xs)

    @jax.jit
    def both(xs, dys):
        def one(x, windows, dy):
            ways = [jax.vjp(lambda x, f=f: f(x, windows).astype(x.dtype), x) for f in (largest, total)]
            return [(y, pullback(dy)[0]) for y, pullback in ways]

        return [one(x, windows, dy) for x, (windows, _), dy in zip(xs, drawn, dys, strict=True)]

    dtypes = [DTYPES[n % 3] for n in range(len(drawn))]
    given = [[jnp.asarray(x, dtype) for x, dtype in zip(its, dtypes, strict=True)] for its in (xs, dys)]
    for got, x, (windows, _), dy, dtype in zip(both(*given), xs, drawn, dys, dtypes, strict=True):
        expected = zip(_by_hand(x, windows), _by_hand(x, windows, dy), strict=True)
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(list(expected)), strict=True):
            assert ours.dtype == dtype
            np.testing.assert_array_equal(np.asarray(ours, float), theirs, err_msg=f"{windows} of {x.shape}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype):
    """Windows of 256 and small numbers, of which each would be lost in a sum of half precision."""
    x = jnp.full((1, 1, 8, 8), 0.5, dtype).at[0, 0, 4, 4].set(2048)
    window = Placement((1, 1), ((0, 0), (0, 0)), (1, 1))
    y, pullback = jax.vjp(lambda x: sum_pool(x, (8, 8), window), x)
    assert y.dtype == "float32" and float(y[0, 0, 0, 0]) == 2048 + 63 / 2
    overlapping = jax.vjp(lambda x: sum_pool(x, (2, 2), window), x)[1]
    dy = jnp.full((1, 1, 7, 7), 1 / 512, "float32").at[0, 0, 0, 0].set(1)
    assert pullback(y)[0].dtype == dtype
    np.testing.assert_array_equal(overlapping(dy)[0][0, 0, 1, 1], np.float32(1 + 3 / 512).astype(dtype))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["tiles, rows and columns left over", "overlapping"])
def test_transformations(name, function):
    """Of cotangents too: the derivative of the gradient in the direction of x."""
    ours, plain = _ways(name, function)
    xs = jnp.stack([_x(name), 2 * _x(name) - 1])

    def second(f):
        def penalty(x):
            return jnp.sum(jax.vjp(f, x)[1](jnp.sin(f(x)))[0] ** 3)

        return jax.jit(jax.vmap(jax.grad(jax.checkpoint(penalty))))

    np.testing.assert_allclose(second(ours)(xs), second(plain)(xs), rtol=1e-13, atol=1e-13)


def test_whole_numbers_have_a_largest():
    x = _x("tiles", "int32")
    expected = lax.reduce_window(x, np.int32(-100), lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    assert (largest(x, spec((2, 2), (2, 2))) == expected).all()


def test_the_adjoint_does_not_see_the_largest_entry():
    """A compiler may work x out again there, rounded otherwise: then no entry equals what was the largest."""
    x = _x("tiles")
    _, pullback = jax.vjp(lambda x: largest(x, spec((2, 2), (2, 2))), x)
    (residual,) = jax.tree.leaves(pullback)
    np.testing.assert_array_equal(residual, x)


@pytest.mark.parametrize("values", [[1, np.nan, 2], [np.nan, 3, 2], [1, 2, np.nan], [4, np.nan, np.nan]])
def test_a_nan_is_the_largest(values):
    """The first of them gets the window's cotangent."""
    y, pullback = jax.vjp(lambda x: largest(x, spec((3,), (3,))), jnp.array(values)[None, None])
    assert np.isnan(y).all()
    np.testing.assert_array_equal(pullback(jnp.ones_like(y))[0][0, 0], np.arange(3) == np.argmax(np.isnan(values)))


def test_large_windows_and_other_devices_keep_to_the_plain_operation(monkeypatch):
    def is_plain(function, kernel):
        window = spec(kernel, kernel)
        jaxpr = jax.make_jaxpr(lambda x: function(x, window))(jnp.zeros((1, 1, 40, 40)))
        return [equation.primitive.name[:13] for equation in jaxpr.eqns] == ["reduce_window"]

    for function in (largest, total):
        assert is_plain(function, (9, 8))
        assert not is_plain(function, (8, 8))
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert is_plain(function, (2, 2))
        monkeypatch.undo()


def test_dilated_windows_are_taken_by_slices_whatever_their_size(monkeypatch):
    monkeypatch.setattr(pool, "MOST_SLICES", 1)
    x = _x("overlapping")
    got = largest(x, spec((2, 3), (1, 2), (3, 2)))
    expected = np.array(
        [[[[p[i : i + 4 : 3, j : j + 5 : 2].max() for j in range(0, 5, 2)] for i in range(4)] for p in s] for s in x]
    )
    np.testing.assert_array_equal(got, expected)
