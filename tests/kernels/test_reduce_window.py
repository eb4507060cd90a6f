"""Windows over any dimensions: what lax makes of them in double precision, and of their first and second derivatives.

All in one process. A case that fails is in the message as one line that can be pasted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal
from launcher.examples import LONG

from distdl_jax.kernels import pooling
from distdl_jax.kernels import reduce_window as windows

EXACT = {"float32": "float32", "float64": "float64", "bfloat16": "float64", "float16": "float64", "int32": "int32"}
INITIAL = {"max": -np.inf, "min": np.inf, "sum": 0.0}
STEP = {"max": lax.max, "min": lax.min, "sum": lax.add}
DIFFERENTIABLE = ("float32", "float64", "bfloat16", "float16")


def drawn(seed: int) -> dict[str, Any]:
    """Draw a reducer, a shape, a dtype and the parameters of windows over one to four dimensions."""
    rng = np.random.default_rng([4, seed])
    rank = int(rng.integers(1, 5))

    def each(*values: int) -> tuple[int, ...]:
        return tuple(int(rng.choice(values)) for _ in range(rank))

    window = each(1, 1, 2, 3)
    padding = tuple((int(low), int(high)) for low, high in rng.integers(-1, 3, (rank, 2)))
    return {
        "reducer": str(rng.choice(list(INITIAL))),
        "dtype": str(rng.choice(list(EXACT))),
        "shape": each(1, 2, 3, 5, 7) if rank < 4 else each(1, 2, 3, 5),
        "window_dimensions": window,
        "window_strides": each(1, 1, 2, 3),
        "padding": padding,
        "base_dilation": each(1, 1, 1, 2),
        "window_dilation": each(1, 1, 1, 1, 2),
    }


def run(*some: dict[str, Any]) -> None:
    """Compare windows of small whole numbers, most of them negative, with ties; their sums are exact."""
    ready = []
    for case in some:
        params = {name: case[name] for name in case if name not in ("reducer", "dtype", "shape")}
        x = np.random.default_rng(len(str(case))).integers(-7, 2, case["shape"])
        length = (
            d * (n - 1) + 1 + sum(pad)
            for n, d, pad in zip(x.shape, case["base_dilation"], case["padding"], strict=True)
        )
        if min(length) >= 0:  # otherwise it crops more than there is
            ready.append((case, params, x))

    def program(door: Callable[..., Any], xs: Any) -> Any:
        results = []
        for (case, params, _), x in zip(ready, xs, strict=True):
            y = door(x, case["reducer"], params)
            gradient = None
            if case["dtype"] in DIFFERENTIABLE and (door is ours or set(case["window_dilation"]) == {1}):
                gradient = jax.grad(lambda x, c=case, p=params: jnp.sum(door(x, c["reducer"], p) * 3.0))(x)
            results.append((y, gradient))
        return results

    xs = [jnp.asarray(x, case["dtype"]) for case, _, x in ready]
    wide = [jnp.asarray(x, EXACT[case["dtype"]]) for case, _, x in ready]
    both = jax.jit(lambda xs, wide: (program(ours, xs), program(by_lax, wide)))(xs, wide)
    for (case, _, _), (got, gradient), (expected, plain) in zip(ready, *both, strict=True):
        assert got.dtype == case["dtype"]
        np.testing.assert_array_equal(np.asarray(got, float), np.asarray(expected, float), err_msg=f"run({case})")
        if plain is not None:
            assert gradient.dtype == case["dtype"]
            np.testing.assert_array_equal(np.asarray(gradient, float), np.asarray(plain, float), err_msg=f"run({case})")


def ours(x: jax.Array, reducer: Any, params: dict[str, Any]) -> jax.Array:
    return windows.reduce_window(x, reducer, **params)


def by_lax(x: jax.Array, reducer: str, params: dict[str, Any]) -> jax.Array:
    initial = INITIAL[reducer]
    if x.dtype == "int32":
        initial = {"max": -(2**31), "min": 2**31 - 1, "sum": 0}[reducer]
    initial = np.asarray(initial, x.dtype)
    # Its gradient fails if padding is negative.
    gaps, padding = params.get("base_dilation", (1,) * x.ndim), params["padding"]
    x = lax.pad(x, initial, [(min(low, 0), min(high, 0), d - 1) for (low, high), d in zip(padding, gaps, strict=True)])
    others = {name: params[name] for name in ("window_strides", "window_dilation") if name in params}
    padding = [(max(low, 0), max(high, 0)) for low, high in padding]
    return lax.reduce_window(x, initial, STEP[reducer], params["window_dimensions"], padding=padding, **others)


@pytest.mark.parametrize("first", range(4 * LONG))
def test_drawn(first: int) -> None:
    run(*map(drawn, range(40 * first, 40 * (first + 1))))


def evaluated(program: Any, args: Any, found: list[str]) -> list[Any]:
    """Run a program with its windows by our kernels; append the names of their operations."""
    jaxpr = program.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        given = [each.val if isinstance(each, Literal) else values[each] for each in eqn.invars]
        params, name = (
            {k: v for k, v in eqn.params.items() if k not in ("select_prim", "out_sharding")},
            eqn.primitive.name,
        )
        if "jaxpr" in eqn.params:
            results = evaluated(eqn.params["jaxpr"], given, found)
        elif name.startswith("reduce_window_"):
            results = [windows.reduce_window(*given, name[-3:], **params)]
        elif name.startswith("select_and_"):
            select = {"ge": "max", "le": "min"}[eqn.params["select_prim"].name]
            results = [getattr(windows, name)(*given, select, **params)]
        else:
            results = eqn.primitive.bind(*given, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        if "window" in name or "select_and" in name:
            found.append(name)
        values |= zip(eqn.outvars, results, strict=True)
    return [values[each] for each in jaxpr.outvars]


@pytest.mark.parametrize("most", [pooling.MOST_SLICES, 0])
@pytest.mark.parametrize("reducer", INITIAL)
def test_derivatives_of_jax(reducer: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """First, second, mapped and forward derivatives, channels last and padded; by slices, and by lax's operations."""
    monkeypatch.setattr(pooling, "MOST_SLICES", most)
    x = np.random.default_rng(1).normal(size=(2, 7, 6, 3)) - 5
    params = {
        "window_dimensions": (1, 3, 2, 1),
        "window_strides": (1, 2, 2, 1),
        "padding": ((0, 0), (1, 1), (0, 1), (0, 0)),
    }

    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(by_lax(x, reducer, params)))

    gradient = jax.grad(f)
    second = jax.grad(lambda x: jnp.sum(jnp.cos(gradient(x)) * x))
    mapped, names = jax.vmap(gradient), list[str]()
    forward = jax.jit(lambda x: jax.jvp(gradient, (x,), (jnp.cos(x),))[1])
    for function, at in ((gradient, x), (second, x), (forward, x), (mapped, np.stack([x, -x]))):
        program = jax.make_jaxpr(function)(at)
        (got,) = jax.jit(lambda x, program=program: evaluated(program, [x], names))(at)
        np.testing.assert_allclose(got, function(at), rtol=1e-12, atol=1e-12)
    expected = {"reduce_window_sum"}
    if reducer != "sum":
        expected = {f"reduce_window_{reducer}", "select_and_scatter_add", "select_and_gather_add"}
    assert set(names) == expected


