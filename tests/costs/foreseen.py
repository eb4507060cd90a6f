"""What plans say that workers communicate in a training step, compared with what their programs do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import distdl_jax as dj
from distdl_jax.programs.ir import Operation, operations
from distdl_jax.spec_trees import is_spec
from distdl_jax.tools.cost.events import step_events

Network = tuple[Any, dj.TensorSpec]
"""A network, and the spec of its input."""

Build = Callable[[dj.Partition], Network]
"""Makes a network on the workers of a partition."""


def check_foreseen(build: Build, size: int = 4) -> None:
    """Check that plans foresee the operations of `size` workers, in order, with partners, tags, lengths and dtypes."""

    def program() -> dict[int, Any]:
        network, spec = build(dj.Partition())
        dtype = dtype_of_input(network)
        params = jax.tree.map(
            lambda spec: np.zeros(spec.local_shape, np.float32), network.param_specs(), is_leaf=is_spec
        )
        x = np.zeros(spec.local_shape, dtype) if spec.box else dj.zero_volume_tensor(spec.global_shape[0], dtype=dtype)
        options = {"key": jax.random.key(0)} if network.draws else {}
        step = dj.value_and_grad(lambda params, x: jnp.sum(network(params, x, **options) ** 2))
        return dict(dj.check(step, params, x).programs)

    programs = dj.simulate(size, program)[0]
    network, spec = build(dj.planning_world(size))
    actions = network.plan(blocks(spec, dtype_of_input(network))).actions
    cost = dj.cost(network, spec)
    for worker, found in programs.items():
        real = [without_team(operation) for operation, times in operations(found) for _ in range(times or 0)]
        foreseen = [event.does for event in step_events(actions, worker) if isinstance(event.does, Operation)]
        assert foreseen == real[:-1]
        assert (real[-1].kind, real[-1].count) == ("allreduce", 1)  # the sum of the loss's parts
        sent = [operation for operation in real if operation.is_message and operation.dest is not None]
        assert cost.messages[worker] == len(sent)
        assert cost.bytes[worker] == sum(operation.bytes_sent for operation in real[:-1])


def dtype_of_input(network: Any) -> np.dtype:
    """Return the dtype of a network's input: of indices where it takes them."""
    return np.dtype(np.int32 if network.takes_indices else np.float32)


def blocks(spec: dj.TensorSpec, dtype: np.dtype) -> dict[int, dj.ShapeDtype]:
    """Return the shapes and dtypes of all workers' blocks."""
    return {worker: dj.ShapeDtype(spec.shape_on(worker), dtype) for worker in range(spec.partition.world.size)}


def without_team(operation: Operation) -> Operation:
    """Return the operation; a message's team, all workers, is not in plans."""
    return replace(operation, team=()) if operation.is_message else operation
