"""Fixed points of functions that move data, beside the same iteration in plain JAX, with all derivatives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal
from jax import lax
from matrix.partitions import On, on
from sequential import cut

import distdl_jax as dj
from distdl_jax import nn

N = 6
COUPLING = np.random.default_rng(0).standard_normal((N, N)) / 8
SIZES, P_X = ([2, 0, 4],), on(3, ranks=(2, 0, 1))


def loss_of(solve: Callable[..., Any], scale: Any) -> Callable[..., Any]:
    return lambda k, b: jnp.sum(scale * jnp.sin(solve(k, b)))


def derivatives(loss: Callable[..., Any], grad: Callable[..., Any], k: Any, b: Any) -> Any:
    first = grad(loss, argnums=(0, 1))
    again = grad(lambda k, b: sum(jnp.sum(jnp.cos(d)) for d in first(k, b)), argnums=(0, 1))
    return first(k, b), again(k, b)


@pytest.mark.simulated(3)
def test_solutions_and_derivatives_equal_many_steps() -> None:
    """By parameters, one of which is an integer, and by what the function closes over."""
    P = dj.Partition()
    P_x, rows = P_X.partition(P), cut(COUPLING, On((3, 1), P_X.ranks), P.rank, (*SIZES, N))
    arrays = np.random.default_rng(1).standard_normal((3, N))
    mine = [cut(array, P_X, P.rank, SIZES) for array in arrays]

    def contraction(product: Callable[[Any], Any], k: Any, b: Any) -> Callable[[Any, Any], Any]:
        return lambda params, z: jnp.tanh(jnp.cos(k) * product(z) + params["b"]) / params["two"]

    def solve(k: Any, b: Any) -> Any:
        f = contraction(lambda z: rows @ dj.functional.all_gather(z, P_x, axes=0), k, b)
        return dj.solvers.fixed_point(f, {"b": b, "two": 2}, jnp.zeros_like(b), P_x, tol=1e-15)

    def unrolled(k: Any, b: Any) -> Any:
        f = contraction(lambda z: COUPLING @ z, k, b)
        return lax.fori_loop(0, 40, lambda _, z: f({"b": b, "two": 2}, z), jnp.zeros_like(b))

    @dj.jit
    def program(k: Any, b: Any, scale: Any) -> Any:
        z, info = solve(k, b)
        return (z, derivatives(loss_of(lambda k, b: solve(k, b)[0], scale), dj.grad, k, b)), info

    def in_one_place(k: Any, b: Any, scale: Any) -> Any:
        return unrolled(k, b), derivatives(loss_of(unrolled, scale), jax.grad, k, b)

    wanted = P.broadcast_data(jax.device_get(jax.jit(in_one_place)(*arrays)) if P.rank == 0 else None, root=0)
    got, info = program(*mine)
    assert bool(info.converged) and 5 < int(info.steps) < 40
    for block, whole in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(block, cut(whole, P_X, P.rank, SIZES), 1e-12, 1e-13)


@pytest.mark.simulated(2)
def test_a_deep_equilibrium_model_of_layers() -> None:
    """Its weights are on worker 0, and broadcast in each step; one worker alone has a loss."""
    P = dj.Partition()
    layers = [
        nn.DistributedConv1d(P.grid([1, 1, n]), in_channels=2, out_channels=2, kernel_size=3, padding=1) for n in (2, 1)
    ]
    params = jax.tree.map(lambda w: w / 2, layers[0].init(jax.random.key(0), float))
    whole = dj.gather(params, layers[0].param_specs())
    x = np.random.default_rng(0).standard_normal((1, 2, 5))
    own = slice(0, 3) if P.rank == 0 else slice(3, 5)

    def step(layer: Any, x: Any, params: Any, z: Any) -> Any:
        return jnp.tanh(layer(params, z) + x)

    def loss(params: Any, x: Any) -> Any:
        z, _ = dj.solvers.fixed_point(lambda p, z: step(layers[0], x, p, z), params, 0 * x, P, tol=1e-15)
        return jnp.sum(z**2) if P.rank == 1 else 0.0

    def unrolled(params: Any, x: Any) -> Any:
        z = lax.fori_loop(0, 60, lambda _, z: step(layers[1], x, params, z), 0 * x)
        return jnp.sum(z[..., 3:] ** 2)

    value, (of_params, of_x) = dj.jit(dj.value_and_grad(loss, argnums=(0, 1)))(params, x[..., own])
    of_params = dj.gather(of_params, layers[0].param_specs())
    if P.rank == 0:
        want, (of_whole, want_x) = jax.jit(jax.value_and_grad(unrolled, argnums=(0, 1)))(whole, x)
        np.testing.assert_allclose(value, want, 1e-12)
        np.testing.assert_allclose(of_x, want_x[..., own], 1e-11, 1e-13)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-11, 1e-13), of_params, of_whole)


def test_refusals() -> None:
    for sentence, kind, options in (
        ("`f` (=3) must be a function", dj.InvalidTypeError, {"f": 3}),
        ("`atol` (='a') must be a number, 0 or more", dj.InvalidArgumentError, {"atol": "a"}),
        ("`maxiter` (=1.5) must be an integer", dj.InvalidTypeError, {"maxiter": 1.5}),
    ):

        def work(P: dj.Partition, options: Any = options) -> Any:
            given = {"f": lambda p, z: z, "params": 1.0, "x0": jnp.ones(2), "P_x": P.grid([2])} | options
            return dj.solvers.fixed_point(**given)

        assert sentence in refusal(2, work, kind), sentence
