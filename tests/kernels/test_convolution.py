"""The convolution that a worker computes is `lax.conv_general_dilated`, in each way, whatever the shape.

Forward, both gradients, second derivatives and batching, against the plain operation; in one process.
"""

import re
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from launcher.examples import LONG

import distdl_jax as dj
from distdl_jax.kernels import convolution as convolutions
from distdl_jax.kernels import problem as problems
from distdl_jax.kernels import products
from distdl_jax.kernels.convolution import convolution
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.onednn import can_compute
from distdl_jax.kernels.onednn_library import multiplies_bfloat16, version
from distdl_jax.kernels.problem import DIRECTIONS, Problem
from distdl_jax.settings import Settings

# features, channels in and out, kernel, stride, padding, dilation, groups
CASES = {
    "LeNet's first": ((28, 28), 1, 6, (5, 5), 1, ((2, 2), (2, 2)), 1, 1),
    "LeNet's second": ((14, 14), 6, 16, (5, 5), 1, ((0, 0), (0, 0)), 1, 1),
    "1-D": ((23,), 3, 5, (4,), 1, ((1, 2),), 1, 1),
    "1-D strided, dilated": ((23,), 5, 4, (3,), 2, ((3, 0),), 2, 1),
    "one channel each way": ((9, 8), 1, 1, (3, 2), 1, ((1, 1), (0, 1)), 1, 1),
    "padding beyond the kernel": ((5, 6), 3, 4, (2, 3), 1, ((4, 3), (0, 5)), 1, 1),
    "kernel of one": ((6, 5), 4, 3, (1, 1), 2, ((0, 0), (1, 0)), 1, 1),
    "wide": ((8, 7), 18, 20, (3, 3), 1, ((1, 1), (0, 1)), 1, 1),
    "wide, strided": ((8, 7), 18, 20, (3, 3), 2, ((1, 1), (0, 1)), 1, 1),
    "unused rows at the end": ((10, 9), 4, 5, (2, 2), 3, ((0, 0), (1, 0)), 1, 1),
    "16 channels, strided, dilated": ((9, 8), 16, 6, (3, 2), (2, 1), ((2, 1), (0, 1)), (1, 2), 1),
    "strided, dilated, padding beyond": ((11, 8), 3, 8, (3, 4), (2, 3), ((4, 1), (0, 6)), (3, 2), 1),
    "a stride as long as the kernel": ((9, 8), 8, 5, (2, 2), 2, ((0, 0), (1, 1)), 1, 1),
    "groups": ((8, 9), 6, 9, (3, 3), 1, ((1, 0), (1, 2)), 1, 3),
    "one channel a group": ((8, 9), 4, 8, (3, 3), 1, ((1, 1), (1, 1)), 1, 4),
    "more groups than are written out": ((6, 6), 20, 20, (3, 3), 1, ((1, 1), (1, 1)), 1, 20),
    "3-D": ((6, 7, 5), 3, 4, (3, 2, 3), 1, ((1, 1), (0, 1), (1, 1)), 1, 1),
    "3-D, wide": ((4, 7, 5), 17, 18, (2, 3, 3), 1, ((1, 1), (0, 1), (1, 1)), 1, 1),
    "3-D strided, dilated": ((8, 7, 9), 2, 5, (3, 2, 2), (2, 1, 3), ((2, 0), (0, 1), (1, 1)), (2, 3, 1), 1),
    "3-D, nothing but padding": ((0, 4, 0), 3, 4, (2, 2, 2), 1, ((1, 1), (0, 1), (3, 1)), 1, 1),
    "1-D, nothing but padding": ((0,), 1, 4, (2,), 1, ((2, 1),), 1, 1),
    "depthwise": ((7, 8), 3, 3, (3, 2), 1, ((1, 1), (0, 1)), (1, 2), 3),
    "depthwise, two outputs a channel, strided": ((7, 8), 3, 6, (3, 3), 2, ((1, 1), (0, 1)), 1, 3),
    "depthwise, 3-D": ((4, 5, 3), 2, 2, (2, 3, 1), 1, ((1, 1), (0, 1), (0, 0)), 1, 2),
    "many groups of two": ((6, 5), 34, 51, (3, 3), 2, ((1, 1), (1, 0)), 1, 17),
    "fewer pixels than taps": ((2, 2), 18, 20, (3, 3), 1, ((1, 1), (1, 1)), 1, 1),
    "fewer results than taps, strided": ((4, 3), 18, 20, (3, 3), 2, ((1, 1), (1, 1)), 1, 1),
    "fewer pixels than taps, few channels, dilated": ((3, 2), 5, 6, (3, 3), 1, ((3, 1), (2, 3)), (1, 2), 1),
    "fewer voxels than taps": ((2, 1, 2), 3, 18, (3, 3, 3), (1, 2, 1), ((1, 1), (2, 1), (1, 1)), 1, 1),
    "1 x 1": ((6, 5), 4, 3, (1, 1), 1, ((0, 0), (0, 0)), 1, 1),
    "1-D kernel of one, strided, padded": ((7,), 4, 3, (1,), 2, ((1, 2),), 1, 1),
    "3-D kernel of one": ((3, 4, 5), 2, 3, (1, 1, 1), (1, 2, 1), ((0, 0), (0, 1), (0, 0)), 1, 1),
    "padding less than none": ((8, 9), 3, 4, (3, 2), (2, 1), ((-1, 1), (0, -2)), 1, 1),
    "3-D groups": ((5, 4, 6), 4, 6, (2, 3, 3), 1, ((1, 1), (1, 1), (0, 1)), 1, 2),
    "4-D": ((4, 3, 5, 4), 2, 3, (3, 2, 2, 3), 1, ((1, 1), (0, 1), (-1, 2), (3, 1)), 1, 1),
    "4-D groups, strided, dilated": ((6, 5, 4, 7), 4, 2, (2, 2, 3, 2), (2, 1, 1, 3), ((2, 0), *((1, 1),) * 3), 2, 2),
}