@pytest.mark.parametrize("reducer", ["max", "min"])
def test_our_own_derivatives(reducer: Any) -> None:
    """Of the operations that JAX writes: each is linear, and the adjoint of the other; under vmap and checkpoint."""
    params = {"window_dimensions": (2, 3), "window_strides": (2, 1), "padding": ((1, 0), (0, 1))}
    x, t = np.random.default_rng(2).normal(size=(2, 3, 5, 6))[:, 0], np.random.default_rng(3).normal(size=(2, 3, 6))
    t = np.resize(t, (2, 3, 5))

    def scattered(t: jax.Array, x: jax.Array) -> jax.Array:
        return windows.select_and_scatter_add(t, x, reducer, **params)

    def gathered(t: jax.Array, x: jax.Array) -> jax.Array:
        return windows.select_and_gather_add(t, x, reducer, **params)

    def penalty(t: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(scattered(t, x)) ** 2)

    def expected(t: jax.Array, x: jax.Array) -> jax.Array:
        return gathered(jnp.sin(2 * scattered(t, x)), x)

    np.testing.assert_allclose(jax.vmap(jax.grad(jax.checkpoint(penalty)))(t, x), jax.vmap(expected)(t, x), rtol=1e-12)
    np.testing.assert_allclose(jnp.vdot(t[0], gathered(x[1], x[0])), jnp.vdot(scattered(t[0], x[0]), x[1]), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_number_of_half_precision(dtype: str) -> None:
    """All 2^16, in pairs with others: maxima and minima are those in float32, NaN and subnormals included."""
    one = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
    x = jnp.stack([one, np.random.default_rng(5).permutation(one)])
    for reducer, step in (("max", np.maximum), ("min", np.minimum)):
        got = windows.reduce_window(x, reducer, (2, 1), (1, 1), ((0, 0), (0, 0)))[0]
        expected = step(*np.asarray(x, np.float32))
        np.testing.assert_array_equal(np.asarray(got, np.float32), expected)
