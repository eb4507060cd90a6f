"""The network of an advice gives the numbers of the sequential one, forward and backward, wherever its layers are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.tools.advise.network import DescribedNetwork

CONV = nn.conv2d(out_channels=4, kernel_size=3, padding=1)
NETWORK = [
    CONV,
    jax.nn.relu,
    nn.skip(CONV, jax.nn.relu, nn.skip(CONV)),
    nn.avg_pool2d(kernel_size=2),
    nn.flatten(),
    nn.linear(out_features=3),
]
X_SHAPE = (4, 2, 8, 6)
SCATTERED = ((1, 1, 2, 2), (2, 1, 1, 1), (1, 1, 1, 3), (2, 1, 1, 2), (2, 1))
"""A grid for each node, of one to four workers, so that data moves before every layer."""


def sequential(params: Any, x: jax.Array) -> jax.Array:
    def conv(of: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, of["weight"], (1, 1), "SAME") + of["bias"].reshape(-1, 1, 1)

    first, outer, inner, last = params
    x = jax.nn.relu(conv(first, x))
    y = jax.nn.relu(conv(outer, x))
    x = x + (y + conv(inner, y))
    n, c, h, w = x.shape
    x = x.reshape(n, c, h // 2, 2, w // 2, 2).mean((3, 5))
    return x.reshape(n, -1) @ last["weight"].T + last["bias"]


def train(grids: tuple[tuple[int, ...], ...] | None) -> tuple[float, Any, list[Any]]:
    """Return the loss, the whole gradient and the whole parameters of the network on the workers of this world."""
    P = dj.Partition()
    if grids is None:
        advice = dj.advise(NETWORK, X_SHAPE, workers=P, dtype=jnp.float64)
        network, x_spec = advice.network, advice.x_spec
    else:
        network = DescribedNetwork(NETWORK, X_SHAPE, np.dtype("float64")).on(grids, P)
        x_spec = dj.TensorSpec(X_SHAPE, P.grid(grids[0]))
    params = network.init(jax.random.key(0), jnp.float64)
    x = dj.init_block(jax.nn.initializers.normal(1.0), jax.random.key(1), x_spec, jnp.float64)
    target = network.output_spec(x_spec)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        y = network(params, x)
        return jnp.sum(jnp.sin(y)) if target.partition.active else 0.0 * jnp.sum(y)

    value, gradient = dj.jit(dj.value_and_grad(loss))(params, x)
    specs = network.param_specs()
    return float(value), dj.gather(gradient, specs), [dj.gather(params, specs), dj.gather([x], [x_spec])]


@pytest.mark.parametrize("grids", [None, SCATTERED], ids=["advised", "scattered"])
def test_the_network_trains_as_the_sequential_one(grids: tuple[tuple[int, ...], ...] | None) -> None:
    value, gradient, (params, (x,)) = dj.simulate(4, train, grids)[0]
    layers = [each for each in jax.tree.leaves(params, is_leaf=_has_weight) if _has_weight(each)]
    expected, expected_gradient = jax.value_and_grad(lambda params: jnp.sum(jnp.sin(sequential(params, x))))(layers)
    assert value == pytest.approx(float(expected), rel=1e-12)
    found = [each for each in jax.tree.leaves(gradient, is_leaf=_has_weight) if _has_weight(each)]
    assert len(found) == 4
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12), found,
                 expected_gradient)  # fmt: skip


def _has_weight(tree: Any) -> bool:
    return isinstance(tree, dict) and "weight" in tree
