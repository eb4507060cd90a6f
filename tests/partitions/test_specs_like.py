"""Whole states of optimisers, and modules of other libraries, gathered and scattered."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from imaginary import partition_of

import distdl_jax as dj
from distdl_jax import nn

OPTIMISERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(optax.linear_schedule(0.1, 0.0, 5)),
    "chain": optax.chain(optax.trace(0.5), optax.ema(0.9)),
    "accumulating": optax.MultiSteps(optax.adam(0.1), 2),
    "masked": optax.masked(optax.adam(0.1), {"weight": True, "bias": False}),
    "hyperparameters": optax.inject_hyperparams(optax.rmsprop)(0.1),
    "lbfgs memory": optax.scale_by_lbfgs(memory_size=3),
}  # fmt: skip


def layer_on(P: dj.Partition) -> nn.DistributedLinear:
    P_x, P_W = (P.create_cartesian_topology_partition(shape) for shape in ([1, 2], [2, 1]))
    P_one = P.create_partition_inclusive([1]).create_cartesian_topology_partition([1, 1])
    return nn.DistributedLinear(P_one, P_x, P_W, 3, 5)


@pytest.mark.simulated(2)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_the_state_of_an_optimiser(name: str) -> None:
    """Gathered, it is leaf for leaf that of the whole parameters after the same steps; scattered, it comes back."""
    P = dj.Partition()
    layer, optimiser = layer_on(P), OPTIMISERS[name]
    specs = layer.param_specs()
    params = layer.init(jax.random.key(0), float)
    whole = dj.gather(params, specs)

    def stepped(params: Any) -> Any:
        state = optimiser.init(params)
        if name == "lbfgs memory":
            return state  # a step takes inner products
        for n in range(3):
            gradient = jax.tree.map(lambda p, n=n: jnp.sin(p + n), params)
            updates, state = optimiser.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        return state

    state = stepped(params)
    of_state = dj.specs_like(state, params, specs)
    gathered = dj.gather(state, of_state)
    if P.rank == 0:
        want = stepped(whole)
        assert jax.tree.structure(gathered) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(gathered), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-14)
            assert jnp.shape(a) == jnp.shape(b)
    back = dj.scatter(gathered, of_state)
    jax.tree.map(np.testing.assert_array_equal, back, state)


@pytest.mark.simulated(2)
def test_modules_of_equinox_and_flax() -> None:
    """Functions and numbers in an equinox module; an nnx state."""
    P = dj.Partition()
    layer = layer_on(P)

    class Module(eqx.Module):
        layer: nn.DistributedLinear
        blocks: Any
        activation: Any
        rate: float
        name: str = eqx.field(static=True)

    specs = layer.param_specs()
    params = layer.init(jax.random.key(0), float)
    module = Module(layer, params, jax.nn.relu, 0.5, "mine")
    of_module = Module(layer, specs, None, dj.TensorSpec((), P, replicated=True), "mine")
    whole = dj.gather(module, of_module)
    assert whole.activation is jax.nn.relu and whole.layer == layer
    assert jnp.shape(whole.blocks["weight"]) == ((5, 3) if P.rank == 0 else (0,))
    jax.tree.map(np.testing.assert_array_equal, dj.scatter(whole, of_module).blocks, params)
    state = nnx.State({"blocks": nnx.Param(params), "count": nnx.Variable(jnp.int32(2))})
    of_state = dj.specs_like(state, params, specs)
    gathered = dj.gather(state, of_state)
    assert jnp.shape(jax.tree.leaves(gathered)[0]) == ((5,) if P.rank == 0 else (0,))


def test_other_leaves_and_refusals() -> None:
    """Random keys are left alone; one array as the parameters; specs of another structure."""
    P = partition_of(0, 3)
    w, spec = jnp.ones(2), dj.TensorSpec((5,), P)
    state = {"count": jnp.int32(0), "m": w, "key": jax.random.key(0), "old": jax.random.PRNGKey(0), "none": None}
    found = dj.specs_like(state | {"f": jax.nn.relu}, w, spec)
    assert (found["m"], found["key"], found["none"], found["f"]) == (spec, None, None, None)
    assert found["count"] == dj.TensorSpec((), P, replicated=True)
    stacked = dj.specs_like({"memory": jnp.ones((4, 2))}, {"w": w}, {"w": spec})
    assert stacked["memory"] == dj.TensorSpec((4, 2), P, replicated=True)
    memory = dj.specs_like({"memory": {"w": jnp.ones((4, 2))}}, {"w": w}, {"w": spec})
    assert memory["memory"]["w"] == dj.TensorSpec((4, 5), P.create_cartesian_topology_partition([1, 3]))
    with pytest.raises(dj.InvalidArgumentError, match="`param_specs` must have the structure of `params`"):
        dj.specs_like(state, {"w": w}, {"v": spec})
    with pytest.raises(dj.InvalidTypeError, match="`param_specs` must hold TensorSpecs, or None, but holds 3"):
        dj.specs_like(state, {"w": w}, {"w": 3})
