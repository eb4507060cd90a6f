"""Rows by number and windows whose start is computed, on cut dimensions: values and both ways of differentiating."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distdl_jax as dj
from distdl_jax import TensorSpec

drawn = np.random.default_rng(0)
X = drawn.normal(size=(7, 5))
LONG = drawn.normal(size=(40, 6))
MANY = drawn.normal(size=(50, 6))
BEYOND = np.array([3, 50, -60, 39, -1])
IDS = drawn.integers(-45, 45, 50)
KNOWN = drawn.integers(0, 30, 50)
TOKENS = drawn.integers(0, 11, (8, 6))


class Case(NamedTuple):
    """A function, its arguments, and which of them are cut; others are whole."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    cut: tuple[int, ...] = (0,)


def taken(**options: Any) -> Callable[..., Any]:
    return lambda x, i: jnp.take(x, i, 0, **options)


CASES = {
    "rows": Case(lambda x, i: x[i], (X, np.array([0, 6, 2, 2, -1]))),
    "rows, known": Case(lambda x: x[np.array([[0, 6], [2, -1], [2, 3]])], (X,)),
    "columns, known": Case(lambda x: jnp.take(x, np.array([[0, 3], [4, 4]]), 1), (X,)),
    "few rows, filled": Case(taken(), (LONG, BEYOND)),
    "few rows, filled with 5": Case(taken(mode="fill", fill_value=5.0), (LONG, BEYOND)),
    "few rows, clipped": Case(taken(mode="clip"), (LONG, BEYOND)),
    "few rows of a sum": Case(lambda x, i: taken(mode="fill", fill_value=5.0)(x @ X.T @ X, i), (LONG[:, :5], BEYOND)),
    "few rows of a whole number": Case(lambda x, i: taken()(jnp.floor(4 * x).astype(int), i) * x[:5], (LONG, BEYOND)),
    "narrow numbers": Case(lambda x, i: x[i], (np.tile(LONG, (3, 1)), np.array([3, -1, 119], np.int8))),
    "one row": Case(lambda x, i: x[i], (LONG, np.array(77))),
    "entries": Case(lambda x, i: x[i, i + 1], (LONG, np.array([1, 3, 0]))),
    "window": Case(lambda x, i: lax.dynamic_slice(x, (i, i), (9, 2)), (LONG, np.array(38, np.int8))),
    "window, known": Case(lambda x: lax.dynamic_slice(x, (2, 1), (19, 3)), (LONG,)),
    "long window": Case(lambda x, i: lax.dynamic_slice(x, (i, 0), (30, 6)), (LONG, np.array(-17))),
    "windows": Case(
        lambda x, i: jax.vmap(lambda i: lax.dynamic_slice(x, (i, 0), (3, 4)))(i), (LONG, np.array([0, 38, 12, -4]))
    ),
    "update": Case(
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 1)), (LONG, MANY[:11, :2], np.array(17)), cut=(0,)
    ),
    "update at the end": Case(
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), (LONG, MANY[:15], np.array(35)), cut=(0, 1)
    ),
    "update, known": Case(lambda x, u: lax.dynamic_update_slice(x, u, (8, 0)), (LONG, MANY[:15]), cut=(0, 1)),
    "updates": Case(
        lambda x, i: jax.vmap(lambda i: lax.dynamic_update_slice(x, x[:3, :4] * 2, (i, 1)))(i),
        (LONG, np.array([0, 38, -4])),
    ),
    "set, repeated": Case(lambda x, u, i: x.at[i].set(u), (LONG, MANY[:6], np.array([3, 1, 3, 39, 50, 1])), cut=(0, 1)),
    "set, clipped": Case(
        lambda x, u, i: x.at[i].set(u, mode="clip"), (LONG, MANY[:5], np.array([3, 1, 4, -70, 50])), cut=(0, 1)
    ),
    "add": Case(lambda x, u, i: x.at[i].add(u), (LONG, MANY, IDS), cut=(0, 1)),
    "add to cut rows": Case(lambda x, u, i: x.at[i].add(u), (LONG[:9], MANY, IDS % 9), cut=(0, 1)),
    "minimum": Case(lambda x, u, i: x.at[i].min(u), (LONG, MANY, IDS), cut=(0, 1)),
    "product": Case(
        lambda x, u, i: x.at[i].multiply(u, unique_indices=True), (LONG, MANY[:4], np.array([3, 39, 50, 1])), cut=(0,)
    ),
    "sums of segments": Case(lambda u, i: jax.ops.segment_sum(u, i, 40), (MANY, IDS)),
    "sums of segments, known": Case(lambda u: jax.ops.segment_sum(u, KNOWN, 30), (MANY,)),
    "largest of segments": Case(lambda u: jax.ops.segment_max(u, KNOWN, 30), (MANY,)),
    "shifted assignment": Case(lambda x: x.at[1:].set(2 * x[:-1]), (X,)),
    "interior": Case(lambda x: x.at[1:-1, 1:-1].add(x[2:, 2:] * x[:-2, :-2]).at[1:-1, 0].multiply(3.0), (X,)),
    "along an axis": Case(lambda x: jnp.take_along_axis(x, jnp.argsort(x, 0), 0), (X,)),
    "embedding": Case(lambda w, i: jnp.sum(w[i], 0), (LONG[:11], TOKENS), cut=(1,)),
    "embedding, cut in rows": Case(lambda w, i: jnp.tanh(w[i]), (LONG[:11], TOKENS), cut=(0, 1)),
    "embedding as a product": Case(lambda w, i: jax.nn.one_hot(i, 11) @ w, (LONG[:11], TOKENS), cut=(0, 1)),
    "k largest of more than a block": Case(lambda x: lax.top_k(x.T, 17), (np.round(LONG, 1),)),
}


