"""The gradient of the largest of all features: to which of those that tie, and however they are rounded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launcher.examples import LONG

import distdl_jax as dj
from distdl_jax import nn


@pytest.mark.simulated(2)
@pytest.mark.parametrize("seed", range(8 * LONG))
def test_the_largest_of_what_is_rounded_in_two_ways(seed: int) -> None:
    """XLA works a norm out anew for each that reads it, with or without fused multiplications as flags have it: none
    may then be equal to the largest. The gradient goes to some all the same."""
    P = dj.Partition().grid([2, 1, 1, 1])
    norm, largest = nn.DistributedGroupNorm(P, 1, 4), nn.DistributedGlobalMaxPool(P)
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(6, 4, 3, 2)), "float32")[P.rank :: 2]

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(largest(norm(params, x)))

    gradient = dj.jit(dj.grad(loss))(norm.init(jax.random.key(0), jnp.float32), x)
    assert gradient["bias"].tolist() == [6] * 4


@pytest.mark.simulated(2)
def test_largest_elements_share_the_gradient() -> None:
    """Those that tie alike, also of second derivatives; -inf is one like others."""
    P = dj.Partition().grid([2, 1, 1])
    largest = nn.DistributedGlobalMaxPool(P)
    x = jnp.asarray([[[3.0, 1, 3], [0, -1, -2], [-jnp.inf] * 3]])

    def loss(x: Any) -> Any:
        return jnp.sum(jnp.maximum(largest(x), -5) ** 2)

    third, half = [1 / 3] * 3, [0.5, 0, 0.5]
    got = dj.jit(dj.grad(lambda x: jnp.sum(largest(x))))(x)
    np.testing.assert_allclose(got[0], [half, [1, 0, 0], third])
    direction = jnp.asarray([[[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]])
    product = dj.jit(lambda x, v: dj.hvp(loss, (x,), (v,)))(x, direction)
    np.testing.assert_allclose(product[0], [[2.0, 0, 2.0], [8, 0, 0], [0, 0, 0]])
