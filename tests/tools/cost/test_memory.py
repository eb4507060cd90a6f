"""The memory that `dj.cost` predicts, beside what XLA's buffer assignment makes of the real step of each worker."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tools.cost.traces import Stored, traced_classes

Network = tuple[Any, dj.TensorSpec]
ADAM = optax.adam(1e-3)


def perceptron(P: dj.Partition) -> Network:
    """Weights that are cut along outputs and inputs in turn."""
    one, row, linear = P.grid([1, 1], [0]), P.grid([1, 2]), nn.DistributedLinear
    layers = nn.Sequential(
        linear(one, row, P.grid([2, 1]), 64, 256),
        jax.nn.relu,
        linear(row, one, P.grid([1, 2]), 256, 256),
        jax.nn.gelu,
        linear(one, row, P.grid([2, 1]), 256, 128),
        jnp.tanh,
        linear(row, one, P.grid([1, 2]), 128, 10),
    )
    return layers, dj.TensorSpec((128, 64), one)


def conv(P: dj.Partition, dims: int, channels: tuple[int, int], kernel: int) -> Any:
    layer = {2: nn.DistributedConv2d, 3: nn.DistributedConv3d}[dims]
    return layer(P, in_channels=channels[0], out_channels=channels[1], kernel_size=kernel, padding=kernel // 2)


def residual(P: dj.Partition) -> Network:
    """Residual blocks with normalisations; the batch is cut."""
    X = P.grid([2, 1, 1, 1])

    def block() -> nn.Residual:
        norms = nn.DistributedBatchNorm(X, 16), nn.DistributedGroupNorm(X, 4, 16)
        return nn.Residual(
            nn.Sequential(conv(X, 2, (16, 16), 3), norms[0], jax.nn.relu, conv(X, 2, (16, 16), 3), norms[1])
        )

    layers = nn.Sequential(conv(X, 2, (3, 16), 3), jax.nn.relu, block(), jax.nn.relu, block(), jax.nn.relu)
    return layers, dj.TensorSpec((6, 3, 16, 16), X)


def volume(P: dj.Partition) -> Network:
    """A U-Net of two levels in three dimensions, whose skip is a sum."""
    X = P.grid([1, 1, 2, 1, 1])
    up = nn.DistributedConvTranspose3d(X, in_channels=16, out_channels=8, kernel_size=2, stride=2)
    below = nn.Sequential(nn.DistributedMaxPool3d(X, 2), conv(X, 3, (8, 16), 3), jax.nn.relu, up)
    layers = nn.Sequential(conv(X, 3, (2, 8), 3), jax.nn.relu, nn.Residual(below), conv(X, 3, (8, 1), 1))
    return layers, dj.TensorSpec((1, 2, 16, 16, 16), X)


@pytest.mark.parametrize("build", [perceptron, residual, volume])
def test_memory_is_within_15_percent_of_xlas_buffers_and_compiled_within_2(
    build: Callable[[dj.Partition], Network],
) -> None:
    """Of every worker: arguments, results and temporaries of value, gradient and adam in one donating program."""

    def needed() -> int:
        network, spec = build(dj.Partition())
        params, x = network.init(jax.random.key(0), jnp.float32), jnp.zeros(spec.local_shape, jnp.float32)
        x = x if spec.box else dj.zero_volume_tensor(spec.global_shape[0], dtype=jnp.float32)

        def step(params: Any, state: Any, x: jax.Array) -> Any:
            value, gradient = dj.value_and_grad(lambda params, x: jnp.sum(network(params, x) ** 2))(params, x)
            updates, state = ADAM.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        lowered = dj.jit(step, donate_argnums=(0, 1)).lower(params, ADAM.init(params), x)
        found = lowered.compile().memory_analysis()
        in_and_out = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
        return int(in_and_out + found.temp_size_in_bytes)

    real = dj.simulate(2, needed)
    cost = dj.cost(*build(dj.planning_world(2)), compiled=True)
    np.testing.assert_allclose(cost.memory, real, rtol=0.15)
    assert real[cost.fullest] == pytest.approx(max(real), rel=0.15)
    assert cost.compiled is not None
    assert cost.compiled.worker == cost.fullest
    assert cost.compiled.total == pytest.approx(real[cost.fullest], rel=0.02)


X = ShapeDtype((4, 8), np.dtype("float32"))
ARRAY, ROWS = 4 * 4 * 8, 4 * 4

CASES: dict[str, tuple[Callable, Stored]] = {
    # the sign of x
    "relu": (jax.nn.relu, Stored(True, False, 0)),
    # 1 - y^2
    "tanh": (jnp.tanh, Stored(False, True, 0)),
    # y (1 - y)
    "sigmoid": (jax.nn.sigmoid, Stored(False, True, 0)),
    # x and its tanh
    "gelu": (jax.nn.gelu, Stored(True, False, ARRAY)),
    # x and its sigmoid
    "silu": (jax.nn.silu, Stored(True, False, ARRAY)),
    # exponentials, and their sums along rows
    "softmax": (jax.nn.softmax, Stored(False, False, ARRAY + ROWS)),
    # a constant derivative
    "twice": (lambda x: 2 * x, Stored(False, False, 0)),
    "flattened": (lambda x: x.reshape(-1), Stored(False, False, 0)),
    # 2 x
    "square": (lambda x: x * x, Stored(True, False, 0)),
    # the other factor, a constant
    "product": (lambda x: x @ jnp.ones((8, 8), x.dtype), Stored(False, False, 0)),
    # x and its exponential
    "through jit": (jax.jit(lambda x: jnp.exp(x) * x), Stored(True, False, ARRAY)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_function_stores(name: str) -> None:
    """The arrays that its derivative can't be computed without, each once."""
    function, expected = CASES[name]
    x, world = {0: X}, dj.planning_world(1).world
    ((_, trace),) = traced_classes(function, nn.Sequential(function).plan(x).plans[0], x, world, X.dtype)
    assert trace.stored == expected


