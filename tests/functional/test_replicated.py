"""Replicated values: one variable with many copies, whose gradient is the sum over them, the same on all."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_workers import refusal

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.functional.copies import plan_replicated
from distdl_jax.plans.shape_dtype import ShapeDtype

pytestmark = [pytest.mark.primitives]

N, FEATURES = 10, 7


def columns(P: dj.Partition, seed: int) -> tuple[np.ndarray, jax.Array]:
    """The same matrix on all, and this worker's columns of it: more workers than columns need not be."""
    whole = np.random.default_rng(seed).standard_normal((N, FEATURES))
    return whole, jax.device_put(whole[:, slice(*dj.TensorSpec((FEATURES,), P).box[0])])


def norm(params: dict[str, Any], x: Any, total: Callable[[Any], Any]) -> Any:
    """Of the rows of x, with `total`, a sum over the workers; scale and shift are numbers that all workers hold."""
    mean = total(x.sum(1, keepdims=True)) / FEATURES
    variance = total(((x - mean) ** 2).sum(1, keepdims=True)) / FEATURES
    return params["scale"] * (x - mean) / jnp.sqrt(variance + 1e-5) + params["shift"]


MODES: dict[str, Callable[[Any], Any]] = {"eager": lambda fun: fun, "jax.jit": jax.jit, "dj.jit": dj.jit}


@pytest.mark.world(2)
@pytest.mark.simulated(4)
@pytest.mark.parametrize("mode", MODES)
def test_training_keeps_copies_equal_to_plain_jax(mode: str) -> None:
    """Gradients and twenty steps of a normalisation: bit for bit the same on all workers, and plain JAX's to 1e-12."""
    P = dj.Partition()
    (whole_x, x), (whole_weight, weight) = columns(P, 3), columns(P, 4)

    def loss(params: Any) -> jax.Array:
        params = dj.replicated(params, P)
        return jnp.sum(weight * jnp.tanh(norm(params, x, lambda y: dj.functional.all_sum_reduce(y, P, axes_reduce=0))))

    def whole_loss(params: Any) -> jax.Array:
        return jnp.sum(whole_weight * jnp.tanh(norm(params, whole_x, lambda y: y)))

    gradient, whole_gradient = MODES[mode](jax.grad(loss)), jax.jit(jax.grad(whole_loss))
    params = whole = {"scale": jnp.float64(1.5), "shift": jnp.float64(-0.25)}
    for _ in range(20 if mode == "dj.jit" else 2):
        params = jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient(params))
        whole = jax.tree.map(lambda p, g: p - 0.01 * g, whole, whole_gradient(whole))
    for name, value in params.items():
        assert len(set(P.allgather_data(float(value)))) == 1
        np.testing.assert_allclose(value, whole[name], rtol=1e-12)


@pytest.mark.simulated(4)
def test_copies_along_some_dimensions_and_of_whole_trees() -> None:
    """Teams along axes have values of their own, of any shape; other leaves and workers outside are left alone."""
    P = dj.Partition()
    pair = P.grid([1, 3], [3, 1, 2])
    grid = P.grid([2, 2])
    tree = {"w": jnp.ones((grid.index[1] + 1,), jnp.float32), "n": jnp.int32(3), "f": jax.nn.relu, "none": None}

    def loss(w: jax.Array) -> jax.Array:
        copies = dj.replicated(tree | {"w": w}, grid, axes=0)
        assert copies["f"] is jax.nn.relu and copies["none"] is None and copies["n"] == 3
        return 10.0**P.rank * copies["w"].sum()

    gradient = jax.grad(loss)(tree["w"])
    column = grid.index[1]
    np.testing.assert_array_equal(gradient, np.full(column + 1, 10.0**column + 10.0 ** (column + 2)))
    assert gradient.dtype == jnp.float32
    of_pair = jax.grad(lambda w: 10.0**P.rank * dj.replicated(w, pair))(1.0)
    assert float(of_pair) == (1 if P.rank == 0 else 1110)
    x = jnp.arange(3)
    assert dj.replicated(x, grid, axes=()) is x