def loss_of(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss that depends on each entry of the results in its own way."""

    def loss(*args: Any) -> Any:
        total = 0.0
        for y in map(jnp.asarray, jax.tree.leaves(f(*args))):
            weights = jnp.cos(jnp.arange(y.size) + 0.5).reshape(y.shape)
            total += jnp.sum(weights * jnp.where(jnp.isfinite(y), y, 3.0) ** 2)
        return total

    return loss


def differs(case: Case, grid: tuple[int, int], gather: int | None) -> str | None:
    """Return how a case differs from the single process; None if it doesn't."""
    args, loss = [jnp.asarray(x) for x in case.args], loss_of(case.f)
    floats = [n for n, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]
    value, gradients = jax.jit(jax.value_and_grad(loss, floats))(*args)

    def program() -> str | None:
        P = dj.Partition().grid(grid if args[0].ndim == 2 else (1, *grid, 1))
        specs = [TensorSpec(x.shape, P) if n in case.cut else None for n, x in enumerate(args)]
        blocks = [x if spec is None else spec.block(x) for x, spec in zip(args, specs, strict=True)]
        of_floats = tuple(specs[n] for n in floats)
        expected = (
            value,
            tuple(dy if spec is None else spec.block(dy) for dy, spec in zip(gradients, of_floats, strict=True)),
        )
        inside = dj.distribute(jax.value_and_grad(loss, floats), tuple(specs), (None, of_floats), gather=gather)
        variables = [dj.VARIABLE if spec is None and n in floats else spec for n, spec in enumerate(specs)]
        outside = dj.value_and_grad(dj.distribute(loss, tuple(variables), dj.PARTS, gather=gather), floats)
        found = jax.jit(lambda *blocks: (inside(*blocks), outside(*blocks)))(*blocks)
        for number, (a, b) in enumerate(
            zip(jax.tree.leaves(found), jax.tree.leaves((expected, expected)), strict=True)
        ):
            if not np.allclose(a, b, rtol=1e-11, atol=1e-11):
                return f"inside and outside, leaf {number}: {a} for {b}"
        return None

    return next((text for text in dj.simulate(int(np.prod(grid)), program) if text), None)


IMAGE = drawn.normal(size=(2, 9, 7, 2))
CASES |= {
    "enlarged": Case(lambda x: jax.image.resize(x, (2, 18, 14, 2), "linear"), (IMAGE,)),
    "reduced, mapped": Case(jax.vmap(lambda x: jax.image.resize(x, (5, 4, 2), "cubic")), (IMAGE,)),
    "enlarged, differentiated": Case(
        jax.grad(lambda x: jnp.sum(jax.image.resize(x, (2, 18, 14, 2), "linear") ** 3)), (IMAGE,)
    ),
    "enlarged to the nearest": Case(lambda x: jax.image.resize(x, (2, 18, 13, 2), "nearest"), (IMAGE,)),
}

GRIDS = [((3, 1), 0), ((2, 2), None), ((4, 1), 0), ((2, 1), None), ((1, 3), 0)]


@pytest.fixture(autouse=True)
def compiled_quickly() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("name", CASES)
def test_rows_and_windows(name: str) -> None:
    grid, gather = GRIDS[list(CASES).index(name) % len(GRIDS)]
    gather = None if name == "product" else gather  # the factors' gradient falls cut, and is asked for as a whole
    with jax.enable_x64(True):
        assert differs(CASES[name], grid, gather) is None


def test_a_resampling_fetches_a_neighbourhood() -> None:
    """Its weights are known while JAX traces, forward and backward: nothing of the results' size moves."""

    def program() -> None:
        spec = TensorSpec((2, 16, 16, 3), dj.Partition().grid([1, 2, 1, 1]))
        for method, most in (("linear", 1024), ("nearest", 0)):
            loss = lambda x, method=method: jnp.sum(jax.image.resize(x, (2, 32, 32, 3), method) ** 2)  # noqa: E731
            step = dj.distribute(jax.grad(loss), (spec,), spec)
            assert step.plan(spec.block(np.zeros(spec.global_shape, np.float32))).bytes <= most, method

    dj.simulate(2, program)