def _per_dimension(value, kernel):
    return value if isinstance(value, tuple) else (value,) * len(kernel)


def _problem(name, dtype="float64", batch=2):
    features, c_in, c_out, kernel, stride, padding, dilation, groups = CASES[name]
    placement = Placement(_per_dimension(stride, kernel), padding, _per_dimension(dilation, kernel))
    return Problem((batch, c_in, *features), (c_out, c_in // groups, *kernel), placement, groups, dtype)


@contextmanager
def _computed(way):
    """Compute in one way while the program is traced; by XLA where oneDNN can't."""

    def chosen(problem, direction):
        return "xla" if way == "onednn" and not can_compute(problem, direction) else way

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolutions, "algorithm", chosen)
        yield


HAS_ONEDNN = version() != "none"
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="oneDNN's convolutions are not compiled here")


def _case(name, dtype, batch=2):
    *_, groups = CASES[name]
    problem, rng = _problem(name, dtype, batch), np.random.default_rng(len(name))
    x, weight = (rng.normal(size=shape).astype("float32").astype(dtype) for shape in (problem.x, problem.weight))
    placed = problem.window

    def plain(x, weight):
        options = {"rhs_dilation": placed.dilation, "feature_group_count": groups}
        return lax.conv_general_dilated(x, weight, placed.stride, placed.padding, **options)

    return partial(convolution, problem), plain, x, weight


def _assert_close(got, expected, dtype, what=""):
    # In second derivatives of sines, plain JAX in float32 is 5e-5 away, too (jax 0.12).
    tolerance = {"float64": 1e-12, "float32": 1e-4}[dtype]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (dtype, b.shape), what
        scale = max(1.0, float(np.abs(np.asarray(b, np.float64)).max(initial=0)))
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=0, atol=tolerance * scale, err_msg=what
        )


def _compare(name, variants, transform):
    """What `transform` makes of each variant is what it makes of the plain operation in float64; all in one program.

    Returns how often that calls oneDNN.
    """
    _, plain, x, weight = _case(name, "float64")

    @jax.jit
    def program(x, weight):
        got = []
        for dtype, way in variants:
            with _computed(way):
                got.append(transform(_case(name, dtype)[0])(x.astype(dtype), weight.astype(dtype)))
        return got, transform(plain)(x, weight)

    program = program.trace(x, weight)
    got, expected = program.lower().compile()(x, weight)
    for (dtype, way), mine in zip(variants, got, strict=True):
        _assert_close(mine, expected, dtype, f"{dtype}, {way}")
    return _calls_of_onednn(program.jaxpr)


def _calls_of_onednn(jaxpr):
    direct = sum("distdl_jax_onednn" in str(equation.params.get("target_name")) for equation in jaxpr.eqns)
    return direct + sum(_calls_of_onednn(inner) for each in jaxpr.eqns for inner in jaxprs_in_params(each.params))


