"""`dj.map_blocks`: functions of blocks that need no `if P.active`, beside plain JAX, and the same to JAX everywhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import block, block_of

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax import nn


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape)


def merged(h: Any, e: Any, table: Any) -> Any:
    return jax.nn.gelu(h + e.reshape(4, 3)[:, :, None] + table)


def picked(h: Any, labels: Any) -> Any:
    """A cross-entropy that looks up classes, as blocks without elements refuse it: of each sample at each place."""
    return -jnp.take_along_axis(jax.nn.log_softmax(h, axis=1), labels[:, None], axis=1).sum() / 20


@pytest.mark.simulated(4)
def test_a_network_of_several_teams_beside_plain_jax() -> None:
    """A convolution on two workers, a time embedding from a third, a table of positions, and a loss of class labels."""
    world = dj.Partition()
    P_x, P_t = world.grid([1, 1, 2], [2, 1]), world.grid([1, 1], [3])
    P_copies = world.grid([2, 1], P_x.ranks)
    conv = nn.DistributedConv1d(P_x, in_channels=2, out_channels=3, kernel_size=3, padding=1)
    time = nn.DistributedLinear(P_t, in_features=4, out_features=3)
    specs = {"conv": conv.param_specs(), "time": time.param_specs(), "table": dj.TensorSpec((1, 1, 5), P_x)}
    whole = jax.tree.map(lambda spec: drawn(*spec.global_shape), specs)
    whole_x, whole_t, whole_labels = drawn(4, 2, 5), drawn(4, 4), np.arange(20).reshape(4, 5) % 3

    def loss(params: Any, x: Any, t: Any, labels: Any) -> Any:
        e = F.broadcast(time(params["time"], t), P_t, P_copies)
        h = dj.map_blocks(merged, P_x)(conv(params["conv"], x), e, params["table"])
        return dj.map_blocks(picked, P_x)(h, labels)

    def plain_loss(params: Any) -> Any:
        y = jax.lax.conv_general_dilated(whole_x, params["conv"]["weight"], (1,), [(1, 1)])
        y = y + params["conv"]["bias"][:, None]
        return picked(merged(y, whole_t @ params["time"]["weight"].T + params["time"]["bias"], params["table"]),
                      whole_labels)  # fmt: skip

    params = jax.tree.map(lambda spec, value: jax.device_put(block_of(value, spec)), specs, whole)
    data = block(whole_x, P_x), block(whole_t, P_t), block(whole_labels, world.grid([1, 2], P_x.ranks), int)
    value, gradient = dj.jit(dj.value_and_grad(loss))(params, *data)
    whole_value, whole_gradient = jax.value_and_grad(plain_loss)(whole)
    np.testing.assert_allclose(value, whole_value, rtol=1e-13)
    jax.tree.map(
        lambda spec, mine, whole: np.testing.assert_allclose(mine, block_of(whole, spec), atol=1e-13),
        specs, gradient, whole_gradient,
    )  # fmt: skip


@pytest.mark.simulated(3)
def test_what_a_function_makes_of_an_argument_on_one_worker_does_not_matter() -> None:
    """It ignores one, stops its gradient, or has no elements of it to index: adjoints still run on all workers.

    And under vmap all results are mapped over, whichever arguments are.
    """
    world = dj.Partition()
    P_x, P_one = world.grid([2], [0, 2]), world.grid([1], [1])

    def own(x: Any, y: Any, scale: Any) -> Any:
        ignored = {"pair": (x * scale, y.astype(int)), "total": x.sum()}
        return ignored if world.rank == 0 else {"pair": (jax.lax.stop_gradient(y), y.astype(int)), "total": y.sum() * 2}

    def loss(x: Any, scale: Any) -> Any:
        copies = F.broadcast(scale, P_one, P_x, preserve_batch=False)
        result = dj.map_blocks(own, P_x)(x, F.all_sum_reduce(x, P_x, 0), copies)
        assert [leaf.dtype.kind for leaf in jax.tree.leaves(result)] == ["f", "i", "f"]
        shape = (3,) if P_x.active else (0, 0)
        assert [leaf.shape for leaf in jax.tree.leaves(result)] == [shape, shape, ()]
        return result["pair"][0].sum() + result["total"]

    x = jnp.arange(3.0) if P_x.active else dj.zero_volume_tensor()
    scale = jnp.full(1, 4.0) if P_one.active else dj.zero_volume_tensor()

    def program(x: Any, scale: Any) -> Any:
        return jax.grad(loss, (0, 1))(x, scale), jax.vmap(jax.grad(loss), (0, None))(jnp.stack([x, 2 * x]), scale)

    (of_x, of_scale), mapped = dj.jit(program)(x, scale)
    # Worker 0: sum of scale * x, and of x; worker 2: twice the sum of both workers' x.
    expected = {0: np.full(3, 4.0 + 1 + 2), 2: np.full(3, 2.0), 1: np.zeros(0)}[world.rank]
    np.testing.assert_array_equal(of_x, expected)
    np.testing.assert_array_equal(mapped, np.stack([expected, expected]))
    np.testing.assert_array_equal(of_scale, [3.0] if P_one.active else np.zeros(0))


@pytest.mark.simulated(3)
def test_errors_are_raised_on_all_workers() -> None:
    """The worker whose function raises has its own error, all others say whose it is; results have to be alike."""
    world = dj.Partition()
    P = world.grid([2], [0, 2])

    def broken(x: Any) -> Any:
        return x.reshape(7) if world.rank == 2 else x

    def unlike(x: Any) -> Any:
        return (x, x) if world.rank == 2 else x

    x = jnp.ones(3) if P.active else dj.zero_volume_tensor()
    with pytest.raises(TypeError if world.rank == 2 else dj.PlanError, match="reshape") as caught:
        dj.map_blocks(broken, P)(x)
    assert world.rank == 2 or ("On worker 2: " in str(caught.value) and "broken" in str(caught.value))
    with pytest.raises(dj.PlanError, match="must return the same tree, of arrays with the same dtypes, on all workers"):
        dj.map_blocks(unlike, P)(x)
    with pytest.raises(dj.InvalidTypeError, match="`fun` \\(=3\\) must be a function"):
        dj.map_blocks(3, P)  # type: ignore[arg-type]
    with pytest.raises(dj.InvalidTypeError, match="`P` \\(=None\\) must be a partition"):
        dj.map_blocks(unlike, None)  # type: ignore[arg-type]


def test_a_network_plans_it() -> None:
    """In Sequential it is planned as it runs: on P by its blocks, elsewhere zero-volume; scalars are 0 there."""
    world = dj.planning_world(3)
    P = world.grid([2, 1], [2, 1])
    network = nn.Sequential(nn.DistributedLinear(P, in_features=2, out_features=4), dj.map_blocks(lambda x: x.T, P))
    assert network.output_partition == network.input_partition == P
    x = {worker: dj.ShapeDtype(shape, np.dtype("float32")) for worker, shape in enumerate([(5, 0), (3, 2), (4, 2)])}
    assert [network.plan(x).after(x)[worker].shape for worker in range(3)] == [(5, 0), (4, 3), (4, 4)]
    total = nn.Sequential(dj.map_blocks(jnp.sum, P)).plan(x)
    assert {block.shape for block in total.outputs.values()} == {()}
    assert dj.map_blocks(jnp.sum, P) == dj.map_blocks(jnp.sum, world.grid([2, 1], [2, 1]))
