"""`dj.map_blocks`: functions of blocks that need no `if P.active`, beside plain JAX, and the same to JAX everywhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax import nn


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
