"""What layers do that are traced for all workers, without any of them: operation by operation what programs do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers.test_output_specs import LAYERS

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.primitives.plan import Computes, Plan
from distdl_jax.programs.ir import Operation, operations
from distdl_jax.tools.cost.events import step_events
from distdl_jax.tools.cost.traced import TracedPlan, completed

Build = Callable[[dj.Partition], tuple[Any, tuple[int, ...]]]
WORKERS = 4


def of_layer(name: str) -> Build:
    """Return what makes one of the layers on record, and the shape of its input."""
    return lambda P: LAYERS[name](P)[:2]


def embedding(P: dj.Partition) -> tuple[Any, tuple[int, ...]]:
    """A vocabulary and a batch that are split."""
    return nn.DistributedEmbedding(P.grid([1, 1]), P.grid([1, 1, 2]), P.grid([2, 2]), 9, 7), (5, 3)


def linear(P: dj.Partition) -> nn.DistributedLinear:
    """A product whose weight is cut on both sides."""
    return nn.DistributedLinear(P.grid([1, 2]), P.grid([1, 2]), P.grid([2, 2]), 7, 7)


NETWORKS: dict[str, Build] = {
    "upsample": of_layer("upsample"),
    "functions around a pool": of_layer("network of a pool"),
    "embedding": embedding,
    "recomputed": lambda P: (nn.Remat(nn.Sequential(linear(P), jnp.tanh)), (3, 7)),
    "normalised weight": lambda P: (nn.WeightNorm(linear(P)), (3, 7)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_traced_layers_foresee_every_operation(name: str) -> None:
    """Forward, and of the gradients of the parameters and, where it is differentiated, of x."""
    build = NETWORKS[name]

    def program() -> dict[int, Any]:
        layer, shape = build(dj.Partition())
        spec = dj.TensorSpec(shape, layer.input_partition)
        params = layer.init(jax.random.key(0), jnp.float32)
        x = jnp.zeros(spec.shape_on(dj.Partition().rank), dtype_of(layer))
        argnum = 0 if jax.tree.leaves(layer.param_specs()) else 1
        gradient = dj.grad(lambda params, x: jnp.sum(layer(params, x).real ** 2), argnum)
        return dict(dj.check(gradient, params, x).programs)

    programs = dj.simulate(WORKERS, program)[0]
    layer, plan, x = planned(build)
    world, of_x = layer.input_partition.world, not jax.tree.leaves(layer.param_specs())
    traced = completed(layer, plan, x, world, np.dtype("float32"))
    for worker, found in programs.items():
        real = [op for op, times in operations(found) for _ in range(times or 0)]
        assert foreseen(traced, worker, of_x) == [message(op) for op in real]


@pytest.mark.parametrize("name", ["conv", "group norm", "pool", "rows to columns"])
def test_plans_that_say_their_actions_say_what_is_traced(name: str) -> None:
    """On the same workers, in the same order, with the gradient of x."""
    layer, plan, x = planned(of_layer(name))
    traced = TracedPlan(plan.outputs, layer, x, layer.input_partition.world, np.dtype("float32"))
    for worker in range(WORKERS):
        assert foreseen(plan, worker, True) == foreseen(traced, worker, True)


def planned(build: Build) -> tuple[Any, Plan, dict[int, dj.ShapeDtype]]:
    """Return a layer in a world for planning, its plan, and the shapes and dtypes of its input."""
    layer, shape = build(dj.planning_world(WORKERS))
    spec = dj.TensorSpec(shape, layer.input_partition)
    x = {worker: dj.ShapeDtype(spec.shape_on(worker), np.dtype(dtype_of(layer))) for worker in range(WORKERS)}
    return layer, layer.plan(x), x


def dtype_of(layer: Any) -> Any:
    """Return the dtype of a layer's input."""
    return jnp.int32 if layer.takes_indices else jnp.float32


def foreseen(plan: Plan, worker: int, of_x: bool) -> list[Operation]:
    """Return the operations that a plan's actions name."""
    events = step_events(plan.actions, worker, x_has_gradient=of_x)
    return [message(event.does) for event in events if isinstance(event.does, Operation)]


def message(op: Operation) -> tuple[Any, ...]:
    """Return what tells an operation, without the team of a message: all workers, which plans don't say."""
    team = () if op.is_message else op.team
    return (op.kind, team, op.dest, op.source, op.send_tag, op.recv_tag, op.count, op.received, op.dtype, op.op)


def test_a_traced_layer_has_the_flops_of_its_products() -> None:
    """As many as the layer whose plan says them; recomputed, the forward pass counts twice."""
    P = dj.planning_world(WORKERS)
    spec = dj.TensorSpec((3, 7), P.grid([1, 2]))
    tail = nn.Sequential(linear(P), linear(P))
    plain, again = (dj.cost(network, spec).workers for network in (tail, nn.Sequential(linear(P), nn.Remat(linear(P)))))
    assert (again.flops_forward == plain.flops_forward).all()
    assert (again.flops_parameters == plain.flops_parameters).all()
    assert (again.flops_input > plain.flops_input).all()
    layer, plan, x = planned(lambda P: (linear(P), (3, 7)))
    (action,) = TracedPlan(plan.outputs, layer, x, layer.input_partition.world, np.dtype("float32")).actions
    work, gradients = action.forward(0)[0], action.backward(0, True)[0]
    (of_product,) = (action.work(0) for action in plan.actions if isinstance(action, Computes))
    assert of_product.flops <= work.flops <= 2 * of_product.flops
    assert of_product.flops_params <= gradients.flops_params <= 2 * of_product.flops_params


@dataclass(frozen=True)
class Borrowed:
    """A layer of a user's own, with the plan of a function that leaves blocks as they are, as in docs/own-layers.md."""

    P: dj.Partition

    def init(self, key: jax.Array, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        return {}

    def param_specs(self) -> dict[str, dj.TensorSpec]:
        return {}

    def plan(self, x: Any, params: Any = None) -> Plan:
        return nn.Sequential(lambda x: x).plan(x)

    def __call__(self, params: Any, x: jax.Array) -> jax.Array:
        return dj.functional.all_sum_reduce(x, self.P, axes_reduce=1)


def test_a_plan_that_is_another_network_s_says_shapes_only() -> None:
    """What the layer moves is traced, alone and in a network."""
    P = dj.planning_world(WORKERS).grid([1, 4])
    spec = dj.TensorSpec((3, 8), P)
    for network in (Borrowed(P), nn.Sequential(jnp.tanh, nn.Residual(Borrowed(P)))):
        assert dj.cost(network, spec, backward=False).bytes.tolist() == [3 * 2 * 4] * WORKERS
