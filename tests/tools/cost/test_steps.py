"""The cost of a function of blocks, beside what it really sends."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jobs import run

import distdl_jax as dj
from distdl_jax import TensorSpec, nn
from distdl_jax.transports.threads.world import ThreadTransport

SHAPE = (2, 7, 9, 2)
WEIGHT = jax.ShapeDtypeStruct((3, 3, 2, 2), jnp.float32)


def network(w: Any, x: Any) -> Any:
    """A convolution, a norm, a pooling, steps of a loop, and a loss."""
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = (y - y.mean((1, 2), keepdims=True)) * jax.lax.rsqrt(y.var((1, 2), keepdims=True) + 1e-3)
    y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    y = jax.lax.scan(lambda y, _: (jnp.tanh(y + jnp.roll(y, 1, 1)), None), y, None, length=3)[0]
    return jnp.mean(y**2)


Way = Callable[[TensorSpec], tuple[Callable[..., Any], Any]]
"""Makes a step of parameters and x, and describes the parameters."""


def inside(spec: TensorSpec) -> tuple[Callable[..., Any], Any]:
    """The derivative inside of the distributed function, which dj.jit compiles."""
    return dj.jit(dj.distribute(jax.value_and_grad(network), (None, spec))), WEIGHT


def outside(spec: TensorSpec) -> tuple[Callable[..., Any], Any]:
    """The derivative outside."""
    return dj.value_and_grad(dj.distribute(network, (dj.VARIABLE, spec), dj.PARTS)), WEIGHT


def of_layers(spec: TensorSpec) -> tuple[Callable[..., Any], Any]:
    """A step of layers, whose plans need all workers' shapes."""
    P = spec.partition
    layers = nn.Sequential(
        nn.DistributedConv2d(P, in_channels=7, out_channels=2, kernel_size=3, padding=1),
        nn.DistributedBatchNorm(P, 2),
    )
    step = dj.value_and_grad(lambda params, x: jnp.sum(layers(params, x) ** 2))
    return dj.jit(step), layers.param_specs()


WAYS = [
    *((inside, 2, [1, 2, 1, 1]), (inside, 4, [1, 2, 2, 1]), (outside, 2, [1, 1, 2, 1]), (outside, 4, [2, 2, 1, 1])),
    *((of_layers, 2, [1, 1, 2, 1]), (of_layers, 4, [1, 1, 2, 2])),
]


def zeros(spec: Any) -> jax.Array:
    return jnp.zeros(spec.local_shape if isinstance(spec, TensorSpec) else spec.shape, jnp.float32)


