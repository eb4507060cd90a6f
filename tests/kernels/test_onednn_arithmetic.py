"""oneDNN's convolutions in both orders of dimensions and in each dtype, against XLA's in float64.

The error allowed is that of the arithmetic: products of bfloat16 are exact in float32, sums of K terms are accumulated
in float32, and a bfloat16 result is rounded once.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jobs import patience
from launcher.examples import LONG

from distdl_jax.kernels import onednn
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.onednn_library import description, multiplies_bfloat16, target, version
from distdl_jax.kernels.problem import DIRECTIONS, Direction, Problem

pytestmark = pytest.mark.skipif(version() == "none", reason="oneDNN's convolutions are not compiled here")
needs_bfloat16 = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="oneDNN finds neither avx512_bf16 nor AMX on this processor"
)

Arrays = dict[str, np.ndarray]


def drawn(seed: int) -> Problem | None:
    """1-D to 3-D; strides, dilations, groups, depthwise, uneven and negative padding; None if nothing is left."""
    rng = np.random.default_rng([3, seed])
    dims, groups = int(rng.integers(1, 4)), int(rng.choice([1, 1, 1, 2, 3]))
    c_in, c_out = (groups * int(rng.choice([1, 2, 3, 8, 16, 17, 32])) for _ in range(2))
    if rng.integers(6) == 0:
        groups, c_out = c_in, c_in * int(rng.choice([1, 2]))  # depthwise
    kernel, stride, dilation = ([int(n) for n in rng.integers(1, most, dims)] for most in (5, 4, 3))
    sizes = [int(rng.choice([1, 2, 3, 5, 8, 12])) for _ in range(dims)]
    padding = tuple((int(low), int(high)) for low, high in rng.integers(-1, 4, (dims, 2)))
    window = Placement(tuple(stride), padding, tuple(dilation))
    x, weight = (int(rng.choice([1, 2, 5])), c_in, *sizes), (c_out, c_in // groups, *kernel)
    problem = Problem(x, weight, window, groups, "float32", channels_last=bool(rng.integers(2)))
    cut = (n + min(low, 0) + min(high, 0) for n, (low, high) in zip(sizes, padding, strict=True))
    return None if 0 in problem.y or min(cut) < 1 else problem


def operands(problem: Problem, seed: int) -> Arrays:
    """Draw x, the weight and dy, of the problem's dtype but as float64, in N x C x features."""
    rng = np.random.default_rng(seed)
    shapes = {"x": problem.x, "weight": problem.weight, "dy": problem.y}
    return {
        name: np.asarray(jnp.asarray(rng.normal(size=shape), problem.dtype)).astype("float64")
        for name, shape in shapes.items()
    }


def reference(problem: Problem) -> Callable[[Arrays], dict[Direction, Any]]:
    """Compile XLA's convolution and its gradients on an x that is padded, or cropped, beforehand."""

    def forward(x: jax.Array, weight: jax.Array) -> jax.Array:
        padding = [(0, 0, 0)] * 2 + [(low, high, 0) for low, high in problem.window.padding]
        return lax.conv_general_dilated(
            lax.pad(x, jnp.zeros((), x.dtype), padding),
            weight,
            problem.window.stride,
            "VALID",
            rhs_dilation=problem.window.dilation,
            feature_group_count=problem.groups,
        )

    @jax.jit
    def all_three(x: jax.Array, weight: jax.Array, dy: jax.Array) -> dict[Direction, jax.Array]:
        y, pullback = jax.vjp(forward, x, weight)
        return dict(zip(DIRECTIONS, (y, *pullback(dy)), strict=True))

    def computed(arrays: Arrays) -> dict[Direction, Any]:
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, all_three(**arrays))

    return computed


def by_onednn(problem: Problem, arrays: Arrays, direction: Direction) -> np.ndarray:
    """Compute one direction in the problem's dtype and order of dimensions; the result is in N x C x features."""
    given = {"x": (0, *range(2, 2 + problem.dims), 1), "weight": (*range(2, 2 + problem.dims), 1, 0)}
    given["dy"] = given["x"]
    results: dict[Direction, str] = {"forward": "dy", "input_gradient": "x", "weight_gradient": "weight"}
    names = [name for name in ("weight", "x", "dy") if name != results[direction]]
    if direction == "forward":
        names.reverse()
    as_given = [np.transpose(arrays[n], given[n]) if problem.channels_last else arrays[n] for n in names]
    run = jax.jit(lambda *operands: getattr(onednn, direction)(problem, *operands))
    got = run(*(jnp.asarray(a, problem.dtype) for a in as_given))
    assert got.dtype == problem.dtype
    wide = np.asarray(got).astype("float64")
    return np.transpose(wide, np.argsort(given[results[direction]])) if problem.channels_last else wide


