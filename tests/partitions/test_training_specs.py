"""The specs of a whole training state: what comes back from a gather and a scatter is what went in."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distdl_jax as dj
from distdl_jax import nn


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
