"""What value_and_grad gives: of workers' parts of a loss, over some workers, and of a loss on one worker."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import block
from mpi4py import MPI

import distdl_jax as dj
from distdl_jax import nn


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
    with_aux = dj.value_and_grad(lambda a, b: (share(a, b), {"mine": b}), 1, has_aux=True)
    scaled = dj.value_and_grad(lambda a, scale: scale * share(a, b))
    for transform in (lambda f: f, jax.jit):
        got = transform(dj.value_and_grad(share))(a, b)
        assert (got[0], got[0].shape, got[0].dtype) == (value, (), a.dtype)
        for found, wanted in (
            (got, (value, d_a)),
            (transform(dj.grad(share, 1))(a, b), d_b),
            (transform(dj.value_and_grad(share, argnums=(1, 0)))(a, b), (value, (d_b, d_a))),
            (transform(with_aux)(a, b), ((value, {"mine": b}), d_b)),
            (transform(scaled)(a, scale=2.0), (2 * value, 2 * d_a)),
        ):
            jax.tree.map(np.testing.assert_allclose, found, wanted)


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
    whole, weight, bias = np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3), np.ones(2)
    x = jnp.asarray(whole) if MPI.COMM_WORLD.rank == 0 else dj.zero_volume_tensor()
    P_bias = layer.param_specs()["bias"].partition
    params = {"weight": block(weight, layer.P_W), "bias": block(bias, P_bias)}
    y = whole @ weight.T + bias

    def squares(params, x):
        y = layer(params, x)
        return jnp.sum(y**2) if there.active else 0.0, x

    (value, aux), (d_params, d_x) = dj.value_and_grad(squares, (0, 1), has_aux=True)(params, x)
    assert float(value) == np.sum(y**2)
    np.testing.assert_allclose(d_params["bias"], block(2 * y.sum(0), P_bias))
    np.testing.assert_allclose(d_params["weight"], block(2 * y.T @ whole, layer.P_W))
    np.testing.assert_allclose(d_x, block(2 * y @ weight, layer.P_x))
    np.testing.assert_array_equal(aux, x)