def test_each_stored_array_counts_once() -> None:
    """At the first layer that reads it in the backward pass; neither parameters nor the network's input count."""
    P = dj.planning_world(1).grid([1, 1])
    linear = nn.DistributedLinear
    network = nn.Sequential(linear(P, P, P, 5, 7), jnp.tanh, linear(P, P, P, 7, 3), jax.nn.relu, linear(P, P, P, 3, 2))
    cost = dj.cost(network, dj.TensorSpec((4, 5), P))
    of_tanh, of_product, of_relu = 4 * 4 * 7, 4 * 4 * 3, 4 * 4 * 3
    found = [int(nbytes[0]) for nbytes in cost.activations.values()]
    assert found == [0, of_tanh, 0, of_product, of_relu]
    assert sum(found) == of_tanh + of_product + of_relu


def test_a_forward_pass_stores_nothing_for_later() -> None:
    """It needs the parameters, and two neighbours of its arrays at a time."""
    P = dj.planning_world(1).grid([1, 1])
    layers = [nn.DistributedLinear(P, P, P, 50, 50, bias=False) for _ in range(8)]
    cost = dj.cost(nn.Sequential(*layers), dj.TensorSpec((40, 50), P), backward=False)
    assert not any(nbytes.any() for nbytes in cost.activations.values())
    assert cost.memory.tolist() == [8 * 4 * 50 * 50 + 3 * 4 * 40 * 50]


def test_who_needs_most_is_named() -> None:
    P = dj.planning_world(3)
    layer = nn.DistributedLinear(P.grid([3, 1]), P.grid([3, 1]), P.grid([3, 1, 1], [2, 0, 1]), 64, 64)
    assert dj.cost(layer, dj.TensorSpec((3, 64), P.grid([3, 1], [2, 0, 1]))).fullest == 2