def _gradients(f):
    """Result and gradients of a function whose cotangent is not constant."""

    def run(x, weight):
        y, pullback = jax.vjp(f, x, weight)
        return y, pullback(jnp.sin(y))

    return run


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(name):
    """By products in float64, and by oneDNN; for a quarter of the cases, and in a long run for all, in all ways."""
    variants = [("float64", "products")] + [("float32", "onednn")] * HAS_ONEDNN
    if LONG > 1 or list(CASES).index(name) % 4 == 0:
        variants += [("float64", "xla"), ("float32", "products")]
    calls = _compare(name, variants, _gradients)
    assert calls == (3 if HAS_ONEDNN and np.prod(CASES[name][0]) and len(CASES[name][0]) < 4 else 0)


@cache
def _plainly(name, batch):
    """Result and gradients of JAX's own operation, in float64."""
    _, plain, x, weight = _case(name, "float64", batch)
    return jax.jit(_gradients(plain))(x, weight)


@pytest.mark.parametrize("name", ["wide", "wide, strided", "3-D, wide", "kernel of one", "many groups of two"])
@pytest.mark.parametrize("size", [1, 2000, 5000])
def test_products_in_pieces_of_rows_and_of_samples(name, size, monkeypatch):
    for compiled in (products.forward, products.weight_gradient):  # without what was traced in pieces of another size
        monkeypatch.setattr(products, compiled.__name__, compiled.__wrapped__)
    monkeypatch.setattr(products, "PIECE", size)
    ours, _, x, weight = _case(name, "float32", 4)
    with _computed("products"):
        _assert_close(jax.jit(_gradients(ours))(x, weight), _plainly(name, 4), "float32")


BY_PRODUCTS = ["LeNet's first", "1-D", "padding beyond the kernel", "wide, strided", "groups", "depthwise"]
BY_PRODUCTS += ["3-D strided, dilated", "kernel of one", "1-D kernel of one, strided, padded", "many groups of two"]
BY_ONEDNN = ["1-D", "padding beyond the kernel", "groups", "3-D strided, dilated", "padding less than none"]
BY_XLA = ["strided, dilated, padding beyond", "1-D strided, dilated"]
VARIANTS = [
    *((name, "float64", "products") for name in BY_PRODUCTS),
    *((name, "float64", "xla") for name in BY_XLA),
    *((name, "float32", "onednn") for name in BY_ONEDNN if HAS_ONEDNN),
]
AXES = [(0, None), (None, 0), (1, 2)] if LONG > 1 else [(1, 2)]


@pytest.mark.parametrize("name", dict.fromkeys(name for name, *_ in VARIANTS))
def test_vmap_of_second_derivatives(name):
    def transform(f):
        def penalty(x, weight):
            return sum(jnp.sum(g**3) for g in jax.tree.leaves(_gradients(f)(x, weight)[1]))

        def three(a, axis):
            return a if axis is None else jnp.stack([a, 2 * a, a - 1], axis)

        second = jax.grad(penalty, argnums=(0, 1))
        return lambda x, weight: [jax.vmap(second, axes)(*map(three, (x, weight), axes)) for axes in AXES]

    _compare(name, [variant for case, *variant in VARIANTS if case == name], transform)


@needs_onednn
def test_a_setting_leaves_the_convolution_to_xla(monkeypatch):
    ours, plain, x, weight = _case("1-D", "float32")
    calls = {}
    for fast in (True, False):
        monkeypatch.setattr(problems, "current_settings", lambda fast=fast: Settings(fast_convolutions=fast))
        program = jax.jit(lambda x, weight: ours(x, weight))
        calls[fast] = _calls_of_onednn(program.trace(x, weight).jaxpr)
        _assert_close(program(x, weight), plain(x, weight), "float32")
    assert calls == {True: 1, False: 0}


