"""Loops and branches: what stays pending in them, who decides on them, and what the plan counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distdl_jax as dj
from distdl_jax import TensorSpec

RNG = np.random.default_rng(0)
STEPS, BATCH, FEATURES = 6, 7, 5
X, Y = RNG.normal(size=(STEPS, BATCH, 3)), RNG.normal(size=(BATCH, FEATURES))
PARAMS = RNG.normal(size=(3, FEATURES)), 0.3 * RNG.normal(size=(FEATURES, FEATURES)), RNG.normal(size=FEATURES)


def recurrent(params: Any, x: Any, y: Any) -> Any:
    w, u, b = params

    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w + h @ u + b)
        return h, jnp.mean(h**2)

    h, penalties = lax.scan(step, jnp.zeros((x.shape[1], FEATURES), x.dtype), x)
    return jnp.mean((h - y) ** 2) + jnp.sum(penalties)


def of_a_batch(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params[0] + params[2]) @ params[1] - y) ** 2)


def zeros(params: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, params)


def accumulated(params: Any, x: Any, y: Any) -> Any:
    """Return the loss and the gradient over microbatches, as most training loops accumulate them."""

    def step(total: Any, x: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(of_a_batch)(params, x, y)), None

    return lax.scan(step, (jnp.zeros((), x.dtype), zeros(params)), x)[0]


def accumulated_by_number(params: Any, x: Any, y: Any) -> Any:
    def step(i: Any, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.grad(of_a_batch)(params, x[i], y))

    return lax.fori_loop(0, len(x), step, zeros(params))


def branched(params: Any, x: Any, y: Any) -> Any:
    gradient = jax.grad(of_a_batch)
    return lax.cond(jnp.sum(params[2]) > 0, lambda: gradient(params, x[0], y), lambda: gradient(params, x[1], y * 2))


def decayed(params: Any, x: Any, y: Any) -> Any:
    """Return a sum that is scaled in each pass, and one that is read."""

    def step(carry: Any, x: Any) -> Any:
        mean, state = carry
        return (0.9 * mean + jnp.mean(x, 0), jnp.sin(state) + jnp.mean(x)), None

    return lax.scan(step, (jnp.zeros(3, x.dtype), jnp.ones((), x.dtype)), x)[0]


@pytest.mark.parametrize(
    ("function", "sums"),
    [
        (jax.value_and_grad(recurrent), {"sum": 2}),  # the loss, which the derivative needs not, and the gradients
        (accumulated, {"sum": 1}),
        (accumulated_by_number, {"sum": 1}),
        (branched, {"sum": 1}),
        (decayed, {"sum": STEPS + 1}),  # what each pass reads is settled in each pass
    ],
)
def test_sums_stay_pending_through_loops_and_branches(function: Callable[..., Any], sums: dict[str, int]) -> None:
    with jax.enable_x64(True):
        params, x, y = jax.tree.map(jnp.asarray, (PARAMS, X, Y))
        expected = jax.jit(function)(params, x, y)

        def program() -> None:
            P = dj.Partition()
            of_x, of_y = TensorSpec(x.shape, P.grid([1, 3, 1])), TensorSpec(y.shape, P.grid([3, 1]))
            f = dj.distribute(function, (None, of_x, of_y), gather=0)
            args = params, of_x.block(x), of_y.block(y)
            for a, b in zip(jax.tree.leaves(jax.jit(f)(*args)), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)
            counted = Counter[str]()
            for moved in f.plan(*args).moved:
                counted[moved.what] += moved.times * len(moved.operations)
            assert counted == sums

        dj.simulate(3, program)


def converging(x: Any) -> Any:
    """Divide until the mean of squares is small: a number that depends on all blocks decides."""
    return lax.while_loop(lambda c: jnp.mean(c[1] ** 2) > 0.01, lambda c: (c[0] + 1, c[1] / 2), (0, x))


def chosen_by_data(x: Any) -> Any:
    return lax.cond(jnp.mean(x) > 0, lambda x: jnp.roll(x, 1, 0), lambda x: x * 2, x)


def chosen_by_numbers(x: Any) -> Any:
    def step(i: Any, x: Any) -> Any:
        return lax.cond(i % 2 == 0, lambda x: jnp.roll(x, 1, 0), lambda x: x * 2, x)

    return lax.while_loop(lambda c: c[0] * 0.5 < 2, lambda c: (c[0] + 1, step(c[0], c[1])), (0, x))


def local_choice(x: Any) -> Any:
    return lax.cond(jnp.mean(x) > 0, lambda x: x * 3, lambda x: x * 2, x)


@pytest.mark.parametrize(
    ("function", "decides"),
    [(converging, True), (chosen_by_data, True), (chosen_by_numbers, False), (local_choice, False)],
)
def test_the_first_worker_decides_on_messages_by_data(function: Callable[..., Any], decides: bool) -> None:
    """What integers and constants decide, all workers decide alike, and nothing is sent for it."""
    x = np.random.default_rng(1).normal(size=(7, 2)).astype(np.float32)
    expected = jax.tree.leaves(jax.jit(function)(x))

    def program() -> None:
        spec = TensorSpec(x.shape, dj.Partition().grid([3, 1]))
        f = dj.distribute(function, (spec,), gather=None)
        for a, b in zip(jax.tree.leaves(jax.jit(f)(spec.block(x))), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        whats = [moved.what for moved in f.plan(spec.block(x)).moved]
        assert ("first worker's" in whats) == decides, whats

    dj.simulate(3, program)


def test_workers_that_round_differently_decide_alike() -> None:
    """The predicate is computed from copies that differ by a rounding, and the branches send messages."""

    def f(shift: Any, x: Any) -> Any:
        return lax.cond(jnp.sum(x) + shift > 12, lambda x: jnp.roll(x, 1, 0), lambda x: x, x)

    def program() -> Any:
        P = dj.Partition()
        spec = TensorSpec((4, 3), P.grid([2, 1]))
        shift = jnp.float32(1e-6 * P.rank)
        return jax.jit(dj.distribute(f, (dj.COPIES, spec), spec))(shift, jnp.full((2, 3), 1.0 + P.rank * 0))

    np.testing.assert_array_equal(np.concatenate(dj.simulate(2, program)), np.ones((4, 3)))


def test_the_plan_counts_each_pass_of_a_scan() -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.roll(c, 1, 0), None), x, None, length=5)[0]

    def program() -> None:
        spec = TensorSpec((4, 3), dj.Partition().grid([2, 1]))
        plan = dj.distribute(f, (spec,), spec).plan(spec.block(np.ones((4, 3))))
        assert [(moved.what, moved.times) for moved in plan.moved] == [("neighbours", 5)]
        assert plan.messages == 5 * len(plan.moved[0].operations) > 0

    dj.simulate(2, program)


def test_a_shared_weights_gradient_is_summed_once() -> None:
    """The terms of its two uses are added before they travel, though a norm's sum is due between them."""

    def loss(w: Any, x: Any) -> Any:
        y = jnp.sin(x * w)
        return jnp.mean(((y - jnp.mean(y)) * w) ** 2)

    x = np.random.default_rng(3).normal(size=(6, 40)).astype(np.float32)
    w = np.linspace(1, 2, 40, dtype=np.float32)

    def program() -> None:
        spec = TensorSpec(x.shape, dj.Partition().grid([2, 1]))
        f = dj.distribute(jax.grad(loss), (None, spec))
        np.testing.assert_allclose(jax.jit(f)(w, spec.block(x)), jax.grad(loss)(w, x), rtol=1e-4, atol=1e-6)
        assert sum(moved.shape == (40,) for moved in f.plan(w, spec.block(x)).moved) == 1

    dj.simulate(2, program)


