"""All layers keep one contract: made by keyword, static to JAX, params in front, {} where there are none."""

import copy
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from all_workers import on_all, refusal
from every_layer import LAYERS
from flax import linen, nnx

import distdl_jax as dj
from distdl_jax import nn


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_a_static_value(name: str) -> None:
    """Equal where it is made alike, hashable, without leaves, not to be changed; an argument of a jitted function."""
    P = dj.planning_world(4, 1)
    layer, same = LAYERS[name](P), LAYERS[name](P)
    assert layer is not same and layer == same and hash(layer) == hash(same)
    assert copy.copy(layer) is layer is copy.deepcopy({"layer": [layer]})["layer"][0]
    assert "_built_at" not in repr(layer)
    assert jax.tree.leaves({"layer": layer, "P": P, "P_x": P.grid([2, 2])}) == []
    with pytest.raises((AttributeError, TypeError)):
        layer.P_x = None
    traced = []

    @jax.jit
    def double(layer: Any, P_x: dj.Partition, x: jax.Array) -> jax.Array:
        traced.append((type(layer), P_x))
        return 2 * x

    for each, its in ((layer, P), (same, P), (same, P.grid([2, 2]))):
        assert float(double(each, its, jnp.float32(3))) == 6
    assert traced == [(type(layer), P), (type(layer), P.grid([2, 2]))]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_satisfies_the_contract(name: str) -> None:
    """init gives blocks of the shapes that the specs say, a pytree like them, {} without parameters."""
    layer = LAYERS[name](dj.planning_world(4, 1))
    assert isinstance(layer, nn.Layer)
    params, specs = layer.init(jax.random.key(0), jnp.float16), layer.param_specs()
    jax.tree.map(lambda block, spec: pytest.fail() if block.shape != spec.local_shape else None, params, specs)
    assert {block.dtype for block in jax.tree.leaves(params)} <= {np.dtype(np.float16)}
    if not jax.tree.leaves(params) and name != "Sequential":
        assert (params, specs) == ({}, {})
        with pytest.raises(dj.InvalidArgumentError, match=r"`params` is a dictionary of \['a'\], but must be \{\}"):
            layer({"a": 1}, jnp.zeros(3))
        with pytest.raises(TypeError, match=r"takes the input, or \{\} and the input, not 3 arguments"):
            layer({}, jnp.zeros(3), 1)


def without_parameters(P: dj.Partition) -> dict[str, Any]:
    """Layers of which the arguments say that they have no parameters, and networks of such."""
    norm = nn.DistributedInstanceNorm(P, 2, affine=False)
    layers = (
        norm,
        nn.DistributedGroupNorm(P, 2, 2, affine=False),
        nn.DistributedBatchNorm(P, 2, affine=False),
        nn.DistributedLayerNorm(P, 5, elementwise_affine=False),
        nn.DistributedRMSNorm(P, 5, elementwise_affine=False),
        nn.Sequential(jnp.tanh, norm, nn.Repartition(P, P)),
        nn.Residual(nn.Sequential(jnp.tanh)),
        nn.Skip(norm),
        nn.Remat(norm),
        nn.Precision(nn.Sequential(norm, jnp.tanh), jnp.float32),
    )
    return {type(layer).__name__: layer for layer in layers}


@pytest.mark.simulated(2)
def test_layers_without_parameters_are_called_with_x_alone() -> None:
    P = dj.Partition().grid([1, 1, 2])
    x = jnp.arange(2.0 * 2 * (3 - P.rank)).reshape(2, 2, -1) ** 1.5
    layers = without_parameters(P)
    assert len(layers) == 10

    @dj.jit
    def program(x: Any) -> Any:
        return {
            name: (layer(layer.init(jax.random.key(0)), x), layer(x), layer.apply(x)) for name, layer in layers.items()
        }

    for name, (with_params, *alone) in program(x).items():
        for y in alone:
            np.testing.assert_array_equal(y, with_params, err_msg=name)
    batch = layers["DistributedBatchNorm"]
    y, state = batch(x, state=batch.init_state())
    np.testing.assert_allclose(y, batch(x), 1e-12)
    assert state.keys() == {"running_mean", "running_var", "num_batches_tracked"}
    for layer in (nn.DistributedLayerNorm(P, 5), nn.Sequential(nn.DistributedLayerNorm(P, 5))):
        with pytest.raises(dj.InvalidTypeError, match=rf"{type(layer).__name__} has parameters: call it with them"):
            layer(x)


