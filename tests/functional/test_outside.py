"""Outside of its partition an operation takes a placeholder; a block there is refused, and never handed on as a result.

Every layer and every operator of the matrix on a partition smaller than the world.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_layer import LAYERS
from matrix.case import Case
from matrix.cases import PRIMITIVES

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.nn.base.layer import draws_numbers

OWNERS_OF_NOTHING = {"broadcast 1x2@2,0 -> 2x2@3,1,0,2 preserve_batch=False": (0,)}
PLACEHOLDERS = [(0,), (3, 0), (0, 2), (2, 0, 3)]
REFUSED = r"is float\w+\[\d, 3\] on worker \d+, which is outside of its partition.*dj\.zero_volume_tensor"
NOT_LOOKED_AT = ("replicated", "gather", "scatter")  # as they say
OPERATORS = [
    case for case in PRIMITIVES if case.kind != "linear" and "of_parameters" not in case.kind
]  # their parameters are of workers inside


def called(layer: Any, x: jax.Array) -> Any:
    key = jax.random.key(0)
    return layer(layer.init(key), x, **({"key": key} if draws_numbers(layer) else {}))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_a_worker_outside(name: str) -> None:
    layer = LAYERS[name](dj.planning_world(5, 4).create_partition_inclusive(range(4)))
    for shape in PLACEHOLDERS:
        assert jax.tree.leaves(called(layer, jnp.ones(shape)))[0].size == 0
    with pytest.raises(dj.PlanError, match=REFUSED):
        called(layer, jnp.ones((2, 3)))


@pytest.mark.parametrize("case", OPERATORS, ids=str)
def test_an_operator_on_a_worker_outside(case: Case) -> None:
    operator = case.operator(dj.planning_world(13, 12).create_partition_inclusive(range(case.world)))
    like = case.shapes[0]

    def given(shape: tuple[int, ...]) -> Any:
        x = jnp.ones(shape)
        return x if isinstance(like, tuple) else {name: x if name == "x" else jnp.ones((0,)) for name in like}

    for shape in PLACEHOLDERS:
        assert all(leaf.size == 0 for leaf in jax.tree.leaves(operator(given(shape))))
    if case.kind in NOT_LOOKED_AT:
        return
    with pytest.raises(dj.PlanError, match=REFUSED):
        operator(given((2, 3)))


@pytest.mark.parametrize("case", [case for case in PRIMITIVES if isinstance(case.shapes[0], tuple)], ids=str)
def test_an_operator_on_a_worker_without_data(case: Case) -> None:
    """One that takes part without owning a part of x: it is refused by the plan, which is the same on all workers."""
    blocks = {w: dj.ShapeDtype(shape, np.dtype(np.float32)) for w, shape in enumerate(case.shapes)}
    P = dj.planning_world(case.world)
    workers = case.plan(P, blocks).workers
    for worker in {w for w, shape in enumerate(case.shapes) if shape == (0,)} & {*workers}:
        large = blocks | {worker: dj.ShapeDtype((2,) * 6, np.dtype(np.float32))}
        if case.kind in NOT_LOOKED_AT or worker in OWNERS_OF_NOTHING.get(case.name, ()):
            continue
        with pytest.raises(dj.PlanError, match=r"dj\.zero_volume_tensor|must have as many dimensions"):
            case.plan(P, large)


@pytest.mark.simulated(2)
def test_all_workers_of_an_operation_refuse_alike() -> None:
    """The layers' and primitives' agreement on shapes is what tells them."""
    P = dj.Partition()
    P_x, P_y = (P.create_partition_inclusive([rank]).grid([1, 1]) for rank in (0, 1))
    linear = nn.DistributedLinear(P_x, P_y, in_features=3, out_features=3)
    x = jnp.ones((2, 3), jnp.float32)
    for move in (
        lambda x: linear(linear.init(jax.random.key(0)), x),
        lambda x: dj.functional.broadcast(x, P_x, P.grid([1, 2])),
        lambda x: dj.functional.sum_reduce(x, P_x, P_y),
        lambda x: dj.functional.repartition(x, P_x, P_y),
        lambda x: dj.functional.reshape(x, P_x, P_y, (3, -1)),
    ):
        with pytest.raises(dj.PlanError, match=r"`x` is float32\[2, 3\] on worker 1, which is outside"):
            move(x)
        assert move(x if P.rank == 0 else x[:0]).dtype == x.dtype


@pytest.mark.simulated(2)
def test_numbers_pass_outside() -> None:
    """A sum over a placeholder is 0, and of its shape there is no placeholder."""
    P_0 = dj.Partition().create_partition_inclusive([0])
    for zero in (0.0, jnp.zeros(())):
        assert dj.functional.all_sum_reduce(jnp.asarray(zero), P_0, 0) == 0
        assert dj.all_reduce(jnp.asarray(zero), P_0, "mean") == 0


@pytest.mark.simulated(2)
def test_parameters_of_another_worker_are_refused() -> None:
    P = dj.Partition()
    linear = nn.DistributedLinear(P.grid([2, 1]), in_features=3, out_features=3)
    params = jax.tree.map(lambda spec: jnp.ones(spec.global_shape), linear.param_specs())
    with pytest.raises(dj.PlanError, match=r'`params\["weight"\]` is .* on worker 1, which is outside'):
        linear(params, jnp.ones((2, 3)))