def summands(problem: Problem, direction: Direction) -> int:
    """Return how many products one entry of the result is the sum of, at most."""
    c_out, c_in, *kernel = problem.weight
    if direction == "weight_gradient":
        return problem.x[0] * int(np.prod(problem.y[2:]))
    return (c_in if direction == "forward" else c_out // problem.groups) * int(np.prod(kernel))


def check(problem: Problem, seed: int) -> int:
    """Compare the directions that oneDNN computes with XLA's, and return their number."""
    computable = [d for d in DIRECTIONS if onednn.can_compute(problem, d)]
    if not computable:
        return 0
    arrays, in_float64 = operands(problem, seed), reference(problem)
    expected = in_float64(arrays)
    scales = in_float64({name: np.abs(a) for name, a in arrays.items()})  # the sums of the absolute products
    for direction in computable:
        of_sums = 2.0**-24 * (4 + 2 * np.sqrt(summands(problem, direction)))
        of_operands = 2.0**-7 * 1.01 if problem.fast_math else 0  # 2^-8 for each of two
        of_result = 2.0**-8 if problem.dtype == "bfloat16" else 2.0**-24
        allowed = (of_sums + of_operands) * scales[direction] + of_result * np.abs(expected[direction]) + 1e-30
        error = np.abs(by_onednn(problem, arrays, direction) - expected[direction])
        worst = float((error / allowed).max())
        assert worst <= 1, f"{direction} is off by {worst:.2g} of what is allowed: {problem}"
    return len(computable)


@pytest.mark.parametrize("seed", range(16 * LONG))
def test_drawn_convolutions(seed: int) -> None:
    """float32, with products of bfloat16, and bfloat16 where the processor has it, of one shape."""
    problem = next(filter(None, map(drawn, count(1000 * seed))))  # the first that is not empty
    assert check(problem, seed)
    check(replace(problem, fast_math=True), seed)
    check(replace(problem, dtype="bfloat16"), seed)


def small(dtype: str = "float32", **options: Any) -> Problem:
    """Return a convolution of 16 channels in two dimensions."""
    window = Placement((1, 1), ((1, 1), (1, 1)), (1, 1))
    return Problem((2, 16, 9, 8), (16, 16, 3, 3), window, 1, dtype, **options)


def test_what_it_takes_for_which_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    """float16 and depthwise bfloat16 are never computed as such; the names printed are oneDNN's own."""
    native = {"float32": True, "bfloat16": multiplies_bfloat16(), "float16": False, "float64": False}
    lines = [description()]
    for dtype, channels_last, fast_math in product(native, (False, True), (False, True)):
        problem = small(dtype, channels_last=channels_last, fast_math=fast_math)
        depthwise = replace(problem, weight=(16, 1, 3, 3), groups=16)
        names = [onednn.implementation(problem, direction) or "none" for direction in DIRECTIONS]
        for direction, name in zip(DIRECTIONS, names, strict=True):
            assert onednn.can_compute(problem, direction) == native[dtype]
            assert onednn.can_compute(depthwise, direction) == (dtype == "float32")
            assert (name != "none") == native[dtype] and not name.startswith("ref")
        if native[dtype] and not (fast_math and dtype == "bfloat16"):
            order = "channels last" if channels_last else "channels first"
            lines.append(f"  {dtype}{', fast' if fast_math else ''}, {order}: {', '.join(names)}")
    with capsys.disabled():
        print("", *lines, sep="\n")


def test_products_of_bfloat16_are_those_of_rounded_operands() -> None:
    """And without bfloat16 on the processor, or depthwise, they are float32's, bit for bit."""
    for problem in (small(), small(channels_last=True), replace(small(), weight=(16, 1, 3, 3), groups=16)):
        fast, arrays = replace(problem, fast_math=True), operands(problem, 0)
        rounds = multiplies_bfloat16() and problem.groups == 1
        rounded = {name: np.asarray(jnp.asarray(a, "bfloat16")).astype("float64") for name, a in arrays.items()}
        for direction in DIRECTIONS:
            got = by_onednn(fast, arrays, direction)
            assert np.array_equal(got, by_onednn(problem, arrays, direction)) == (not rounds)
            assert np.array_equal(got, by_onednn(fast, rounded, direction)) == rounds


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_bfloat16)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_nan_and_infinity_go_where_they_are_read(dtype: str, channels_last: bool) -> None:
    problem = small(dtype, channels_last=channels_last)
    arrays = operands(problem, 0)
    arrays["x"][0, 3, 4, 5], arrays["x"][1, 2, 0, 0] = np.nan, np.inf
    expected, got = reference(problem)(arrays)["forward"], by_onednn(problem, arrays, "forward")
    for is_special in (np.isnan, np.isposinf, np.isneginf):
        assert is_special(expected).any() and np.array_equal(is_special(got), is_special(expected))


@pytest.mark.parametrize(
    ("dtypes", "named"),
    [
        (("float32", "bfloat16", "float32"), "F32, BF16 and F32"),
        (("bfloat16", "bfloat16", "float32"), "BF16, BF16 and F32"),
        (("float16", "float16", "float16"), "F16, F16 and F16"),
    ],
)
def test_mixed_and_other_dtypes_are_refused(dtypes: tuple[str, str, str], named: str) -> None:
    problem, ints = small(), {name: np.ones(2, np.int64) for name in ("stride", "dilation", "low", "high")}
    result = jax.ShapeDtypeStruct(problem.y, dtypes[2]), jax.ShapeDtypeStruct((10**6,), "uint8")
    call = jax.ffi.ffi_call(target("forward"), result)
    flags = {"groups": np.int64(1), "order": np.int64(0), "channels_last": False, "fast_math": False}
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"must all be F32 or all be BF16, but are {named}"):
        jax.block_until_ready(
            call(jnp.ones(problem.x, dtypes[0]), jnp.ones(problem.weight, dtypes[1]), **ints, **flags)
        )


@needs_bfloat16
def test_a_processor_without_bfloat16() -> None:
    """oneDNN's own limit of the instruction set makes this one such; it must be set before the library is loaded."""
    tests = "which_dtype or rounded_operands or drawn_convolutions[0] or drawn_convolutions[1]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests, __file__]
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience(120), check=False)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout
    assert "computes with avx2: bfloat16 and float16 in float32" in done.stdout
