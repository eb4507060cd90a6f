"""Training: the distributed network's parameters stay those of the sequential one, and what value_and_grad gives."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from blocks import block
from mpi4py import MPI

import distdl_jax as dj
from distdl_jax import nn

SIZES, SAMPLES, STEPS = (7, 10, 3), 9, 20


def global_data():
    draw = np.random.default_rng(5).standard_normal
    params = [
        {"weight": draw((n_out, n_in)) / np.sqrt(n_in), "bias": draw(n_out) / 10} for n_in, n_out in pairwise(SIZES)
    ]
    return params, draw((SAMPLES, SIZES[0])), draw((SAMPLES, SIZES[-1]))


def squared_error(y, target):
    return jnp.sum((y - target) ** 2) / (SAMPLES * SIZES[-1])


def train(optimizer, value_and_grad, params, *data):
    """Twenty steps in one jitted step function; the parameters after them, and the loss before each."""

    @jax.jit
    def step(params, state, *data):
        value, gradient = value_and_grad(params, *data)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, values = optimizer.init(params), []
    for _ in range(STEPS):
        params, state, value = step(params, state, *data)
        values.append(float(value))
    return params, values


@pytest.mark.world(4)
@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1, momentum=0.9), optax.chain(optax.add_decayed_weights(1e-2), optax.adam(0.02))],
    ids=["sgd", "adam with weight decay"],
)
def test_twenty_steps_give_the_parameters_of_the_sequential_network(optimizer):
    """Two layers and a relu over partitions of different teams and shapes, an optimiser from optax on local pytrees.

    Parameters after 20 steps, and the loss of each step on every worker, agree to 1e-12 in float64.
    """
    P = dj.Partition()
    P_in, P_hidden, P_out = P.grid([1, 2]), P.grid([1, 2], [3, 1]), P.grid([1, 1], [2])
    first = nn.DistributedLinear(P_in, P_hidden, P.grid([2, 2]), *SIZES[:2])
    second = nn.DistributedLinear(P_hidden, P_out, P.grid([1, 2], [0, 3]), *SIZES[1:])

    def distributed(params, x, target):
        y = second(params[1], jax.nn.relu(first(params[0], x)))
        return squared_error(y, target) if P_out.active else jnp.sum(y)

    def sequential(params, x, target):
        for layer, activation in zip(params, (jax.nn.relu, lambda y: y), strict=True):
            x = activation(x @ layer["weight"].T + layer["bias"])
        return squared_error(x, target)

    whole, x, target = global_data()
    specs = [first.param_specs(), second.param_specs()]

    def cut(params):
        return jax.tree.map(lambda value, spec: block(np.asarray(value), spec.partition), params, specs)

    P, found = dj.Partition(), None
    if P.rank == 0:
        found = train(optimizer, jax.value_and_grad(sequential), jax.device_put(whole), x, target)
    expected, losses = P.broadcast_data(jax.tree.map(np.asarray, found))
    mine = train(optimizer, dj.value_and_grad(distributed), cut(whole), block(x, P_in), block(target, P_out))
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(mine[1], losses, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), mine[0], cut(expected))


def share(a, b):
    """One worker's part of a scalar: worker r counts r + 1 times."""
    return (MPI.COMM_WORLD.rank + 1) * jnp.sum(a**2 * b)


@pytest.mark.world(1, 2)
def test_value_is_the_sum_over_all_workers_on_every_worker(world_size):
    """And the gradient is the worker's own; with argnums, has_aux and keywords as in jax.value_and_grad."""
    rank = MPI.COMM_WORLD.rank
    a, b = jnp.arange(3.0), jnp.ones(3) * (rank + 1)
    value = 5.0 * sum((worker + 1) ** 2 for worker in range(world_size))
    d_a, d_b = (rank + 1) * 2 * a * b, (rank + 1) * a**2

    for transform in (lambda f: f, jax.jit):
        got, gradient = transform(dj.value_and_grad(share))(a, b)
        assert (got, got.shape, got.dtype) == (value, (), a.dtype)
        np.testing.assert_allclose(gradient, d_a)

        np.testing.assert_allclose(transform(dj.grad(share, 1))(a, b), d_b)

        got, gradients = transform(dj.value_and_grad(share, argnums=(1, 0)))(a, b)
        assert got == value and isinstance(gradients, tuple)
        jax.tree.map(np.testing.assert_allclose, gradients, (d_b, d_a))

        with_aux = transform(dj.value_and_grad(lambda a, b: (share(a, b), {"mine": b}), 1, has_aux=True))
        (got, aux), gradient = with_aux(a, b)
        assert got == value
        np.testing.assert_allclose(aux["mine"], b)
        np.testing.assert_allclose(gradient, d_b)

        got, gradient = transform(dj.value_and_grad(lambda a, scale: scale * share(a, b)))(a, scale=2.0)
        assert got == 2 * value
        np.testing.assert_allclose(gradient, 2 * d_a)


@pytest.mark.world(4)
def test_value_over_a_partition_of_some_workers():
    """Only its workers are summed over; the others keep what they have."""
    P = dj.Partition().grid([2, 1], [3, 1])
    rank = MPI.COMM_WORLD.rank
    value, gradient = dj.value_and_grad(lambda a: (rank + 1.0) * a, partition=P)(2.0)
    assert float(value) == (12.0 if rank in (1, 3) else 2.0 * (rank + 1)) and float(gradient) == rank + 1


@pytest.mark.world(2)
def test_one_worker_with_the_whole_loss():
    """A loss that one worker computes and the other returns as 0 gives both the value and both their gradients."""
    P = dj.Partition()
    here, there = P.grid([1, 1]), P.grid([1, 1], [1])
    layer = nn.DistributedLinear(here, there, here, 3, 2)
    x = jnp.arange(6.0).reshape(2, 3) if MPI.COMM_WORLD.rank == 0 else dj.zero_volume_tensor()
    weight, bias = np.arange(6.0).reshape(2, 3), np.ones(2)
    params = {"weight": block(weight, layer.P_W), "bias": block(bias, layer.param_specs()["bias"].partition)}
    value, (d_params, d_x) = dj.value_and_grad(lambda params, x: jnp.sum(layer(params, x) ** 2), (0, 1))(params, x)
    y = np.arange(6.0).reshape(2, 3) @ weight.T + bias
    assert float(value) == np.sum(y**2)
    np.testing.assert_allclose(d_params["bias"], block(2 * y.sum(0), layer.param_specs()["bias"].partition))
    np.testing.assert_allclose(d_params["weight"], block(2 * y.T @ np.arange(6.0).reshape(2, 3), layer.P_W))
    np.testing.assert_allclose(d_x, block(2 * y @ weight, layer.P_x))

    def squares(params, x):
        y = layer(params, x)
        return jnp.sum(y**2) if there.active else 0.0, x

    (_, same), aux = dj.grad(squares, (0, 1), has_aux=True)(params, x)
    np.testing.assert_array_equal(same, d_x)
    np.testing.assert_array_equal(aux, x)