def nested(w: Any, x: Any) -> Any:
    def inner(c: Any, row: Any) -> Any:
        return jnp.tanh(c * w + row), jnp.sum(c)

    def outer(c: Any, _: Any) -> Any:
        c, sums = lax.scan(inner, c, x[:3])
        return c, jnp.sum(sums)

    c, sums = lax.scan(outer, jnp.zeros(len(w), x.dtype), None, length=2)
    return jnp.sum(sums) + jnp.mean(c**2)


def checkpointed(w: Any, x: Any) -> Any:
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x * w) + jnp.mean(x))
    return jnp.mean(lax.scan(lambda x, _: (layer(x, w), None), x, None, length=3)[0] ** 2)


def branch_in_a_scan(w: Any, x: Any) -> Any:
    def step(c: Any, i: Any) -> Any:
        chosen = lax.cond(i % 2 == 0, lambda c: c * w + jnp.mean(c, 0), lambda c: jnp.roll(c, 1, 0) * w, c)
        return chosen, jnp.sum(c * w)

    y, sums = lax.scan(step, x, jnp.arange(4))
    return jnp.mean(y**2) + sums.sum()


def begun_as_a_sum(w: Any, x: Any) -> Any:
    return jnp.sum(lax.fori_loop(0, 3, lambda i, s: s + jnp.sum(x * i, 0), jnp.sum(x * w, 0)) * w)


def exchanged(w: Any, x: Any) -> Any:
    """Two carries that change places: one begins whole, and both become sums."""

    def step(carry: Any, _: Any) -> Any:
        a, b = carry
        return (b + jnp.sum(x), a * 2), None

    a, b = lax.scan(step, (jnp.zeros((), x.dtype), jnp.ones((), x.dtype)), None, length=5)[0]
    return (a + b) * w.sum()


def backwards(w: Any, x: Any) -> Any:
    c, ys = lax.scan(lambda c, row: (c * 0.9 + row * w, c), jnp.zeros(len(w), x.dtype), x, reverse=True)
    return jnp.sum(ys**2) + jnp.sum(c)


def loops_of_each_row(w: Any, x: Any) -> Any:
    """Under jax.vmap: those that have ended wait for the others."""
    ended = jax.vmap(lambda row: lax.while_loop(lambda c: jnp.sum(c**2) > 0.1, lambda c: c * 0.5, row))(x * w)
    return jnp.sum(lax.stop_gradient(ended) * w)


@pytest.mark.parametrize(
    "function", [nested, checkpointed, branch_in_a_scan, begun_as_a_sum, exchanged, backwards, loops_of_each_row]
)
def test_loops_and_their_derivatives_are_those_of_one_process(function: Callable[..., Any]) -> None:
    with jax.enable_x64(True):
        x, w = jnp.asarray(RNG.normal(size=(8, 6))), jnp.linspace(0.5, 1.5, 6)
        value, gradient = jax.jit(jax.value_and_grad(function))(w, x)

        def program() -> None:
            spec = TensorSpec(x.shape, dj.Partition().grid([3, 1]))
            inside = dj.distribute(jax.value_and_grad(function), (None, spec), gather=None)
            outside = dj.value_and_grad(dj.distribute(function, (dj.VARIABLE, spec), dj.PARTS, gather=None))
            for f in (inside, outside):
                found = jax.jit(f)(w, spec.block(x))
                np.testing.assert_allclose(found[0], value, rtol=1e-11)
                np.testing.assert_allclose(found[1], gradient, rtol=1e-10, atol=1e-12)

        dj.simulate(3, program)
