"""Twenty steps of a distributed convolutional network give the parameters of the sequential one, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from convolution.programs import block, slices
from jax import Array, lax

import distdl_jax as dj
from distdl_jax import nn

BATCH, STEPS = 6, 20


def conv_by_lax(params: Any, x: Array, padding: int) -> Array:
    y = lax.conv_general_dilated(x, params["weight"], (1, 1), [(padding, padding)] * 2)
    return y + params["bias"].reshape(-1, 1, 1)


def sequential(params: Any, x: Array, target: Array) -> Array:
    """conv 3 x 3 pad 1, max pool 2 x 2, conv 2 x 2, linear; the mean squared error."""
    x = jax.nn.tanh(conv_by_lax(params[0], x, 1))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = jax.nn.tanh(conv_by_lax(params[1], x, 0)).reshape(BATCH, -1)
    return jnp.mean((x @ params[2]["weight"].T + params[2]["bias"] - target) ** 2)


def train(value_and_grad: Any, params: Any, *data: Array) -> tuple[Any, list[float]]:
    """The parameters after all steps, and the loss before each."""
    optimizer = optax.adam(0.02)

    @jax.jit
    def step(params: Any, state: Any, *data: Array) -> tuple[Any, Any, Array]:
        value, gradient = value_and_grad(params, *data)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, values = optimizer.init(params), []
    for _ in range(STEPS):
        params, state, value = step(params, state, *data)
        values.append(float(value))
    return params, values


@pytest.mark.world(4)
def test_twenty_steps_give_the_parameters_of_the_sequential_network() -> None:
    """Features split 2 x 2 in convolution and pooling, then channels and features in a general convolution.

    Uneven blocks throughout: 11 x 9 pixels. The initial parameters come from the layers' own `init`, gathered.
    """
    P_world = dj.Partition()

    P_images, P_channels, P_rows = P_world.grid([1, 1, 2, 2]), P_world.grid([1, 2, 1, 1]), P_world.grid([1, 1, 1, 2])
    conv = nn.DistributedConv2d(P_images, in_channels=2, out_channels=3, kernel_size=3, padding=1)
    pool = nn.DistributedMaxPool2d(P_images, 2)
    to_rows = nn.Repartition(P_images, P_rows)
    second = nn.DistributedConv2d(
        P_rows, P_world.grid([1, 2, 1, 2]), P_world.grid([2, 1, 1, 2]), in_channels=3, out_channels=4, kernel_size=2
    )
    to_channels = nn.Repartition(P_world.grid([1, 2, 1, 2]), P_channels)
    linear = nn.DistributedLinear(
        P_world.grid([1, 2]), P_world.grid([1, 2], [2, 3]), P_world.grid([2, 2]), 4 * 4 * 3, 5
    )
    layers = (conv, second, linear)

    def distributed(params: Any, x: Array, target: Array) -> Array:
        x = pool(jax.nn.tanh(conv(params[0], x)))
        x = to_channels(jax.nn.tanh(second(params[1], to_rows(x))))
        y = linear(params[2], x.reshape(BATCH, -1))
        return jnp.sum((y - target) ** 2) / (BATCH * 5) if linear.P_y.active else jnp.sum(y)

    rng = np.random.default_rng(0)
    x, target = rng.normal(size=(BATCH, 2, 11, 9)), rng.normal(size=(BATCH, 5))
    specs = [layer.param_specs() for layer in layers]
    params = [
        layer.init(key, jnp.float64) for key, layer in zip(jax.random.split(jax.random.key(1), 3), layers, strict=True)
    ]
    whole = P_world.broadcast_data(jax.tree.map(np.asarray, dj.gather(params, specs)))

    found = train(jax.value_and_grad(sequential), jax.device_put(whole), x, target) if P_world.rank == 0 else None
    expected, losses = P_world.broadcast_data(jax.tree.map(np.asarray, found))
    data = [block(array, slices(dj.TensorSpec(array.shape, P))) for array, P in ((x, P_images), (target, linear.P_y))]
    trained, values = train(dj.value_and_grad(distributed), params, *data)

    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_allclose(values, losses, rtol=1e-12)
    for mine, theirs, spec in zip(*map(jax.tree.leaves, (trained, expected, specs)), strict=True):
        want = np.asarray(block(np.asarray(theirs), slices(spec)))
        np.testing.assert_allclose(mine, want, rtol=0, atol=1e-12 * max(1, np.abs(theirs).max()))
