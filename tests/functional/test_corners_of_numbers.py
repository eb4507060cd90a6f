"""NaN, infinities, formats of eight bits and divisions by nothing: as plain JAX has them, on two workers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax import nn

NAN, INF = np.nan, np.inf
NUMBERS = [[1.0, NAN, 3.0, 2.0], [NAN, 1.0, 2.0, NAN], [INF, NAN, -INF, 1.0], [INF, 1.0, INF, 2.0], [-INF] * 4]
WITHOUT_INFINITY = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"]


def line() -> tuple[Any, dj.TensorSpec]:
    P = dj.Partition().grid([2])
    return P, dj.TensorSpec((4,), P)


@pytest.mark.simulated(2)
@pytest.mark.parametrize(("op", "plain"), [(F.max, jnp.max), (F.min, jnp.min)])
def test_the_gradient_of_an_extreme(op: Callable[..., Any], plain: Callable[..., Any]) -> None:
    """A NaN, which ties with nothing, makes NaN of all of it, on the other worker, too. (Under jit XLA makes 0 of some
    in plain JAX.)"""
    P, spec = line()
    gradient, expected = dj.jit(dj.grad(lambda x: jnp.sum(op(x, P)) / 2)), jax.grad(plain)
    for numbers in map(np.array, NUMBERS):
        np.testing.assert_array_equal(gradient(spec.block(numbers)), spec.block(expected(numbers)))


@pytest.mark.simulated(2)
@pytest.mark.parametrize("k", [1, 3])
def test_the_order_of_the_largest(k: int) -> None:
    P, spec = line()
    largest, expected = dj.jit(lambda x: F.top_k(x, P, k)), jax.jit(lambda x: jax.lax.top_k(x, k))
    for numbers in map(np.array, [*NUMBERS, [-NAN, 1.0, NAN, 3.0], [-0.0, 0.0, 0.0, -0.0]]):
        for one, other in zip(largest(spec.block(numbers)), expected(numbers), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.simulated(2)
@pytest.mark.parametrize("dtype", [*WITHOUT_INFINITY, "float8_e5m2"])
@pytest.mark.parametrize("numbers", [[1, 0, 3, 2], [-4, -1, -2, -3]])
def test_formats_of_eight_bits(dtype: str, numbers: list[int]) -> None:
    P, spec = line()
    x = jnp.asarray(numbers, dtype)
    assert F.argmax(spec.block(x), P, 0) == jnp.argmax(x)
    pool = nn.DistributedMaxPool1d(P.create_cartesian_topology_partition([1, 1, 2]), kernel_size=3, padding=1, stride=1)
    blocks = dj.TensorSpec((1, 1, 4), pool.P_x)
    wide = jax.lax.reduce_window(x.astype(float), -INF, jax.lax.max, (3,), (1,), [(1, 1)])
    np.testing.assert_array_equal(pool({}, blocks.block(x[None, None])).astype(float), blocks.block(wide[None, None]))


@pytest.mark.simulated(2)
@pytest.mark.parametrize("n", [1, 2])
def test_variances_by_more_than_there_are(n: int) -> None:
    P, _ = line()
    x = jnp.arange(1.0, n + 1)
    for ddof in range(4):
        for op, plain in ((F.var, jnp.var), (F.std, jnp.std)):
            np.testing.assert_array_equal(op(dj.TensorSpec((n,), P).block(x), P, ddof=ddof)[0], plain(x, ddof=ddof))


@pytest.mark.simulated(2)
def test_samples_that_all_do_not_count() -> None:
    """The loss and its gradient are 0, so that such a batch changes nothing."""
    P = dj.Partition().grid([2, 1])
    loss, labels = nn.DistributedCrossEntropyLoss(P), jnp.full(2, -100)
    value, gradient = dj.jit(dj.value_and_grad(lambda x: loss(x, labels)))(jnp.ones((2, 3)))
    assert value == 0 and not gradient.any()