def test_copies_of_a_model_are_of_one_network() -> None:
    """They can be averaged; a copy of JAX's tanh is not equal to tanh. Specs, plans and functions of blocks alike."""
    P = dj.planning_world(1).grid([1, 1])
    network = nn.Sequential(nn.DistributedLinear(P, P, P, 3, 4), jnp.tanh, dj.map_blocks(jax.nn.relu, P))
    model = {"network": network, "params": network.init(jax.random.key(0))}
    copied = copy.deepcopy(model)
    mean = jax.tree.map(lambda a, b: (a + 3 * b) / 4, model, copied)
    assert mean["network"] is copied["network"] is network and copied["params"] is not model["params"]
    jax.tree.map(np.testing.assert_array_equal, mean["params"], model["params"])
    plan = network.plan({0: dj.ShapeDtype((2, 3), np.dtype("float32"))})
    for value in (plan, *plan.plans, dj.TensorSpec((2, 3), P), network[2], nn.Local(jnp.tanh), P):
        assert copy.copy(value) is value is copy.deepcopy([value])[0]


def test_a_class_may_name_the_contract_as_its_base() -> None:
    class Mine(nn.DistributedLinear, nn.Layer):
        """A user's own, which says what it is."""

    P = dj.planning_world(1).grid([1, 1])
    layer = Mine(P, P, P, np.int64(3), 4)
    assert isinstance(layer, nn.Layer) and isinstance(layer, nn.DistributedLinear) and isinstance(layer, Mine)
    assert not isinstance(P, Mine) and not isinstance(P, nn.Layer) and layer == Mine(P, P, P, 3, 4)
    assert layer(layer.init(jax.random.key(0)), jnp.ones((2, 3))).shape == (2, 4)


