"""Losses that compute in float64 inside `jax.enable_x64`, differentiated outside of it: JAX calls their rules there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax import nn

KEY = jax.random.key(0)


def operations(P: dj.Partition) -> dict[str, Callable[[Array], Array]]:
    """Functions of a block of a 4 x 6 tensor on two workers, with rules of each kind."""
    rows, columns = P.grid([2, 1]), P.grid([1, 2])
    conv = nn.DistributedConv1d(P.grid([1, 1, 2]), in_channels=6, out_channels=2, kernel_size=3, padding=1)
    weights = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), conv.init(KEY))
    norm = nn.DistributedLayerNorm(rows, 6)
    attention = nn.DistributedMultiHeadAttention(P.grid([1, 2, 1]), embed_dim=6, num_heads=2)

    def scanned(x: Array) -> Array:
        return lax.scan(lambda y, _: (F.all_sum_reduce(jnp.sin(y), rows, 0), None), x, length=2)[0]

    def chosen(x: Array) -> Array:
        return lax.cond(
            x[0, 0] > -9, lambda x: F.repartition(x, rows, columns), lambda x: jnp.zeros((4, 3), x.dtype), x
        )

    return {
        "repartition": lambda x: F.repartition(x, rows, columns),
        "sum": lambda x: F.all_sum_reduce(x, rows, axes_reduce=0),
        "max": lambda x: F.max(x, rows),
        "var": lambda x: F.var(x, rows),
        "replicated": lambda x: dj.replicated(x, rows),
        "halo exchange": lambda x: F.halo_exchange(x, rows, ((1, 1), (0, 0))),
        "scan": scanned,
        "cond": chosen,
        "vmap": jax.vmap(lambda x: F.all_sum_reduce(x, P.grid([2]), 0), in_axes=1),
        "checkpoint": jax.checkpoint(lambda x: F.mean(jnp.sin(x), rows) ** 2),
        "convolution": lambda x: conv(jax.tree.map(lambda w: w.astype(x.dtype), weights), x.T[None]),
        "norm": lambda x: norm(norm.init(KEY, x.dtype), x),
        "attention": lambda x: attention(attention.init(KEY, x.dtype), x[None]),
    }


@pytest.mark.simulated(2)
@pytest.mark.parametrize("name", operations(dj.planning_world(2)))
def test_a_derivative_is_that_inside_of_enable_x64(name: str) -> None:
    P = dj.Partition()
    x = jnp.sin(jnp.arange(12.0, dtype=jnp.float32) + 5 * P.rank).reshape(2, 6)

    def loss(x: Array) -> Array:
        with jax.enable_x64(True):
            y = operations(P)[name](x.astype(jnp.float64))
            assert y.dtype == jnp.float64
            total = jnp.sum(jnp.sin(y))
        return total.astype(jnp.float32)

    with jax.enable_x64(True):
        expected = jax.jit(jax.grad(loss))(x)
    with jax.enable_x64(False):
        ways: dict[str, Any] = {"jax": jax.grad, "dj": dj.grad, "jitted": lambda f: jax.jit(jax.grad(f))}
        for way, derivative in {**ways, "compared": lambda f: dj.jit(dj.grad(f))}.items():
            gradient = derivative(loss)(x)
            assert gradient.dtype == jnp.float32
            np.testing.assert_allclose(gradient, expected, 1e-6, 1e-7, err_msg=way)
