"""Any convolution that lax can express is what numpy makes of it; JAX's derivatives find the fast kernels.

All in one process. A case that fails is in the message as one line that can be pasted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal
from launcher.examples import LONG

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.kernels import convolution as convolutions
from distdl_jax.kernels.general import Reading, conv_general_dilated, read
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.problem import DIRECTIONS, Problem

EPS = {"float64": 2**-52, "float32": 2**-22, "float16": 2**-10, "bfloat16": 2**-7, "complex64": 2**-21, "int32": 0}


def drawn(seed: int) -> dict[str, Any]:
    """Draw the arguments of a convolution: shapes, dtype, and all of lax's parameters."""
    rng = np.random.default_rng([3, seed])
    dims = int(rng.choice([0, 1, 1, 2, 2, 2, 3, 4]))
    by = str(rng.choice(["", "", "feature", "batch"]))
    groups = int(rng.choice([2, 3])) if by else 1
    n, c, o = (int(rng.choice([1, 2, 3, 8])) for _ in range(3))
    of_x, of_w = [n, c], [groups * o, c]
    of_x[by == "feature"] *= groups
    kernel = [int(k) for k in rng.integers(1, 4 if dims < 4 else 3, dims)]
    sizes = [int(k) for k in rng.integers(1, 9 if dims < 3 else 5, dims)]
    params = {
        name: tuple(int(rng.choice([1, 1, most])) for most in rng.integers(1, 4, dims))
        for name in ("window_strides", "lhs_dilation", "rhs_dilation")
    }
    padding = tuple((int(low), int(high)) for low, high in rng.integers(-2, 5, (dims, 2)))
    params |= {"padding": padding, f"{by}_group_count": groups} if by else {"padding": padding}
    specs = tuple(tuple(map(int, rng.permutation(dims + 2))) for _ in range(3))
    match rng.integers(3):
        case 0:
            specs = ((tuple(range(dims + 2))),) * 3
        case 1:
            features = tuple(range(1, dims + 1))
            specs = (0, dims + 1, *features), (dims + 1, dims, *range(dims)), (0, dims + 1, *features)
    x, w = [0] * (dims + 2), [0] * (dims + 2)
    for axis, length in zip(specs[0], (*of_x, *sizes), strict=True):
        x[axis] = length
    for axis, length in zip(specs[1], (*of_w, *kernel), strict=True):
        w[axis] = length
    dtype = str(rng.choice(["float32", "float32", "float64", "float16", "bfloat16", "complex64", "int32"]))
    return {"x": tuple(x), "w": tuple(w), "dtype": dtype, "specs": specs, **params}


