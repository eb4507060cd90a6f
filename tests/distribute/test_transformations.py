"""Transformations around a distributed function, and inside of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