@pytest.mark.parametrize(("way", "workers", "grid"), WAYS)
def test_each_worker_sends_what_its_cost_says(
    way: Way, workers: int, grid: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    perform = ThreadTransport.perform

    def counted(self: Any, operation: Any, given: np.ndarray, coming: Any) -> np.ndarray:
        counts = sent[self._rank]
        if not operation.is_message:
            counts[2] += 1
            counts[3] += given.nbytes
        elif operation.dest is not None:
            counts[0] += 1
            counts[1] += given.nbytes
        return perform(self, operation, given, coming)

    def program() -> None:
        spec = TensorSpec(SHAPE, dj.Partition().grid(grid))
        step, params = way(spec)
        jax.block_until_ready(step(jax.tree.map(zeros, params), zeros(spec)))

    monkeypatch.setattr(ThreadTransport, "perform", counted)
    dj.simulate(workers, program)
    spec = TensorSpec(SHAPE, dj.planning_world(workers).grid(grid))
    cost = dj.cost(*way(spec), spec)
    found = cost.messages, cost.workers.bytes_forward + cost.workers.bytes_backward
    teams = cost.workers.collectives_forward + cost.workers.collectives_backward
    team_bytes = cost.workers.team_bytes_forward + cost.workers.team_bytes_backward
    assert np.stack([*found, teams, team_bytes], 1).tolist() == [sent[worker] for worker in range(workers)]
    assert sum(layer.amounts.messages for layer in cost.layers).tolist() == cost.messages.tolist()


def test_workers_inside_of_a_large_grid_count_as_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On even blocks these counts are exact."""
    spec = TensorSpec((2, 24, 16, 2), dj.planning_world(24).grid([1, 6, 4, 1]))
    step, params = inside(spec)
    cost = dj.cost(step, params, spec)
    monkeypatch.setattr("distdl_jax.tools.cost.step.ALL", 24)
    one_by_one = dj.cost(step, params, spec)
    assert cost.to_json() == one_by_one.to_json()
    assert len(set(cost.messages.tolist())) > 2


def test_a_plan_without_other_workers_says_the_same() -> None:
    """In a planning world, of movements of all kinds: halos and their adjoints, sums, gathers, a reshape."""

    def f(w: Any, x: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")
        y = jnp.sort(y.reshape(len(y), -1, 2), 1)
        return jnp.mean(jnp.cumsum(y, 1) ** 2)

    for rank in range(4):
        spec = TensorSpec((2, 15, 13, 2), dj.planning_world(4, rank).grid([1, 2, 2, 1]))
        step = dj.distribute(jax.value_and_grad(f), (None, spec))
        plan = step.plan(WEIGHT, jax.ShapeDtypeStruct(spec.local_shape, jnp.float32))
        cost = dj.cost(step, WEIGHT, spec)
        planned = [operation for moved in plan.moved for operation in moved.operations]
        sent = [operation for operation in planned if not operation.is_message or operation.dest is not None]
        assert (len(sent), plan.bytes) == (cost.workers.operations[rank], cost.bytes[rank])
        assert {"neighbours", "added neighbours", "sum", "reshape"} <= {moved.what for moved in plan.moved}


def test_flops_and_memory_are_xlas() -> None:
    """On one worker, of a product and a convolution; memory of the compiled program, in which nothing is global."""
    P = dj.planning_world(1).grid([1, 1, 1, 1])
    spec = TensorSpec(SHAPE, P)
    x = jax.ShapeDtypeStruct(SHAPE, jnp.float32)

    def f(w: Any, x: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.einsum("abcd,aefd->bcef", y, x)

    cost = dj.cost(dj.distribute(f, (None, spec)), WEIGHT, spec)
    assert cost.flops[0] == jax.jit(f).lower(WEIGHT, x).cost_analysis()["flops"]
    with pytest.raises(dj.InvalidArgumentError, match="compiled=True"):
        cost.memory  # noqa: B018
    halves = TensorSpec((2, 700, 9, 2), dj.planning_world(2).grid([1, 2, 1, 1]))
    cost = dj.cost(dj.distribute(jax.value_and_grad(network), (None, halves)), WEIGHT, halves, compiled=True)
    compiled = cost.compiled
    assert compiled is not None
    assert compiled.arguments == cost.workers.parameters[0] == 4 * (2 * 350 * 9 * 2 + 3 * 3 * 2 * 2)
    assert cost.memory.tolist() == [compiled.total] * 2
    assert "MB stored" in str(cost)


def test_arguments_of_other_dtypes_and_kinds() -> None:
    """An argument may have a dtype of its own, be a number, or be no array."""
    spec = TensorSpec((5, 3), dj.planning_world(2).grid([2, 1]))
    f = dj.distribute(lambda act, table, n, rows: (act(table[rows]) * n).sum(), (None, None, None, spec))
    n = jax.typeof(2).dtype.itemsize
    cost = dj.cost(f, jnp.tanh, np.zeros((4, 2), np.float32), 2, (spec, jnp.int32))
    assert cost.workers.parameters.tolist() == [4 * 8 + n + 4 * 9, 4 * 8 + n + 4 * 6]
    assert (cost.workers.collectives_forward == 1).all()
    assert json.loads(cost.to_json())["workers"]["collectives_forward"] == [1, 1]


OVER_MPI = """
import jax, jax.numpy as jnp, numpy as np
import distdl_jax as dj

P = dj.Partition()
spec = dj.TensorSpec((2, 2, 25, 22), P.grid([1, 1, 2, P.size // 2]))

def loss(w, x):
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")
    y = jnp.tanh(y - y.mean((2, 3), keepdims=True))
    return jnp.mean(jax.lax.conv_general_dilated(y, w, (1, 1), "SAME") ** 2)

w, x = jnp.ones((2, 2, 3, 3)), spec.block(np.ones(spec.global_shape, np.float32))
step = dj.jit(dj.distribute(jax.value_and_grad(loss), (None, spec)))
cost = dj.cost(step, w, spec)
profile = dj.profile(step, w, x, steps=2)
assert profile.matched
found = [sum(getattr(layer.both, name) for layer in profile.layers) for name in ("messages", "bytes")]
np.testing.assert_array_equal(found, [cost.workers.operations, cost.bytes])
assert (cost.messages > 0).all() and (cost.workers.collectives_forward > 0).all()
"""


@pytest.mark.parametrize("workers", [2, 4])
def test_a_profile_over_mpi_records_what_the_cost_says(workers: int) -> None:
    """The messages that really were sent, and `dj.cost` in the job itself."""
    status, output = run(workers, "-c", OVER_MPI)
    assert status == 0, output
