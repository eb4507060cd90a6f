"""Whole states of optimisers and of training, and modules of other libraries, gathered and scattered."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distdl_jax as dj
from distdl_jax import nn


def layer_on(P: dj.Partition) -> nn.DistributedLinear:
    P_x, P_W = (P.grid(shape) for shape in ([1, 2], [2, 1]))
    P_one = P.grid([1, 1], [1])
    return nn.DistributedLinear(P_one, P_x, P_W, 3, 5)


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


@pytest.mark.simulated(3)
def test_other_leaves_and_refusals() -> None:
    """Random keys are left alone; one array as the parameters; specs of another structure."""
    P = dj.Partition()
    spec = dj.TensorSpec((5,), P)
    w = jnp.ones(spec.local_shape)
    state = {"count": jnp.int32(0), "key": jax.random.key(0), "old": jax.random.PRNGKey(0), "none": None}
    found = dj.specs_like(state | {"f": jax.nn.relu}, {"w": w}, {"w": spec})
    assert (found["key"], found["none"], found["f"]) == (None, None, None)
    assert found["old"] == dj.TensorSpec((2,), P, replicated=True)
    alone = dj.specs_like({"count": jnp.int32(0), "m": w}, w, spec)
    assert alone == {"count": dj.TensorSpec((), P, replicated=True), "m": spec}
    stacked = dj.specs_like({"memory": jnp.ones((4, 2))}, {"w": w}, {"w": spec})
    assert stacked["memory"] == dj.TensorSpec((4, 2), P, replicated=True)
    memory = dj.specs_like({"memory": {"w": jnp.ones((4, *w.shape))}}, {"w": w}, {"w": spec})
    assert memory["memory"]["w"] == dj.TensorSpec((4, 5), P.grid([1, 3]))
    flags = dj.specs_like({"is_nan": {"w": jnp.zeros((), bool)}, "m": {"w": w}}, {"w": w}, {"w": spec})
    assert flags == {"is_nan": {"w": None}, "m": {"w": spec}}
    with pytest.raises(dj.InvalidArgumentError, match="`param_specs` must have the structure of `params`"):
        dj.specs_like(state, {"w": w}, {"v": spec})
    with pytest.raises(dj.InvalidTypeError, match=r"`param_specs\['w'\]` \(=3\) must be a TensorSpec, or None"):
        dj.specs_like(state, {"w": w}, {"w": 3})
    with pytest.raises(dj.PlanError, match=r"`params\['w'\]` has shape \(3,\), but its spec .* gives \(2,\) on this"):
        dj.specs_like(state, {"w": jnp.ones(3) if P.rank == 0 else w}, {"w": spec})
    with pytest.raises(dj.PlanError, match=r"but `state\['b'\]` is there on worker 0 and missing"):
        dj.specs_like({"a" if P.rank else "b": w}, {"w": w}, {"w": spec})
    with pytest.raises(dj.PlanError, match=r"`state\['all'\]` has no corresponding parameter, and has shape \(2,\) on"):
        dj.specs_like({"all": w}, {"w": w}, {"w": spec})


@pytest.mark.simulated(2)
def test_the_state_of_a_parameter_with_copies_and_blocks() -> None:
    """Stacked, and with a dimension gone, the copies are where they were; what keeps a dimension that is cut as one
    element is refused."""
    P = dj.Partition()

    def found(spec: dj.TensorSpec, *shape: int) -> dj.TensorSpec:
        its = dj.specs_like({"m": {"w": jnp.ones(shape)}}, {"w": jnp.ones(spec.local_shape)}, {"w": spec})
        return its["m"]["w"]

    copied = dj.TensorSpec((5, 3), P.grid([2, 1, 1]), replicated=0)
    assert found(copied, 4, 5, 3) == dj.TensorSpec((4, 5, 3), P.grid([1, 2, 1, 1]), replicated=1)
    cut = dj.TensorSpec((4, 3), P.grid([2, 1, 1]), replicated=2)
    assert found(cut, 2) == dj.TensorSpec((4,), P.grid([2, 1]), replicated=1)
    assert found(cut, 7, 2, 3) == dj.TensorSpec((7, 4, 3), P.grid([1, 2, 1, 1]), replicated=3)
    for shape in ((1, 3), (3,)):
        with pytest.raises(dj.PlanError, match="not a block of any tensor"):
            found(cut, *shape)


@partial(jax.jit, static_argnums=0)
def stepped(optimiser: Any, params: Any) -> Any:
    gradient = jax.tree.map(jnp.sin, params)
    return optimiser.update(gradient, optimiser.init(params), params)[1]


@pytest.mark.simulated(2)
def test_statistics_of_another_shape_than_the_parameter() -> None:
    """Adafactor's and SM3's of tensors that are not cut along what they reduce; the second worker's parameter alone."""
    P = dj.Partition()
    cut = dj.TensorSpec((3, 4, 5), P.grid([2, 1, 1]))
    copies = dj.TensorSpec((3, 4), P, replicated=True)
    its = dj.TensorSpec((4, 3), P.grid([1, 1], [1]))
    specs = ({"cut": cut, "copies": copies}, its)
    whole = jax.tree.map(lambda s: jnp.arange(1.0, 1 + np.prod(s.global_shape)).reshape(s.global_shape), specs)
    params = dj.scatter(jax.tree.map(lambda x: x if P.rank == 0 else jnp.zeros(0), whole), specs)
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    state = stepped(factored, params)
    of_state = dj.specs_like(state, params, specs)
    assert of_state.v_row[0]["cut"] == dj.TensorSpec((3, 4), P.grid([2, 1]))
    assert of_state.v_col[0]["copies"] == dj.TensorSpec((4,), P, replicated=True)
    assert of_state.v_row[1] == dj.TensorSpec((3,), its.partition, replicated=True)
    assert of_state.v[1] == dj.TensorSpec((1,), its.partition, replicated=True)
    gathered = dj.gather(state, of_state)
    if P.rank == 0:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-14), gathered, stepped(factored, whole))
    sm3 = optax.scale_by_sm3()
    with pytest.raises(
        dj.PlanError, match=r"but `state\.mu\[1\]\[1\]` is missing from `state` on worker 0 and there on worker 1"
    ):
        dj.specs_like(sm3.init(params), params, specs)
    with pytest.raises(dj.PlanError, match=r"\.mu\['cut'\]\[1\]` has shape \(4,\) on worker 0, in the place"):
        dj.specs_like(sm3.init(params[0]), params[0], specs[0])