def operands(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Return small whole numbers, and the parameters for lax, or nothing if windows are too long for it."""
    rng = np.random.default_rng(len(str(case)))
    x, w = (rng.integers(-4, 5, case[name]).astype(float) for name in ("x", "w"))
    if case["dtype"] == "complex64":
        x, w = x + 1j * rng.integers(-4, 5, case["x"]), w - 1j * rng.integers(-4, 5, case["w"])
    params = {name: value for name, value in case.items() if name not in ("x", "w", "dtype", "specs")}
    return x, w, params | {"dimension_numbers": lax.ConvDimensionNumbers(*case["specs"])}


def by_numpy(x: np.ndarray, w: np.ndarray, params: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    """Compute the convolution tap by tap."""
    of_x, of_w, of_y = params["dimension_numbers"]
    x, w, y = np.transpose(x, of_x), np.transpose(w, of_w), np.zeros([shape[axis] for axis in of_y], x.dtype)
    if y.size == 0:
        return np.zeros(shape, x.dtype)
    by_batch = "batch_group_count" in params
    groups = params.get("batch_group_count", params.get("feature_group_count", 1))
    low = [before for before, _ in params["padding"]]
    last = zip(y.shape[2:], params["window_strides"], params["rhs_dilation"], w.shape[2:], strict=True)
    length = [s * (m - 1) + d * (k - 1) + 1 for m, s, d, k in last]  # up to what the last window reads
    entries = np.zeros((*x.shape[:2], *length), x.dtype)
    for place in np.ndindex(x.shape[2:]):  # each entry of x at its place, unless the high end is cropped before it
        at = [i * d + before for i, d, before in zip(place, params["lhs_dilation"], low, strict=True)]
        if all(0 <= i < n for i, n in zip(at, length, strict=True)):
            entries[(..., *at)] = x[(..., *place)]
    parts = np.split(entries, groups, axis=0 if by_batch else 1)
    for group, (part, kernel) in enumerate(zip(parts, np.split(w, groups), strict=True)):
        own = slice(group * len(kernel), (group + 1) * len(kernel))
        for tap in np.ndindex(w.shape[2:]):
            along = zip(tap, params["rhs_dilation"], params["window_strides"], y.shape[2:], strict=True)
            met = part[(..., *(slice(t * d, t * d + s * (m - 1) + 1, s) for t, d, s, m in along))]
            y[:, own] += np.einsum("nc...,oc->no...", met, kernel[(..., *tap)])
    return np.transpose(y, np.argsort(of_y))


def prepared(case: dict[str, Any]) -> tuple[Callable[..., jax.Array], list[jax.Array], np.ndarray] | None:
    """Return the function, its arguments, and what numpy makes of them; None if lax refuses the case."""
    x, w, params = operands(case)
    given = [jnp.asarray(a.astype(case["dtype"])) for a in (x, w)]
    try:
        shape = jax.eval_shape(partial(lax.conv_general_dilated, **params), *given).shape
    except (ValueError, TypeError):  # it crops more than there is
        return None
    return partial(conv_general_dilated, **params), given, by_numpy(x, w, params, shape)


def run(*some: dict[str, Any]) -> None:
    """Compare convolutions with numpy's. Of whole numbers: sums are exact, but for the rounding of the result."""
    ready = [(case, found) for case in some if (found := prepared(case))]

    @jax.jit
    def program(operands: Any) -> Any:
        return [found[0](*given) for (_, found), given in zip(ready, operands, strict=True)]

    for (case, (_, _, expected)), got in zip(ready, program([found[1] for _, found in ready]), strict=True):
        assert (got.shape, got.dtype) == (expected.shape, case["dtype"]), f"run({case})"
        atol = EPS[case["dtype"]] * max(1.0, np.abs(expected).max(initial=0))
        got = np.asarray(got).astype(expected.dtype)
        np.testing.assert_allclose(got, expected, rtol=0, atol=atol, err_msg=f"run({case})")


@pytest.mark.parametrize("first", range(10 * LONG))
def test_drawn(first: int) -> None:
    run(*map(drawn, range(30 * first, 30 * (first + 1))))


# features, channels in and out, kernel, stride, padding, dilation, groups; of two samples
CASES = {
    "same": ((9, 8), 6, 5, (3, 3), (1, 1), "SAME", (1, 1), 1),
    "strided, same": ((9, 8), 6, 5, (3, 3), (2, 1), "SAME", (1, 1), 1),
    "dilated, odd padding": ((9, 8), 4, 5, (3, 2), (1, 1), ((2, 1), (0, 3)), (1, 2), 1),
    "strided, dilated": ((9, 8), 4, 5, (3, 2), (2, 1), ((2, 1), (0, 3)), (2, 3), 1),
    "groups, strided": ((9, 8), 6, 9, (3, 3), (2, 2), "SAME", (1, 1), 3),
    "depthwise": ((9, 8), 8, 8, (3, 3), (1, 1), "SAME", (1, 1), 8),
    "1-D": ((19,), 4, 5, (5,), (2,), "SAME", (1,), 1),
    "3-D": ((5, 6, 7), 4, 5, (3, 3, 2), (1, 1, 1), "SAME", (1, 1, 1), 1),
    "3-D, strided": ((5, 6, 7), 4, 5, (3, 3, 2), (2, 1, 2), "VALID", (1, 1, 1), 1),
}


def of_case(name: str, channels_last: bool) -> tuple[Callable[..., Any], np.ndarray, np.ndarray]:
    """Return lax's convolution, x and w."""
    sizes, c_in, c_out, kernel, stride, padding, dilation, groups = CASES[name]
    rng, features = np.random.default_rng(len(name)), "DHW"[-len(sizes) :]
    x, w = rng.normal(size=(2, c_in, *sizes)), rng.normal(size=(c_out, c_in // groups, *kernel))
    if channels_last:
        x, w = np.moveaxis(x, 1, -1), np.transpose(w, (*range(2, w.ndim), 1, 0))
    numbers = (f"N{features}C", f"{features}IO", f"N{features}C") if channels_last else None
    options = {"rhs_dilation": dilation, "dimension_numbers": numbers, "feature_group_count": groups}
    return lambda x, w: lax.conv_general_dilated(x, w, stride, padding, **options), x, w


Found = list[tuple[Reading | None, jax.Array, jax.Array]]


def evaluated(program: Any, args: Any, found: Found) -> list[Any]:
    """Run a program; append to `found` how each of its convolutions is read, what the door makes of it, and lax."""
    jaxpr = program.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        given = [each.val if isinstance(each, Literal) else values[each] for each in eqn.invars]
        if "jaxpr" in eqn.params:
            results = evaluated(eqn.params["jaxpr"], given, found)
        else:
            results = eqn.primitive.bind(*given, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        if eqn.primitive.name == "conv_general_dilated":
            params = {name: value for name, value in eqn.params.items() if name != "out_sharding"}
            found.append((read(*given, results[0], params), conv_general_dilated(*given, **params), results[0]))
        values |= zip(eqn.outvars, results, strict=True)
    return [values[each] for each in jaxpr.outvars]


def readings(function: Callable[..., Any], *args: np.ndarray) -> list[Reading]:
    """Return how the convolutions of a function are read, after a comparison of their results."""
    program, read_as = jax.make_jaxpr(function)(*args), list[Reading]()

    @jax.jit
    def both(*args: jax.Array) -> Any:
        found: Found = []
        evaluated(program, args, found)
        read_as.extend(reading for reading, _, _ in found if reading)
        return [results for _, *results in found]

    pairs = both(*args)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12 * max(1.0, np.abs(theirs).max()))
    assert len(read_as) == len(pairs)
    return read_as


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_derivatives_of_jax(name: str, channels_last: bool) -> None:
    """Gradients are read as those of the forward problem, in its order; second and mapped ones have its kernel."""
    f, x, w = of_case(name, channels_last)
    gradients = jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1))
    forward, *others = readings(gradients, x, w)
    directions = {reading.form.direction: reading.problem for reading in (forward, *others)}
    assert {problem.channels_last for problem in directions.values()} == {channels_last}
    kernel, groups = CASES[name][3], CASES[name][-1]
    if groups == 1:
        assert set(directions) == set(DIRECTIONS)
        assert {(problem.x, problem.weight, problem.y) for problem in directions.values()} == {
            (forward.problem.x, forward.problem.weight, forward.problem.y)
        }
    second = readings(jax.grad(lambda x, w: sum(jnp.sum(a**3) for a in gradients(x, w)), (0, 1)), x, w)
    mapped = readings(jax.vmap(gradients), np.stack([x, -x]), np.stack([w, 2 * w]))
    assert {reading.problem.weight[2:] for reading in (*(second if groups == 1 else others), *mapped)} == {kernel}


@pytest.mark.parametrize("name", ["strided, same", "groups, strided"])
def test_transformations(name: str) -> None:
    """Second derivatives under vmap, a scan and checkpoint."""
    _, x, w = of_case(name, True)
    _, _, _, _, stride, padding, dilation, groups = CASES[name]

    def by(door: Callable[..., Any]) -> Any:
        def f(x: jax.Array, w: jax.Array) -> jax.Array:
            numbers = ("NHWC", "HWIO", "NHWC")
            options = {"rhs_dilation": dilation, "dimension_numbers": numbers, "feature_group_count": groups}
            return door(x, w, stride, padding, **options)

        def penalty(x: jax.Array, w: jax.Array) -> jax.Array:
            return sum(jnp.sum(a**2) for a in jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1))(x, w))

        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            def body(total: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
                return total + jax.checkpoint(penalty)(x, w), None

            return lax.scan(body, 0.0, jnp.stack([w, 2 * w]))[0]

        return jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (0, None)))(np.stack([x, -x]), w)

    for ours, theirs in zip(by(conv_general_dilated), by(lax.conv_general_dilated), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11 * np.abs(theirs).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_that_are_none(dtype: str) -> None:
    """NaN and infinities reach the windows that read them and no other; subnormals aren't flushed."""
    x = jnp.zeros((1, 2, 40), dtype).at[0, 0, 3].set(jnp.nan).at[0, 1, 20].set(jnp.inf)
    x = x.at[0, 0, 35].set(jnp.finfo(dtype).smallest_subnormal)
    y = conv_general_dilated(x, jnp.ones((3, 2, 3), dtype), (1,), "SAME")[0]
    assert (jnp.isnan(y).any(0).nonzero()[0] == jnp.array([2, 3, 4])).all()
    assert (jnp.isinf(y).all(0).nonzero()[0] == jnp.array([19, 20, 21])).all()
    expected = np.zeros((3, 3)) if dtype != "float16" else np.full((3, 3), x[0, 0, 35])
    assert dtype != "float16" or (np.asarray(y)[:, 34:37] == expected).all()


def test_dtypes() -> None:
    x, w = jnp.ones((1, 2, 8), "bfloat16"), jnp.full((3, 2, 3), 1 / 3, "bfloat16")
    y = conv_general_dilated(x, w, (1,), "VALID", preferred_element_type="float32")
    np.testing.assert_allclose(y, np.float32(6 * w[0, 0, 0].astype("float32")), rtol=1e-6)
    grown = conv_general_dilated(
        *(a.astype("int8") for a in (100 * x, 3 * w)), (1,), "VALID", preferred_element_type="int32"
    )
    assert (grown.dtype, int(grown[0, 0, 0])) == ("int32", 600)
    with pytest.raises(InvalidTypeError, match=re.escape("`x` (bfloat16) and `w` (float32) must have one dtype.")):
        conv_general_dilated(x, w.astype("float32"), (1,), "VALID")
    with pytest.raises(ValueError, match="feature_group_count"):
        conv_general_dilated(x, w, (1,), "VALID", feature_group_count=2)


PRECISIONS: dict[str, tuple[Any, str | None, bool]] = {
    "none": (None, None, False),
    "written": ("default", None, True),
    "of one operand": ((lax.Precision.DEFAULT, lax.Precision.HIGHEST), None, False),
    "by the switch": (None, "bfloat16", True),
    "by the other name of the switch": (None, "default", True),
    "switched, but written": ("highest", "bfloat16", False),
    "switched to more": (None, "tensorfloat32", False),
    "an algorithm": (lax.DotAlgorithmPreset.BF16_BF16_F32, None, True),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_precision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    precision, switch, expected = PRECISIONS[name]
    asked: list[Problem] = []
    monkeypatch.setattr(convolutions, "algorithm", lambda problem, _: asked.append(problem) or "products")
    x, w = jnp.ones((1, 2, 8), "float32"), jnp.ones((3, 2, 3), "float32")
    with jax.default_matmul_precision(switch):
        conv_general_dilated(x, w, (1,), "VALID", precision=precision)
        conv_general_dilated(x.astype("float64"), w.astype("float64"), (1,), "VALID", precision=precision)
        layers = Problem(x.shape, w.shape, Placement((1,), ((0, 0),), (1,)), 1, "float32")
        convolutions.convolution(layers, x, w)
    of_layers = expected if precision is None else switch == "bfloat16"
    assert [problem.fast_math for problem in asked] == [expected, False, of_layers]


def test_an_algorithm_that_no_kernel_has() -> None:
    x, w = jnp.ones((1, 2, 8), "float32"), jnp.ones((3, 2, 3), "float32")
    with pytest.raises(InvalidArgumentError, match=re.escape("`precision` (=F16_F16_F16)")):
        conv_general_dilated(x, w, (1,), "VALID", precision="F16_F16_F16")
