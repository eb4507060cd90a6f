"""Loops that move data, and no derivative depends on: `lax.while_loop` and its kin, of which JAX has no adjoint."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distdl_jax as dj

Moved = Callable[[Any], Any]


def until_large(moved: Moved, x: Any) -> Any:
    """A loop that ends by a number that all workers have."""
    start = jnp.sum(moved(x), axis=-1, keepdims=True)
    return lax.while_loop(
        lambda c: jnp.max(c[0]) < 100, lambda c: (moved(jnp.sum(c[1], -1, keepdims=True)), 1.5 * c[1]), (start, x)
    )[1]


def three_times(moved: Moved, x: Any) -> Any:
    """A loop of which only the data say how long it is."""
    return lax.fori_loop(0, jnp.where(jnp.isnan(jnp.sum(x)), 2, 3), lambda i, c: 0.5 * moved(c), x)


def uses(moved: Moved, x: Any) -> Any:
    """This worker's part of a loss; each term needs a loop's value, and no term its derivative."""
    scanned = lax.scan(lambda c, _: (jnp.sin(c) * lax.stop_gradient(three_times(moved, c)), None), x, None, length=2)[0]
    branched = lax.cond(True, lambda x: lax.stop_gradient(until_large(moved, x)) * moved(x), lambda x: x, x)
    again = jax.checkpoint(lambda x: moved(jnp.sin(x)) * until_large(moved, lax.stop_gradient(jnp.sin(x))))(x)
    large = until_large(moved, moved(x) * x)
    terms = (
        lax.stop_gradient(until_large(moved, x)) * x**3,
        moved(lax.stop_gradient(three_times(moved, x)) * x) * x,
        jnp.where(until_large(moved, x) > 60, x**2, 3 * x),
        jnp.round(three_times(moved, x)).astype(jnp.int32) * x**2,
        jnp.argsort(large, axis=-1) * x**2,
        scanned,
        branched,
        again,
        jax.jit(lambda x: lax.stop_gradient(until_large(moved, x)))(x) * x,
    )
    three_times(moved, x)  # and nobody uses it
    return sum(jnp.sum(term) for term in terms)


BLOCKS = np.array([[0.5, 1.25, -0.75], [1.0, 0.25, 2.0]])


def derivatives(loss: Callable[[Any], Any], grad: Callable[..., Any]) -> Callable[[Any], Any]:
    """The gradient, and a second derivative."""
    return lambda x: (grad(loss)(x), grad(lambda x: jnp.sum(jnp.sin(grad(loss)(x))))(x))


@pytest.mark.simulated(2)
@pytest.mark.parametrize("grad", [jax.grad, dj.grad], ids=["jax.grad", "dj.grad"])
def test_loops_that_no_derivative_depends_on(grad: Callable[..., Any]) -> None:
    P = dj.Partition().grid([2])

    def moved(x: Any) -> Any:
        return dj.functional.all_sum_reduce(x, P, axes_reduce=0)

    def in_one_place(x: Any) -> Any:
        return uses(lambda x: jnp.broadcast_to(jnp.sum(x, axis=0, keepdims=True), x.shape), x)

    got = dj.jit(derivatives(lambda x: uses(moved, x), grad))(BLOCKS[P.rank])
    wanted = jax.jit(derivatives(in_one_place, jax.grad))(BLOCKS)
    for mine, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, want[P.rank], rtol=1e-12)


@pytest.mark.simulated(2)
def test_a_loop_that_is_differentiated_is_refused() -> None:
    P = dj.Partition().grid([2])

    def loss(x: Any) -> Any:
        return jnp.sum(until_large(lambda x: dj.functional.all_sum_reduce(x, P, axes_reduce=0), x))

    for grad in (jax.grad, dj.grad):
        with pytest.raises(ValueError, match=r"Reverse-mode differentiation does not work for lax.while_loop"):
            grad(loss)(BLOCKS[P.rank])
        with pytest.raises(dj.InvalidTypeError, match=r"apply jax.lax.stop_gradient to its inputs"):
            grad(lambda x: jax.checkpoint(loss)(x))(BLOCKS[P.rank])
