"""What workers do in a layer whose plan does not say so: the layer is traced on all of them, and nothing runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal

from distdl_jax.autodiff.gradients import grad
from distdl_jax.errors import PlanError
from distdl_jax.layer.layer import Layer, apply_layer
from distdl_jax.nn.remat_precision import Remat, Wrapper
from distdl_jax.nn.residual import Residual, ResidualPlan
from distdl_jax.nn.sequential import Sequential, SequentialPlan
from distdl_jax.partition import Partition
from distdl_jax.plans.work import Work
from distdl_jax.primitives.plan import Action, BlocksPlan, Computes, Plan, ShapeDtypes, Traced
from distdl_jax.programs.ir import Operation, operations
from distdl_jax.tools.cost.flops import arithmetic
from distdl_jax.tracing.program_reader import read_program
from distdl_jax.transports.threads.stand_ins import on_stand_ins
from distdl_jax.world import World

MOST_WORKERS = 256
"""On how many workers layers are traced. Each takes a thread, and some milliseconds a layer."""

Does = tuple[Operation | Work, ...]


def completed(layer: Any, plan: Plan, x: ShapeDtypes, world: World, dtype: np.dtype) -> Plan:
    """Return the plan of `layer` on blocks like `x`, in which all parts say their actions.

    Those of layers whose plans don't are made by tracing. `dtype` is that of parameters.
    """
    match layer, plan:
        case Sequential(), SequentialPlan():
            plans = []
            for part, of_part in zip(layer, plan.plans, strict=True):
                plans.append(completed(part, of_part, x, world, dtype))
                x = of_part.after(x)
            return replace(plan, plans=tuple(plans))
        case Residual(), ResidualPlan():
            body = completed(layer.body, plan.body, x, world, dtype)
            if plan.shortcut is None:
                return replace(plan, body=body)
            return replace(plan, body=body, shortcut=completed(layer.shortcut, plan.shortcut, x, world, dtype))
    if isinstance(layer, Wrapper):
        inner = completed(layer.layer, plan, x, world, dtype)
        return TracedPlan(plan.outputs, layer, x, world, dtype, inner)
    # A layer of a user's own may take another network's plan for the shapes of its output, not for what it does.
    borrowed = isinstance(plan, SequentialPlan | ResidualPlan) and not isinstance(layer, Sequential | Residual)
    if isinstance(layer, Layer) and (borrowed or type(plan).actions is Plan.actions):
        return TracedPlan(plan.outputs, layer, x, world, dtype)
    return plan


@dataclass(frozen=True)
class TracedPlan(BlocksPlan):
    """The plan of a layer that is traced, once its actions are asked for.

    - `inner`: of a wrapper the plan of the layer in it, which knows its arithmetic better than a traced program.
    """

    layer: Layer
    inputs: ShapeDtypes = field(hash=False)
    world: World
    dtype: np.dtype
    inner: Plan | None = None

    @property
    def actions(self) -> tuple[Action, ...]:
        if self.world.size > MOST_WORKERS:
            raise PlanError(
                f"The plan of {type(self.layer).__name__} does not say what its workers do, and on {self.world.size} "
                f"workers, more than {MOST_WORKERS}, it is not traced: give the plan a property `actions`, a tuple of "
                "`Moves` and `Computes` (docs/own-layers.md)."
            )
        forward, backward = cache(self._forward), cache(self._backward)
        return (
            Traced(
                lambda worker: forward()[worker],
                lambda worker, of_x: backward(of_x)[worker],
                uses_params=bool(jax.tree.leaves(self.layer.param_specs())),
            ),
        )

    def _forward(self) -> list[Does]:
        return self._traced(lambda trace: trace.forward())

    def _backward(self, of_x: bool) -> list[Does]:
        return self._traced(lambda trace: trace.gradients(of_x))

    def _traced(self, part: Callable[[_Trace], Does]) -> list[Does]:
        """Return what each worker does in a part of the step."""

        def on_worker(worker: int) -> Does:
            block = self.inputs[worker]
            work, *ops = part(_Trace(self.layer, jax.ShapeDtypeStruct(block.shape, block.dtype), self.dtype))
            assert isinstance(work, Work)
            return (self._of_inner(worker, work), *ops)

        return on_stand_ins(self.world, on_worker)

    def _of_inner(self, worker: int, traced: Work) -> Work:
        """Return a wrapper's arithmetic by the plan of the layer in it, with what it saves as traced."""
        if self.inner is None or any(isinstance(action, Traced) for action in self.inner.actions):
            return traced
        works = [mine for each in self.inner.actions if isinstance(each, Computes) and (mine := each.work(worker))]
        names = ("flops", "flops_x", "flops_params", "read", "written")
        total = {name: sum(getattr(work, name) for work in works) for name in names}
        if isinstance(self.layer, Remat):
            total["flops_x"] += total["flops"]  # recomputed in the backward pass
        return replace(traced, **total)


