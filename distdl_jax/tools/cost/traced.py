"""The work in a layer for which one worker's program does not determine the others': it is traced on all of them.

This includes users' layers in which a movement depends on shapes computed by other workers. Nothing runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal

from distdl_jax.errors import PlanError
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.kernels.convolution import as_operations
from distdl_jax.nn.base.layer import apply_layer
from distdl_jax.partitions.partition import Partition
from distdl_jax.tools.cost.program import flops_in
from distdl_jax.tools.cost.traces import Stored, Trace, TracedClass
from distdl_jax.tracing.program_reader import read_program
from distdl_jax.transforms.gradients import grad
from distdl_jax.transports.threads.workers import on_stand_ins
from distdl_jax.transports.world import World
from distdl_jax.watchdog.programs.ir import Operation, operations

MOST_WORKERS = 256
"""The maximum number of workers on which layers are traced. Each takes a thread, and some milliseconds per layer."""


def traced_by_all(layer: Any, x: ShapeDtypes, world: World, dtype: np.dtype) -> tuple[TracedClass, ...]:
    """Return the work of each worker in `layer`, on blocks like `x`; `dtype` is the parameters' dtype."""
    if world.size > MOST_WORKERS:
        raise PlanError(
            f"{type(layer).__name__} can't be counted by the program of one worker, so it is traced on all of them: at "
            f"most {MOST_WORKERS}, but there are {world.size}."
        )

    def on_worker(worker: int) -> Trace:
        as_operations.set(True)
        block = x[worker]
        return _WorkerTracer(layer, jax.ShapeDtypeStruct(block.shape, block.dtype), dtype).trace()

    return tuple(TracedClass(np.array([w]), trace) for w, trace in enumerate(on_stand_ins(world, on_worker)))


class _WorkerTracer:
    """One worker's programs of a layer, on the thread that represents it; its block is like `x`.

    - `dtype`: of the parameters.
    """

    def __init__(self, layer: Any, x: jax.ShapeDtypeStruct, dtype: np.dtype) -> None:
        self.layer, self.x = layer, x
        self.params = jax.eval_shape(lambda: layer.init(jax.random.key(0), dtype))
        self.workers = Partition()

    def trace(self) -> Trace:
        """Return the work of the worker."""
        forward = jax.make_jaxpr(self._apply)(self.params, self.x)
        (y,) = forward.out_avals
        flops, sent = flops_in(forward.jaxpr), self._operations(forward.jaxpr)
        of_x = bool(jnp.issubdtype(self.x.dtype, jnp.inexact))
        argnums = (0,) * bool(jax.tree.leaves(self.params))
        alone = self._backward(argnums, y) if argnums else None
        both = self._backward((*argnums, 1), y) if of_x else alone
        more = [0 if it is None else max(flops_in(it) - flops - 3 * y.size, 0) for it in (alone, both)]
        of_params, of_both = (() if it is None else self._operations(it)[len(sent) :] for it in (alone, both))
        numbers = flops, max(more[1] - more[0], 0), more[0], _nbytes(y)
        return Trace(*numbers, self._stored(), tuple(sent), tuple(of_params), tuple(of_both))

    def _apply(self, params: Any, x: Array) -> Array:
        return apply_layer(self.layer, params, x, None, True, jax.random.key(0))[0]

    def _backward(self, argnums: tuple[int, ...], y: Any) -> Any:
        """Return the program of the gradient with respect to some of (params, x), which includes the forward pass."""

        def loss(params: Any, x: Array, dy: Array) -> Array:
            return jnp.sum((self._apply(params, x) * dy).real)

        gradient = grad(loss, argnums, partition=self.workers)
        return jax.make_jaxpr(gradient)(self.params, self.x, jax.ShapeDtypeStruct(y.shape, y.dtype)).jaxpr

    def _operations(self, jaxpr: Any) -> list[Operation]:
        """Return the operations of a program; a loop of unknown length counts as one pass."""
        found = operations(read_program(self.workers.world.transport, jaxpr))
        return [op for op, times in found for _ in range(times or 1)]

    def _stored(self) -> Stored:
        """Return what is stored for the backward pass."""

        def residuals(params: Any, x: Array) -> Sequence[Any]:
            y, vjp = jax.vjp(self._apply, params, x)
            return [y, *(leaf for leaf in jax.tree.leaves(vjp) if hasattr(leaf, "shape"))]

        jaxpr = jax.make_jaxpr(residuals)(self.params, self.x).jaxpr
        *of_params, of_x = jaxpr.invars
        of_y, *others = jaxpr.outvars
        stored = {var for var in others if not isinstance(var, Literal)}
        rest: Any = stored - {of_x, of_y, *of_params}
        return Stored(of_x in stored, of_y in stored, sum(_nbytes(var.aval) for var in rest))


def _nbytes(aval: Any) -> int:
    return int(math.prod(aval.shape) * aval.dtype.itemsize)
