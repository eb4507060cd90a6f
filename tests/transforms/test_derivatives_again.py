"""`jax.grad` of what dj.grad, dj.jvp, dj.hvp and dj.linearize give, through derivatives that somebody wrote."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import nn

Function = Callable[[Any], Any]

X = np.array([[1.0, 2.0, 5.0, 3.0], [3.0, -1.0, 2.0, 0.5]])


def total(fun: Function) -> Function:
    return lambda x: jnp.sum(fun(x))


INSIDE: dict[str, Callable[[Function, Any], Any]] = {
    "grad": lambda fun, x: dj.grad(total(fun))(x),
    "jvp": lambda fun, x: dj.jvp(fun, (x,), (jnp.cos(x),))[1],
    "hvp": lambda fun, x: dj.hvp(total(fun), (x,), (jnp.cos(x),)),
    "linearize": lambda fun, x: dj.linearize(fun, x)[1](jnp.cos(x)),
}

PLAIN: dict[str, Callable[[Function, Any], Any]] = {
    "grad": lambda fun, x: jax.grad(total(fun))(x),
    "jvp": lambda fun, x: jax.jvp(fun, (x,), (jnp.cos(x),))[1],
    "hvp": lambda fun, x: jax.jvp(jax.grad(total(fun)), (x,), (jnp.cos(x),))[1],
    "linearize": lambda fun, x: jax.linearize(fun, x)[1](jnp.cos(x)),
}


def agree(fun: Function, whole: Function, names: Sequence[str] = tuple(INSIDE)) -> None:
    """`fun` of this worker's columns of X is as `whole` of all of them."""

    def gradients(inside: dict[str, Callable[[Function, Any], Any]], fun: Function, x: Any) -> dict[str, Any]:
        return {name: jax.grad(lambda x, of=inside[name]: jnp.sum(of(fun, x) ** 2))(x) for name in names}

    expected = jax.jit(lambda x: gradients(PLAIN, whole, x))(X)
    mine = slice(2 * dj.Partition().rank, 2 * dj.Partition().rank + 2)
    for name, got in dj.jit(lambda x: gradients(INSIDE, fun, x))(X[:, mine]).items():
        np.testing.assert_allclose(got, expected[name][:, mine], rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.simulated(2)
def test_a_rule_of_the_users_own_that_holds_an_array() -> None:
    """JAX can't differentiate a jax.custom_vjp by what its function holds, and need not."""
    P = dj.Partition().grid([2])
    factors = np.array([0.5, 2.0])

    @jax.custom_vjp
    def waves(y: Any) -> Any:
        return jnp.sin(y) * factors

    waves.defvjp(lambda y: (waves(y), y), lambda y, dz: (jnp.cos(y) * factors * dz,))
    agree(
        lambda x: waves(dj.functional.all_sum_reduce(x, P, axes_reduce=0)),
        lambda x: jnp.tile(jnp.sin(x[:, :2] + x[:, 2:]) * factors, 2),
    )


@pytest.mark.simulated(2)
def test_a_norm() -> None:
    layer = nn.DistributedLayerNorm(dj.Partition().grid([1, 2]), 4)
    params = layer.init(jax.random.key(0), float)

    def whole(x: Any) -> Any:
        centred = x - jnp.mean(x, 1, keepdims=True)
        return jnp.sin(centred / jnp.sqrt(jnp.mean(centred**2, 1, keepdims=True) + 1e-5))

    agree(lambda x: jnp.sin(layer(params, x)), whole, ["grad"])


@pytest.mark.simulated(2)
def test_a_branch() -> None:
    """Which one was taken is among what the derivative keeps, an integer that is not differentiated."""
    P = dj.Partition().grid([1, 1, 2])
    pool = nn.DistributedMaxPool1d(P, kernel_size=1, stride=2)  # the last of worker 0's elements is not read
    x = np.arange(1.0, 5.0) if P.rank == 0 else np.arange(5.0, 8.0)

    def cubes(x: Any, flag: Any) -> Any:
        return jax.lax.cond(flag > 0, lambda x: jnp.sum(pool(x) ** 3), lambda x: jnp.sum(pool(x)), x)

    def along(x: Any, flag: Any) -> Any:
        return INSIDE["linearize"](lambda x: cubes(x, flag), x)

    got = dj.jit(jax.grad(along))(jnp.asarray(x[None, None]), 1)
    expected = (6 * x * np.cos(x) - 3 * x**2 * np.sin(x)) * (x % 2)
    np.testing.assert_allclose(got[0, 0], expected, rtol=1e-12)