@pytest.mark.simulated(2)
@pytest.mark.parametrize(
    "optimiser",
    [
        optax.scale_by_factored_rms(min_dim_size_to_factor=2),
        optax.scale_by_sm3(),
        optax.scale_by_novograd(),
        optax.flatten(optax.adam(0.1)),
    ],
    ids=["factored", "sm3", "novograd", "flatten"],
)
@pytest.mark.parametrize("grid", [(2, 1), (1, 2)], ids=str)
def test_states_that_are_no_blocks_are_refused(optimiser: Any, grid: tuple[int, int]) -> None:
    spec = dj.TensorSpec((4, 6), dj.Partition().grid(grid))
    params = {"w": jnp.ones(spec.local_shape)}
    with pytest.raises(dj.PlanError, match=r"it is (perhaps )?not a block of any tensor"):
        dj.specs_like(optimiser.init(params), params, {"w": spec})


def network(P_world: dj.Partition) -> nn.Sequential:
    P, P_W = P_world.grid([1, 2]), P_world.grid([2, 2])
    rows = P_world.grid([2, 1], [1, 3])
    return nn.Sequential(
        nn.DistributedLinear(P, P_world.grid([1, 2], [1, 3]), P_W, in_features=6, out_features=4),
        nn.Repartition(P_world.grid([1, 2], [1, 3]), rows),
        nn.DistributedBatchNorm(rows, 4),
    )


@pytest.mark.simulated(4)
def test_gathered_and_scattered() -> None:
    """Parameters, Adam's state, running statistics, a key, numbers and trees of them, on every worker's own blocks."""
    P_world = dj.Partition()
    net = network(P_world)
    params = net.init(jax.random.key(0))
    opt_state = optax.adam(0.1).init(params)
    rest: dict[str, Any] = {"key": jax.random.key(1), "step": 3, "metrics": {"loss": jnp.arange(3.0), "name": "adam"}}
    specs = dj.training_specs(net, opt_state, state=net.init_state(), **rest)
    assert specs["params"] == net.param_specs() and specs["state"] == net.state_specs()
    assert specs["optimiser"] == dj.specs_like(opt_state, params, net.param_specs())
    everywhere = dj.TensorSpec((), P_world, replicated=True)
    assert specs["step"] == specs["key"] == everywhere and specs["metrics"]["name"] is None
    assert specs["metrics"]["loss"].global_shape == (3,)
    state = {"params": params, "optimiser": opt_state, **rest, "state": net.init_state()}
    arrays = {name: specs[name] for name in ("params", "optimiser", "state", "step")}
    whole = dj.gather({name: state[name] for name in arrays}, arrays)
    again = dj.scatter(whole, arrays)
    jax.tree.map(np.testing.assert_array_equal, again, {name: state[name] for name in arrays})


def test_networks_without_specs_are_refused() -> None:
    with pytest.raises(dj.InvalidTypeError, match=r"`network` \(=.*\) must be a layer, with `param_specs`"):
        dj.training_specs(jax.nn.relu, ())
