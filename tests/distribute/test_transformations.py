"""Transformations around a distributed function, and inside of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jobs import run

import distdl_jax as dj
from distdl_jax import TensorSpec


def softened(w: Any, x: Any) -> Any:
    return jnp.sum(jax.nn.softmax(jnp.roll(x, 1, 0) * w, 0) ** 2 * x)


def descended(gradient: Callable[..., Any], w: Any, x: Any) -> Any:
    """Return w after three steps in a scan."""
    return jax.lax.scan(lambda w, _: (w - 0.1 * gradient(w, x), None), w, None, length=3)[0]


def test_transformations_around_it_and_inside() -> None:
    with jax.enable_x64(True):
        x, w = np.random.default_rng(3).normal(size=(7, 3)), np.arange(3.0) + 1
        of_w, of_x = np.ones(3), np.cos(x)
        value, gradient = jax.value_and_grad(softened)(w, x)
        second = jax.jvp(jax.grad(softened, (0, 1)), (w, x), (of_w, of_x))[1]
        along = jax.jvp(softened, (w, x), (of_w, of_x))[1]
        after = descended(jax.grad(softened), w, x)

        def program() -> None:
            spec = TensorSpec(x.shape, dj.Partition().grid([3, 1]))
            block, direction = spec.block(x), spec.block(of_x)
            whole, parts, copies = (
                dj.distribute(softened, (meaning, spec), out)
                for meaning, out in ((None, None), (dj.VARIABLE, dj.PARTS), (dj.VARIABLE, dj.COPIES))
            )
            inside = dj.distribute(partial(descended, jax.grad(softened)), (None, spec))
            products = dj.hvp(parts, (w, block), (of_w, direction), argnums=(0, 1))
            found = {
                "eager": (whole(w, block), value),
                "jit": (jax.jit(whole)(w, block), value),
                "dj.jit": (dj.jit(whole)(w, block), value),
                "vmap": (jax.vmap(whole, (0, None))(np.stack([w, w]), block), np.stack([value, value])),
                "checkpoint": (dj.grad(jax.checkpoint(parts))(w, block), gradient),
                "scan": (jax.jit(partial(descended, dj.grad(parts)))(w, block), after),
                "scan inside": (jax.jit(inside)(w, block), after),
                "hvp, of a variable": (products[0], second[0]),
                "hvp, of blocks": (products[1], spec.block(second[1])),
                "jvp": (dj.jvp(copies, (w, block), (of_w, direction))[1], along),
            }
            for name, (a, b) in found.items():
                np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12, err_msg=name)
            assert dj.check(dj.value_and_grad(parts), w, block).ok

        dj.simulate(3, program)


INSIDE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "jit": (lambda f, x, v: dj.jit(f)(x), lambda f, x, v: f(x)),
    "jvp": (lambda f, x, v: dj.jvp(f, (x,), (v,)), lambda f, x, v: jax.jvp(f, (x,), (v,))),
    "linearize": (lambda f, x, v: dj.linearize(f, x)[1](v), lambda f, x, v: jax.jvp(f, (x,), (v,))[1]),
    "hvp": (lambda f, x, v: dj.hvp(f, (x,), (v,)), lambda f, x, v: jax.jvp(jax.grad(f), (x,), (v,))[1]),
    "linear_transpose": (lambda f, x, v: dj.linear_transpose(doubled, x)(v)[0], lambda f, x, v: 2 * jnp.roll(v, -1, 0)),
    "check": (lambda f, x, v: x * dj.check(f, x).ok, lambda f, x, v: x),
}


def doubled(x: Any) -> Any:
    return 2 * jnp.roll(x, 1, 0)


@pytest.mark.parametrize("name", INSIDE)
def test_inside_these_are_jaxs(name: str) -> None:
    """In a distributed function there is one program, on whole arrays; a plan agrees on nothing."""
    inside, expected = INSIDE[name]
    f = partial(softened, np.arange(3.0) + 1)
    with jax.enable_x64(True):
        x = np.random.default_rng(3).normal(size=(7, 3))
        whole = expected(f, x, np.cos(x))

        def program() -> None:
            spec = TensorSpec(x.shape, dj.Partition().grid([3, 1]))
            g = dj.distribute(lambda x, v: inside(f, x, v), (spec, spec))
            if dj.Partition().rank == 1:
                g.plan(spec.block(x), spec.block(np.cos(x)))
            found = g(spec.block(x), spec.block(np.cos(x)))
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)

        dj.simulate(3, program)


def test_it_is_checked_with_leaves_of_any_kind() -> None:
    """A function among the arguments; jitted or not."""

    def program() -> None:
        spec = TensorSpec((5, 3), dj.Partition().grid([2, 1]))
        f = dj.distribute(lambda act, x: act(x).sum(), (None, spec))
        for g in (f, dj.jit(f)):
            report = dj.check(g, jnp.tanh, jnp.ones(spec.local_shape))
            assert report.ok
            assert [len(program) for program in report.programs.values()] == [1, 1]

    dj.simulate(2, program)


DIFFERENT = """
import jax.numpy as jnp
import distdl_jax as dj
spec = dj.TensorSpec((4,), dj.Partition().grid([2]))
f = dj.distribute(lambda x: x.sum(), (spec,))
x = jnp.ones(2)
if dj.Partition().rank == 0:
    f(x)
else:
    dj.functional.all_sum_reduce(x, dj.Partition(), axes_keep=())
"""


def test_a_deadlock_is_found() -> None:
    """Where one worker calls a distributed function, and another one something else; both are named."""
    status, output = run(2, "-c", DIFFERENT)
    assert status != 0
    assert "all_sum_reduce" in output and "the program of" in output, output