@pytest.mark.simulated(4)
def test_a_gather_of_a_replicated_value_reaches_every_copy() -> None:
    """The root's loss on the gathered tensor is a loss on the one variable that all copies are."""
    P = dj.Partition()
    spec = dj.TensorSpec((3,), P, replicated=True)
    theta = jnp.arange(3.0)

    def loss(theta: jax.Array) -> jax.Array:
        return jnp.sum(dj.gather(dj.replicated(theta, P), spec, root=2) ** 2)

    value, gradient = dj.jit(dj.value_and_grad(loss))(theta)
    assert float(value) == 5
    np.testing.assert_array_equal(gradient, 2 * theta)


@pytest.mark.simulated(2)
@pytest.mark.parametrize("around", ["nothing", "jit", "scan"])
def test_a_worker_whose_loss_is_a_constant_adds_up_too(around: str) -> None:
    """Forward nothing is sent, but the sum of the gradient needs all workers, whatever their losses depend on."""
    P = dj.Partition()
    copied = jax.jit(lambda x: dj.replicated(x, P)) if around == "jit" else lambda x: dj.replicated(x, P)

    def part(scale: jax.Array, x: Any) -> jax.Array:
        scale = copied(scale)
        return jnp.sum(scale * x) if P.rank == 0 else jnp.zeros(())

    def loss(scale: jax.Array) -> jax.Array:
        if around == "scan":
            return jax.lax.scan(lambda c, x: (c + part(scale, x), None), jnp.zeros(()), jnp.arange(4.0))[0]
        return part(scale, jnp.arange(4.0))

    value, gradient = dj.jit(dj.value_and_grad(loss))(2.0)
    assert (float(value), float(gradient)) == (12.0, 6.0)


@pytest.mark.simulated(3)
def test_what_does_not_fit_is_refused_on_all_workers() -> None:
    P = dj.Partition()
    own = {"a": jnp.ones(2 + P.rank // 2), "b": jnp.ones(1)}
    with pytest.raises(dj.PlanError, match=r"`tree\['a'\]` must have the same shape and dtype on all workers that"):
        dj.replicated(own, P)
    with pytest.raises(dj.PlanError, match=r"but `tree\['c'\]` is on worker 1 and not on worker 0"):
        dj.replicated({"b": own["b"]} | ({"c": own["b"]} if P.rank == 1 else {}), P)
    with pytest.raises(dj.PlanError, match=r"float64\[1\] on worker 0, float32\[1\] on worker 1"):
        dj.replicated({"b": own["b"].astype("float32" if P.rank == 1 else "float64")}, P)
    assert dj.replicated({"b": own["b"]}, P)["b"].shape == (1,)  # and all go on together


def test_arguments_are_named() -> None:
    """In the same sentence on every worker."""
    sentence = refusal(3, lambda P: dj.replicated(1.0, P, axes=1), dj.InvalidArgumentError)
    assert "`axes` (=(1,)) names dimension 1, but the partition (shape 3) has dimensions 0 to 0." in sentence
    assert "`P` (='all') must be a partition" in refusal(2, lambda P: dj.replicated(1.0, "all"), dj.InvalidTypeError)


def test_the_plan_moves_nothing_but_the_gradient() -> None:
    """A part forward is a copy, and its adjoint the sum over the team."""
    P = dj.planning_world(6).grid([2, 3])
    blocks = {worker: ShapeDtype((worker % 3,), np.dtype("float32")) for worker in range(6)}
    plan = plan_replicated(blocks, P, axes=0)
    assert plan.outputs == blocks and plan.teams == ((0, 3), (1, 4), (2, 5))
    part = plan.part(4)
    assert part.adjoint() == nn.AllSumReduce(P, 0).plan(blocks).part(4) and part.adjoint().adjoint() == part.adjoint()