# Of those that leave their output elsewhere, where it is.
MOVED = {
    **{"Broadcast": (2, 2), "SumReduce": (1, 2), "Repartition": (1, 4), "AllToAll": (4, 1), "Flatten": (2, 2)},
    **{"Reshape": (1, 2, 2), "Unflatten": (1, 2, 2), "DistributedEmbedding": (1, 2)},
    **{"Sequential": (1, 4), "WeightNorm": (1, 4)},
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_says_where_its_input_and_output_are(name: str) -> None:
    P = dj.planning_world(4)
    layer = LAYERS[name](P)
    P_x = layer.P_x if hasattr(layer, "P_x") else P.grid([2, 2])
    assert layer.input_partition == P_x
    assert layer.output_partition == (P.grid(MOVED[name]) if name in MOVED else P_x)
    network = nn.Sequential(jnp.tanh, layer, jax.nn.relu)
    assert (network.input_partition, network.output_partition) == (P_x, layer.output_partition)


def test_a_concatenation_says_where_it_is_and_functions_alone_are_nowhere() -> None:
    P_x, network = dj.planning_world(4).grid([2, 2]), nn.Sequential(jnp.tanh)
    assert nn.Concatenate(P_x).input_partition == nn.Concatenate(P_x).output_partition == P_x
    assert network.input_partition is network.output_partition is nn.Remat(network).input_partition is None


@pytest.mark.parametrize("name", LAYERS)
def test_a_key_is_checked(name: str) -> None:
    """Also where nothing is drawn from it; None where something is."""
    draws = ("DistributedLinear", "DistributedConv1d", "DistributedMultiHeadAttention", "DistributedSpectralConv1d")
    for key in (0, "key", jnp.zeros(2), *([None] if name in (*draws, "DistributedConvTranspose1d") else [])):
        with pytest.raises(dj.InvalidTypeError, match=r"`key` .* must be a random key, such as jax.random.key\(0\)"):
            LAYERS[name](dj.planning_world(4)).init(key)


def network_on(P: dj.Partition) -> nn.Sequential:
    """Convolution, pooling and two linear layers on four workers, or two; the last output on the last one."""
    half = P.size // 2
    P_f, P_x, P_y = P.grid([1, 1, half, 2]), P.grid([1, half]), P.grid([1, 2])
    P_last = P.grid([1, 1], [P.size - 1])
    return nn.Sequential(
        nn.Repartition(P.grid([1, 1, 1, 1]), P_f),
        nn.DistributedConv2d(P_f, in_channels=1, out_channels=4, kernel_size=3, padding=1),
        jax.nn.relu,
        nn.DistributedMaxPool2d(P_f, 2),
        nn.Sequential(
            nn.Repartition(P_f, P.grid([1, half, 1, 1])),
            lambda x: x.reshape(len(x), -1),
            nn.DistributedLinear(P_x, P_y, P.grid([2, half]), 64, 6),
            jnp.tanh,
        ),
        nn.DistributedLinear(P_y, P_last, P.grid([1, 2]), 6, 3),
    )


def in_plain_jax(params: Any, x: jax.Array) -> jax.Array:
    _, conv, _, _, (_, _, first, _), second = params
    x = jax.lax.conv_general_dilated(x, conv["weight"], (1, 1), "SAME") + conv["bias"][:, None, None]
    x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = jnp.tanh(x.reshape(len(x), -1) @ first["weight"].T + first["bias"])
    return x @ second["weight"].T + second["bias"]


def images(P: dj.Partition) -> tuple[jax.Array, jax.Array]:
    """All images, and what this worker passes."""
    whole = jax.random.normal(jax.random.key(1), (5, 1, 8, 8), float)
    return whole, whole if P.rank == 0 else dj.zero_volume_tensor(5, float)


def begun() -> tuple[dj.Partition, nn.Sequential, Any, jax.Array]:
    """The partition of all workers, the network, its parameters, and this worker's input."""
    P = dj.Partition()
    network = network_on(P)
    return P, network, network.init(jax.random.key(0), float), images(P)[1]


def squares(network: Callable, params: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(network(params, x) ** 2)


def check_against_plain_jax(P: dj.Partition, params: Any, value: Any, gradient: Any) -> None:
    """The distributed value and gradient are those of plain JAX, to 1e-12."""
    network, (whole, _) = network_on(P), images(P)
    specs = network.param_specs()
    all_params, gathered = dj.gather(params, specs), dj.gather(gradient, specs)
    if P.rank == 0:
        plain = jax.jit(jax.value_and_grad(lambda params: squares(in_plain_jax, params, whole)))
        want, wanted = plain(all_params)
        np.testing.assert_allclose(value, want, rtol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), gathered, wanted)


@pytest.mark.simulated(2)
def test_a_sequential_network() -> None:
    """Value and gradient are those of plain JAX; parameters are a tuple like the layers, and optax works on them."""
    P, network, params, x = begun()
    assert isinstance(params, tuple) and len(params) == len(network) == 6 and params[0] == params[2] == {}
    step = dj.jit(dj.value_and_grad(lambda params: squares(network, params, x)))
    value, gradient = step(params)
    check_against_plain_jax(P, params, value, gradient)
    optimiser = optax.sgd(1e-4)
    updates, _ = optimiser.update(gradient, optimiser.init(params), params)
    assert step(optax.apply_updates(params, updates))[0] < value

    @dj.jit
    def in_three_ways(params: Any, x: jax.Array) -> Any:
        by_hand = x
        for layer, its in zip(network, params, strict=True):
            by_hand = layer(its, by_hand) if isinstance(layer, nn.Layer) else layer(by_hand)
        return by_hand, network(params, x), network[3:](params[3:], network[:3](params[:3], x))

    by_hand, *others = in_three_ways(params, x)
    for y in others:
        np.testing.assert_array_equal(y, by_hand)


@pytest.mark.simulated(4)
def test_the_plan_of_a_network_says_what_all_workers_will_hold() -> None:
    """Without a message; after each layer, on every worker, and in the parameters' dtype where that is given."""
    P = dj.Partition()
    network, (_, x) = network_on(P), images(P)
    for dtype in ("float64", "float16"):
        params = network.init(jax.random.key(0), dtype)
        told = P.allgather_data((jax.tree.map(shape_dtype, params), shape_dtype(x)))
        of_params, of_x = ({worker: each[k] for worker, each in enumerate(told)} for k in (0, 1))
        for place in range(1, len(network) + 1):
            part = network[:place].plan(of_x, {worker: its[:place] for worker, its in of_params.items()})
            y = jax.eval_shape(lambda *both, n=place: network[:n](*both), params[:place], x)
            held = P.allgather_data(shape_dtype(y))
            assert [part.output(worker) for worker in range(4)] == held == list(part.outputs.values())
    assert network.plan(of_x).outputs == network.plan(of_x, {w: told[w][0] for w in of_x}).outputs


def shape_dtype(x: jax.Array) -> dj.ShapeDtype:
    return dj.ShapeDtype(x.shape, np.dtype(x.dtype))


def test_the_plan_of_a_network_is_the_same_on_every_worker() -> None:
    """Made by each of four workers in one process; it depends on no worker's own place."""
    x = {worker: dj.ShapeDtype((5, 1, 8, 8) if worker == 0 else (5, 0), np.dtype("float32")) for worker in range(4)}
    plans = on_all(4, lambda P: network_on(P).plan(x).outputs)
    assert all(plan == plans[0] for plan in plans)
    assert plans[0][3] == dj.ShapeDtype((5, 3), np.dtype("float32"))
    wrong = x | {0: dj.ShapeDtype((5, 2, 8, 8), np.dtype("float32"))}
    assert "channels" in refusal(4, lambda P: network_on(P).plan(wrong), dj.PlanError)


@pytest.mark.world(2)
def test_a_network_is_an_argument_of_dj_jit() -> None:
    """Layers and partitions pass through dj.jit, jax.grad and vmap as what they are."""
    P, network, params, x = begun()
    step = dj.jit(lambda network, P, *rest: dj.value_and_grad(squares, 1, partition=P)(network, *rest))
    check_against_plain_jax(P, params, *step(network, P, params, x))


@pytest.mark.simulated(2)
def test_equinox() -> None:
    """A network is a field, or a plain leaf, of an equinox module: dj.jit, value_and_grad, gather and optax work."""

    class Model(eqx.Module):
        network: nn.Sequential
        params: Any
        scale: jax.Array

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.network(self.params, x) * jax.lax.stop_gradient(self.scale)

    P, network, params, x = begun()
    model = Model(network, params, jnp.ones(()))
    assert len(jax.tree.leaves(model)) == len(jax.tree.leaves(model.params)) + 1
    value_and_grad = dj.value_and_grad(lambda model, x: jnp.sum(model(x) ** 2))
    step = dj.jit(value_and_grad)
    value, gradient = step(model, x)
    check_against_plain_jax(P, model.params, value, gradient.params)
    filtered = eqx.filter_jit(value_and_grad)(model, x)
    jax.tree.map(np.testing.assert_array_equal, filtered, (value, gradient))
    trained = eqx.apply_updates(model, jax.tree.map(lambda g: -1e-4 * g, gradient))
    assert trained.network == network and step(trained, x)[0] < value


@pytest.mark.simulated(2)
def test_flax() -> None:
    """A network is an attribute of a linen module, and of an nnx one."""
    P, network, params, x = begun()

    class Linen(linen.Module):
        network: nn.Sequential

        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.network(self.param("blocks", self.network.init, float), x)

    class Nnx(nnx.Module):
        def __init__(self) -> None:
            self.network = network
            self.blocks = nnx.Param(params)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.network(self.blocks.get_value(), x)

    def differentiated(apply: Callable[..., Any], variables: Any) -> Any:
        return dj.jit(dj.value_and_grad(lambda variables: jnp.sum(apply(variables, x) ** 2)))(variables)

    module, (graph, state) = Linen(network), nnx.split(Nnx())
    variables = module.init(jax.random.key(0), x)
    value, gradient = differentiated(module.apply, variables)
    check_against_plain_jax(P, variables["params"]["blocks"], value, gradient["params"]["blocks"])
    value, gradient = differentiated(lambda state, x: nnx.merge(graph, state)(x), state)
    check_against_plain_jax(P, state["blocks"].get_value(), value, gradient["blocks"].get_value())


@pytest.mark.simulated(2)
def test_variables_of_flax_are_parameters() -> None:
    """One around all parameters of a layer or a network, or one around each: as if they were not there."""
    P = dj.Partition()
    P_x, P_W = (P.grid(shape) for shape in ([1, 2], [2, 1]))
    P_one = P.grid([1, 1])
    layer = nn.DistributedLinear(P_one, P_x, P_W, 3, 5)
    network = nn.Sequential(layer, jax.nn.relu)
    params, x = layer.init(jax.random.key(0)), jnp.ones((2, 3)) if P_one.active else dj.zero_volume_tensor(2)
    want, gradient = jax.value_and_grad(lambda params: layer(params, x).sum())(params)
    each = {name: nnx.Param(block) for name, block in params.items()}
    for boxed, F in ((nnx.Param(params), layer), (each, layer), (nnx.Param((params, {})), network)):
        value, its = jax.value_and_grad(lambda boxed, F=F: F(boxed, x).sum())(boxed)
        assert isinstance(jax.tree.leaves(its, is_leaf=lambda leaf: isinstance(leaf, nnx.Param))[0], nnx.Param)
        if F is layer:
            assert float(value) == float(want)
            jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(its), jax.tree.leaves(gradient))