@pytest.mark.parametrize(
    ("name", "dtype", "ways"),
    [
        ("LeNet's first", "float32", ("products", "xla", "products")),
        ("LeNet's first", "float64", ("products",) * 3),
        ("wide", "float64", ("xla",) * 3),
        ("wide, strided", "float64", ("xla", "products", "xla")),
        ("wide, strided", "float32", ("xla",) * 3),
        ("3-D", "float32", ("products",) * 3),
        ("fewer pixels than taps", "float32", ("products",) * 3),
        ("groups", "float32", ("products",) * 3),
        ("1 x 1", "float32", ("products",) * 3),
        ("4-D", "float32", ("products",) * 3),
    ],
)
def test_the_rule_without_onednn(name, dtype, ways, monkeypatch):
    monkeypatch.setattr(convolutions, "current_settings", lambda: Settings(onednn="off"))
    assert tuple(convolutions.algorithm(_problem(name, dtype), direction) for direction in DIRECTIONS) == ways


def _dtypes_of_convolutions(jaxpr):
    """The dtypes that XLA's convolutions and oneDNN's compute in, in a program."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("conv_general_dilated", "ffi_call", "dot_general"):
            found.add(equation.invars[0].aval.dtype.name)
        for inner in jaxprs_in_params(equation.params):
            found |= _dtypes_of_convolutions(inner)
    return found


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["3-D", "1-D strided, dilated", "depthwise", "1 x 1"])
def test_half_precision_is_float32_rounded_once(name, dtype, fast, monkeypatch):
    """XLA's convolutions of half precision take up to 46 times as long as those of float32.

    oneDNN's own of bfloat16, where the processor has them, accumulate in float32.
    """
    monkeypatch.setattr(problems, "current_settings", lambda: Settings(fast_convolutions=fast))
    (narrow, _, x, weight), (wide, *_) = _case(name, dtype), _case(name, "float32")
    operands = x.astype(dtype), weight.astype(dtype)
    program = jax.jit(_gradients(narrow)).trace(*operands)
    native = {"bfloat16"} if dtype == "bfloat16" and multiplies_bfloat16() else set()
    assert _dtypes_of_convolutions(program.jaxpr) <= {"float32"} | native

    def rounded(x, weight):
        as_float32 = [operand.astype("float32") for operand in (x, weight)]
        y = wide(*as_float32).astype(dtype)
        gradients = jax.vjp(wide, *as_float32)[1](jnp.sin(y).astype("float32"))
        return y, tuple(gradient.astype(dtype) for gradient in gradients)

    got, expected = program.lower().compile()(*operands), jax.jit(rounded)(*operands)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == dtype
        # Gradients are of a result that is rounded, which may fall the other way.
        unit = (2 if native else 1) * float(jnp.finfo(dtype).eps) * max(1.0, float(jnp.abs(b).max()))
        np.testing.assert_allclose(a.astype("float32"), b.astype("float32"), rtol=0, atol=unit)


SCANNED = [("LeNet's first", "products"), ("1-D", "xla"), pytest.param("wide, strided", "onednn", marks=needs_onednn)]


@pytest.mark.parametrize(("name", "way"), SCANNED)
def test_checkpoint_and_scan(name, way):
    dtype = "float32" if way == "onednn" else "float64"
    ours, plain, x, weight = _case(name, dtype)
    factors = jnp.arange(1.0, 4.0, dtype=dtype)

    def summed(f):
        def step(weight, total, factor):
            return total + jnp.sum(jnp.sin(jax.checkpoint(f)(factor * jnp.mean(weight) * x, weight))), None

        return lambda weight: lax.scan(partial(step, weight), jnp.zeros((), dtype), factors)[0]

    with _computed(way):
        got = jax.jit(jax.value_and_grad(summed(ours)))(weight)
    _assert_close(got, jax.jit(jax.value_and_grad(summed(plain)))(weight), dtype)


def test_integers_and_other_devices_take_the_plain_operation(monkeypatch):
    def takes_it(dtype):
        ours, plain, x, weight = _case("3-D", dtype)
        used = [[equation.primitive.name for equation in jax.make_jaxpr(f)(x, weight).eqns] for f in (ours, plain)]
        return used[0] == used[1]

    assert takes_it("int32")
    assert not takes_it("bfloat16")
    assert not takes_it("float32")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert takes_it("float32")


def test_kernels_import_nothing_of_the_library_but_the_ground():
    allowed = ("distdl_jax.kernels", "distdl_jax.errors", "distdl_jax.settings")
    lines = {
        line.split()[1]
        for path in (Path(dj.__file__).parent / "kernels").rglob("*.py")
        for line in path.read_text().splitlines()
        if re.match(r"\s*(from|import) distdl_jax", line)
    }
    assert lines and all(module.startswith(allowed) for module in lines)
