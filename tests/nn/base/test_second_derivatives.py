"""Second derivatives through a loop are those without it, of layers with adjoints of their own.

In a loop JAX splits a program into what it knows and what it doesn't, and hands residuals on from one to the other; see
`jax_patches.count_constants_among_residuals`, without which attention gets other arrays in their place.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from matrix.partitions import on
from sequential import made

import distdl_jax as dj

CONV = {"in_channels": 2, "out_channels": 2, "kernel_size": 3, "padding": 1}
LAYERS: dict[str, tuple[tuple[int, ...], Any]] = {
    "attention in a ring": ((1, 3, 4), made("MultiHeadAttention", on(1, 2, 1), 4, 2, causal=True)),
    "attention of heads": ((1, 3, 4), made("MultiHeadAttention", on(1, 1, 2), 4, 2, causal=True)),
    "convolution": ((1, 2, 6, 4), made("Conv2d", on(1, 1, 2, 1), **CONV)),
    "max pool": ((1, 2, 7), made("MaxPool1d", on(1, 1, 2), kernel_size=3, stride=1, padding=1)),
    "batch norm": ((3, 2, 5), made("BatchNorm", on(1, 1, 2), 2)),
}


def in_a_loop(f: Callable[[Any], Any], xs: Any) -> Any:
    return lax.scan(lambda total, x: (jnp.sin(total) + jnp.sum(f(x) ** 2), None), jnp.zeros(()), xs)[0]


def without(f: Callable[[Any], Any], xs: Any) -> Any:
    total = jnp.zeros(())
    for x in xs:
        total = jnp.sin(total) + jnp.sum(f(x) ** 2)
    return total


@pytest.mark.simulated(2)
@pytest.mark.parametrize("name", LAYERS)
def test_in_a_loop(name: str) -> None:
    P = dj.Partition()
    shape, make = LAYERS[name]

    layer = make(P)
    params = layer.init(jax.random.key(0), jnp.float64)
    draw = np.random.default_rng(1)
    xs = jnp.stack([dj.scatter(draw.normal(size=shape), spec) for spec in [dj.TensorSpec(shape, layer.P_x)] * 2])

    def second(loss: Callable[..., Any]) -> Any:
        def of_gradient(params: Any, xs: Any) -> Any:
            gradient = dj.grad(lambda xs: loss(lambda x: layer(params, x), xs))(xs)
            return jnp.sum(gradient**2)

        return dj.jit(dj.value_and_grad(of_gradient, argnums=(0, 1)))(params, xs)

    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, 1e-10, 1e-12), second(in_a_loop), second(without)
    )
