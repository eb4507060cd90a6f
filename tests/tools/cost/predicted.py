"""What is predicted that workers communicate in a training step, compared with what their programs do."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import distdl_jax as dj
from distdl_jax.functional.mark import Mark
from distdl_jax.partitions.spec_trees import is_spec
from distdl_jax.tools.cost.layers import Chain, CountedLayer, Counter, nodes_in
from distdl_jax.tools.cost.traces import Communication
from distdl_jax.watchdog.programs.ir import Operation, operations

FLOAT32 = np.dtype("float32")
Network = tuple[Any, dj.TensorSpec]
"""A network, and the spec of its input."""

Build = Callable[[dj.Partition], Network]
"""Makes a network on the workers of a partition."""


def check_predicted(build: Build, size: int = 4) -> None:
    """Check that traces predict the operations of `size` workers, in order, with partners, tags, lengths and dtypes."""

    programs = dj.simulate(size, lambda: dict(dj.check(*step_of(*build(dj.Partition()))).programs))[0]
    network, spec = build(dj.planning_world(size))
    x, world = blocks(spec, dtype_of_input(network)), spec.partition.world
    chain = Counter(world, FLOAT32).chain(network, network.plan(x, param_blocks(network, world.size)), x)
    cost = dj.cost(network, spec)
    for worker, found in programs.items():
        real = [without_team(operation) for operation, times in operations(found) for _ in range(times or 0)]
        assert list(step_operations(chain, worker)) == real[:-1]
        assert (real[-1].kind, real[-1].count) == ("allreduce", 1)  # the sum of the loss's parts
        sent = [operation for operation in real if operation.is_message and operation.dest is not None]
        assert cost.messages[worker] == len(sent)
        assert cost.bytes[worker] == sum(operation.bytes_sent for operation in real[:-1])


def step_of(network: Any, spec: dj.TensorSpec) -> tuple[Callable[..., Any], Any, Any]:
    """Return the value and gradient of a network, as a function of this worker's parameters and input, and these."""
    dtype = dtype_of_input(network)
    params = jax.tree.map(lambda spec: np.zeros(spec.local_shape, np.float32), network.param_specs(), is_leaf=is_spec)
    x = np.zeros(spec.local_shape, dtype) if spec.box else dj.zero_volume_tensor(spec.global_shape[0], dtype=dtype)
    options = {"key": jax.random.key(0)} if network.draws else {}
    return dj.value_and_grad(lambda params, x: jnp.sum(network(params, x, **options) ** 2)), params, x


def step_operations(chain: Chain, worker: int) -> Iterator[Operation]:
    """Yield what a worker communicates in a training step, in order."""
    yield from forward_operations(chain, worker)
    for layer in reversed(list(nodes_in(chain))):
        if not isinstance(layer, CountedLayer):
            for movement, has_gradient in reversed(layer.movements):
                yield from movement.operations(worker, adjoint=True) if has_gradient else ()
        elif layer.has_gradient or layer.uses_params:
            yield from communicated(layer.trace(worker).backward(layer.has_gradient), worker)


def forward_operations(chain: Chain, worker: int, once: bool = False) -> Iterator[Operation]:
    """Yield what a worker communicates forward, in order; `once`: not again what a loop moves again and again."""
    for layer in nodes_in(chain):
        if isinstance(layer, CountedLayer):
            yield from communicated(layer.trace(worker).forward, worker, once)
        else:
            yield from (op for movement, _ in layer.movements for op in movement.operations(worker))


def communicated(communication: Communication, worker: int, once: bool = False) -> Iterator[Operation]:
    seen = set()
    for each in communication:
        if isinstance(each, Mark):
            yield from () if id(each.plan) in seen else each.plan.operations(worker, adjoint=each.adjoint)
            seen |= {id(each.plan)} if once else set()
        else:
            yield without_team(each)


def param_blocks(network: Any, size: int) -> dict[int, Any]:
    """Return the shapes and dtypes of all workers' parameters, of float32."""

    def on(worker: int) -> Any:
        return jax.tree.map(
            lambda spec: dj.ShapeDtype(spec.shape_on(worker), FLOAT32), network.param_specs(), is_leaf=is_spec
        )

    return {worker: on(worker) for worker in range(size)}


def dtype_of_input(network: Any) -> np.dtype:
    """Return the dtype of a network's input: of indices where it takes them."""
    return np.dtype(np.int32 if network.takes_indices else np.float32)


def blocks(spec: dj.TensorSpec, dtype: np.dtype) -> dict[int, dj.ShapeDtype]:
    return {worker: dj.ShapeDtype(spec.shape_on(worker), dtype) for worker in range(spec.partition.world.size)}


def without_team(operation: Operation) -> Operation:
    """Return the operation; a message's team, all workers, is not in plans."""
    return replace(operation, team=()) if operation.is_message else operation
