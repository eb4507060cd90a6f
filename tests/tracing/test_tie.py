"""`tie` keeps what all workers do alike: nothing dropped, and the same values differentiated and batched everywhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.tracing.tie import tie

X, OTHER = np.arange(3.0), np.arange(4.0) + 1


def test_value_is_the_first_argument() -> None:
    for function in (tie, jax.jit(tie)):
        np.testing.assert_array_equal(function(X, OTHER), X)
        np.testing.assert_array_equal(function(np.arange(3), OTHER, X), np.arange(3))
    assert tie(X) is X


def test_batched_where_another_is() -> None:
    """An operation on the result runs for the whole batch, on whatever worker."""
    for in_axes, others in (((None, 0), np.ones((5, 2))), ((None, 1), np.ones((2, 5)))):
        batched = jax.make_jaxpr(jax.vmap(tie, in_axes))(X, others)
        assert [out.aval.shape for out in batched.jaxpr.eqns[-1].outvars] == [(5, 3)]
    np.testing.assert_array_equal(jax.vmap(tie, (1, None), 1)(np.ones((3, 5)), OTHER), np.ones((3, 5)))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_derivatives(transform: Any) -> None:
    """The identity in the first, zero in the others, to any order and in both modes."""

    def f(x: Any, other: Any) -> Any:
        return jnp.sum(transform(tie)(x, other) ** 3)

    dx, dother = jax.grad(f, (0, 1))(X, OTHER)
    np.testing.assert_array_equal(dx, 3 * X**2)
    np.testing.assert_array_equal(dother, 0 * OTHER)
    np.testing.assert_array_equal(jax.grad(f, 1)(X, OTHER), 0 * OTHER)
    np.testing.assert_array_equal(jax.hessian(f)(X, OTHER), np.diag(6 * X))
    primal, tangent = jax.jvp(f, (X, OTHER), (np.ones(3), np.ones(4)))
    assert (primal, tangent) == (np.sum(X**3), np.sum(3 * X**2))


def test_zero_cotangents_are_batched_as_the_first_one() -> None:
    """The zeros that come back to the others have the batch dimension, before anything adds it."""

    def gradient(x: Any, scale: Any) -> Any:
        _, pullback = jax.vjp(tie, x, OTHER)
        return tie(jnp.zeros(2), pullback(scale * x)[1])

    batched = jax.make_jaxpr(jax.vmap(gradient, (None, 0)))(X, np.ones(5))
    assert batched.jaxpr.eqns[-1].outvars[0].aval.shape == (5, 2)


@pytest.mark.world(4)
@pytest.mark.limit(60)
def test_workers_that_differ_in_what_is_constant_match_under_vmap() -> None:
    """Gradients of a batch where one worker's output counts constantly, and a batch of biases alone.

    The cotangent is then constant on that worker, and so is the product of the workers that add no bias.
    """
    P_world = dj.Partition()
    P = P_world.grid([1, 4])
    rows = nn.Repartition(P, P_world.grid([4, 1]))

    def loss(x: Any) -> Any:
        y = rows(x)
        return jnp.sum(y) if P_world.rank == 2 else jnp.sum(y**2)

    xs = np.random.default_rng(0).normal(size=(3, 4, 4))
    gradients = jax.jit(jax.vmap(jax.grad(loss)))(xs[:, :, [P_world.rank]])
    expected = np.where(np.arange(4)[:, None] == 2, 1, 2 * xs[:, :, [P_world.rank]])
    np.testing.assert_allclose(gradients, expected, rtol=1e-14)

    linear = nn.DistributedLinear(
        P_world.grid([1, 2], [0, 1]), P_world.grid([1, 1], [3]), P_world.grid([1, 2], [1, 0]), 4, 6
    )
    params = linear.init(jax.random.key(0), jnp.float64)
    x = jnp.ones((2, 2)) if linear.P_x.active else jnp.zeros((2, 0))
    biases = jnp.stack([params["bias"], params["bias"] + 1])
    y = jax.jit(jax.vmap(lambda bias: linear(params | {"bias": bias}, x)))(biases)
    assert y.shape == (2, 2, 6 if P_world.rank == 3 else 0)
    np.testing.assert_allclose(y[1] - y[0], np.ones(y.shape[1:]), rtol=1e-14)
