"""The memory of one worker's training step, by XLA: the step is compiled for it alone, and nothing runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.nn.base.layer import Layer, apply_layer
from distdl_jax.partitions.partition import Partition
from distdl_jax.tools.cost.traced import MOST_WORKERS
from distdl_jax.tracing.world import World
from distdl_jax.transforms.gradients import value_and_grad
from distdl_jax.transports.threads.workers import on_stand_ins


@dataclass(frozen=True)
class CompiledMemory:
    """The bytes of the arrays of one worker's compiled step, as XLA assigns them.

    - `worker`: its world rank.
    - `arguments`: parameters, what the optimiser stores, and the block of the input.
    - `results`: what comes out in memory of its own: the loss, and what isn't donated.
    - `temporaries`: activations, gradients, messages, and what an operation needs beside its operands.
    """

    worker: int
    arguments: int
    results: int
    temporaries: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.arguments + self.results + self.temporaries


def compile_step(
    network: Layer, x: ShapeDtypes, world: World, worker: int, dtype: np.dtype, copies: int, backward: bool
) -> CompiledMemory:
    """Compile the step of `worker`, with blocks like `x`; `copies`: the numbers that the optimiser stores for each
    parameter, whose arrays and the parameters are donated.

    All workers trace their steps, in threads, since they agree on plans. Messages are calls of the same shapes.
    """
    if world.size > MOST_WORKERS:
        raise InvalidArgumentError(f"`compiled` (=True) must be False on more than {MOST_WORKERS} workers.")

    def on_worker(rank: int) -> CompiledMemory | None:
        params = jax.eval_shape(lambda: network.init(jax.random.key(0), dtype))
        block = jax.ShapeDtypeStruct(x[rank].shape, x[rank].dtype)
        if backward:
            args = (params, [params] * copies, block)
            lowered = jax.jit(_step(network), donate_argnums=(0, 1)).lower(*args)
        else:
            lowered = jax.jit(lambda params, x: _apply(network, params, x)).lower(params, block)
        if rank != worker:
            return None
        sizes: Any = lowered.compile().memory_analysis()
        results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        return CompiledMemory(rank, sizes.argument_size_in_bytes, results, sizes.temp_size_in_bytes)

    found: CompiledMemory = on_stand_ins(world, on_worker)[worker]
    return found


def _apply(network: Layer, params: Any, x: Array) -> Array:
    return apply_layer(network, params, x, None, True, jax.random.key(0))[0]


def _step(network: Layer) -> Any:
    """Return a step: the value and the gradient of a loss, and an update that reads and writes all that is stored."""

    def loss(params: Any, x: Array) -> Array:
        y = _apply(network, params, x)
        return jnp.sum((y * y.conj()).real)

    def step(params: Any, stored: list[Any], x: Array) -> tuple[Array, Any, list[Any]]:
        value, gradient = value_and_grad(loss, partition=Partition())(params, x)
        stored = [jax.tree.map(partial(_mean, power), tree, gradient) for power, tree in enumerate(stored, start=1)]
        moved = jax.tree.map(lambda g, *means: sum(means, g), gradient, *stored)
        return value, jax.tree.map(lambda p, m: (p - 1e-3 * m).astype(p.dtype), params, moved), stored

    return step


def _mean(power: int, mean: Array, gradient: Array) -> Array:
    """Return the running mean of a power of the gradient."""
    return (0.9 * mean + 0.1 * gradient**power).astype(mean.dtype)