def test_the_table_of_a_network() -> None:
    """A line for each layer, also of networks within it: partitions, parameters, bytes on the workers."""
    lines = str(network_on(dj.planning_world(4, 2))).splitlines()
    names = "Repartition DistributedConv2d relu DistributedMaxPool2d Repartition <lambda> DistributedLinear tanh"
    assert [line.split()[1] for line in lines[1:-1]] == [*names.split(), "DistributedLinear"]
    assert [line.split()[0] for line in lines[1:-1]] == ["0", "1", "2", "3", "4.0", "4.1", "4.2", "4.3", "5"]
    assert "P_x 1 x 1 x 2 x 2 (0-3)" in lines[2] and lines[2].endswith("40          0 to 160")
    weight, bias = 64 * 6, 6
    assert f"{weight + bias}" in lines[7] and lines[7].endswith(f"{4 * weight // 4} to {4 * (weight // 4 + bias // 2)}")
    conv, last = 4 * 9 + 4, 6 * 3 + 3
    most = 4 * (conv + weight // 4 + bias // 2 + 9 + 3)  # worker 0: a weight's half and the bias of the last layer
    assert lines[-1].split()[:2] == ["all", f"{conv + weight + bias + last}"] and lines[-1].endswith(f"to {most}")
    assert network_on(dj.planning_world(4, 2)).table("float64").splitlines()[-1].endswith(f"to {2 * most:,}")


def test_refusals() -> None:
    with pytest.raises(dj.InvalidTypeError, match=r"`layers\[1\]` \(=3\) must be a layer or a function of an array"):
        nn.Sequential(jax.nn.relu, 3)
    with pytest.raises(dj.InvalidArgumentError, match="`params` has 1 entries, but there are 2 layers"):
        nn.Sequential(jax.nn.relu, jax.nn.relu)(({},), jnp.ones(3))