class _Trace:
    """One worker's programs of a layer: on the thread that stands for it, whose block is like `x`.

    - `dtype`: of the parameters.
    """

    def __init__(self, layer: Layer, x: jax.ShapeDtypeStruct, dtype: np.dtype) -> None:
        self.layer, self.x = layer, x
        self.params = jax.eval_shape(lambda: layer.init(jax.random.key(0), dtype))
        self.workers = Partition()

    def forward(self) -> Does:
        """Return the arithmetic and the operations of the forward pass, and what is stored for the backward one."""
        jaxpr = jax.make_jaxpr(self._apply)(self.params, self.x).jaxpr
        saves_x, saves_y, saved = self._saved()
        work = replace(arithmetic(jaxpr), saves_x=saves_x, saves_y=saves_y, saved=saved)
        return (work, *self._operations(jaxpr))

    def gradients(self, of_x: bool) -> Does:
        """Return the same of the gradients: of the parameters, and of x too if `of_x`."""
        forward = jax.make_jaxpr(self._apply)(self.params, self.x)
        (y,) = forward.out_avals
        work, passed = arithmetic(forward.jaxpr), len(self._operations(forward.jaxpr))
        argnums = (0,) * bool(jax.tree.leaves(self.params))
        if of_x and jnp.issubdtype(self.x.dtype, jnp.inexact):
            for_params = self._backward(argnums, y) if argnums else None
            both = self._backward((*argnums, 1), y)
        elif argnums:
            for_params = both = self._backward(argnums, y)
        else:
            return (replace(work, flops_x=0, flops_params=0),)
        flops_params, flops = (
            0 if jaxpr is None else max(arithmetic(jaxpr).flops - work.flops - 3 * y.size, 0)
            for jaxpr in (for_params, both)
        )
        work = replace(work, flops_x=max(flops - flops_params, 0), flops_params=flops_params)
        return (work, *self._operations(both)[passed:])

    def _apply(self, params: Any, x: Array) -> Array:
        return apply_layer(self.layer, params, x, None, True, jax.random.key(0))[0]

    def _backward(self, argnums: tuple[int, ...], y: Any) -> Any:
        """Return the program of the gradient with respect to some of (params, x), which begins with the forward one."""

        def loss(params: Any, x: Array, dy: Array) -> Array:
            return jnp.sum((self._apply(params, x) * dy).real)

        gradient = grad(loss, argnums, partition=self.workers)
        return jax.make_jaxpr(gradient)(self.params, self.x, jax.ShapeDtypeStruct(y.shape, y.dtype)).jaxpr

    def _operations(self, jaxpr: Any) -> list[Operation]:
        """Return the operations of a program; a loop of unknown length counts as one pass."""
        found = operations(read_program(self.workers.world.transport, jaxpr))
        # A message's team, all workers, is not in plans.
        each = [(replace(op, team=()) if op.is_message else op, times or 1) for op, times in found]
        return [op for op, times in each for _ in range(times)]

    def _saved(self) -> tuple[bool, bool, int]:
        """Return whether x and y are stored for the backward pass, and the bytes beside them and the parameters."""

        def residuals(params: Any, x: Array) -> Sequence[Any]:
            y, vjp = jax.vjp(self._apply, params, x)
            return [y, *(leaf for leaf in jax.tree.leaves(vjp) if hasattr(leaf, "shape"))]

        jaxpr = jax.make_jaxpr(residuals)(self.params, self.x).jaxpr
        *of_params, of_x = jaxpr.invars
        of_y, *others = jaxpr.outvars
        stored = {var for var in others if not isinstance(var, Literal)}
        rest: Any = stored - {of_x, of_y, *of_params}
        return of_x in stored, of_y in stored, sum(math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in rest)
