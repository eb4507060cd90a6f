"""The work in a layer, from its traced program: one trace for each class of workers with blocks of equal shapes.

In a recording world, a movement leaves a mark, whose plan determines the communication of every worker. So one worker's
program determines the messages of all with the same program: those with the same shapes of x, y, parameters, and of the
inputs and outputs of movements.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive

from distdl_jax.functional.mark import Mark
from distdl_jax.functional.plan import MovementPlan, Plan, ShapeDtypes
from distdl_jax.kernels.convolution import as_operations
from distdl_jax.nn.base.layer import Layer, ParameterFreeLayer, PartitionedLayer, apply_layer, describe
from distdl_jax.nn.networks.remat_precision import Wrapper
from distdl_jax.nn.shape.data_movement import _Primitive
from distdl_jax.nn.spectral.fno import DistributedFNOBlock, FNOBlockPlan
from distdl_jax.partitions.planning import RecordingWorld
from distdl_jax.partitions.spec_trees import is_spec
from distdl_jax.plans.alike import ByClass, representatives
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tools.cost.classes import codes, same
from distdl_jax.tools.cost.program import Program, ProgramStep, Value, marks_in
from distdl_jax.transforms.block_functions import BlockFunction
from distdl_jax.transports.threads.current_world import original_world, simulated_world
from distdl_jax.transports.world import World
from distdl_jax.watchdog.programs.ir import Operation

Communication = tuple[Mark | Operation, ...]
"""Movements of all workers; or, for a worker traced with all others, its own operations."""


class Stored(NamedTuple):
    """What is stored from the forward to the backward pass of y = f(x), besides parameters.

    - `x`, `y`: whether these two are. - `others`: bytes of other arrays.
    """

    x: bool = False
    y: bool = False
    others: int = 0


class Trace(NamedTuple):
    """The work of a worker in a layer.

    - `flops`, `flops_x`, `flops_params`: multiplications and additions of the forward pass, and of the gradients of x
      and of the parameters, as XLA counts them.
    - `written`: bytes of the result; 0 of a movement.
    - `stored`: what is stored for the backward pass.
    - `forward`: the communication in the forward pass, in order.
    - `of_params`, `of_both`: the same for the gradient of the parameters, and for those of both x and parameters.
    """

    flops: int = 0
    flops_x: int = 0
    flops_params: int = 0
    written: int = 0
    stored: Stored = Stored()
    forward: Communication = ()
    of_params: Communication = ()
    of_both: Communication = ()

    def backward(self, of_x: bool) -> Communication:
        """Return the communication for the gradients, with that of x or only of the parameters."""
        return self.of_both if of_x else self.of_params


class TracedClass(NamedTuple):
    """Equivalent workers, by world rank."""

    workers: np.ndarray
    trace: Trace


class NotRecorded(Exception):
    """One worker's program of a layer does not determine the others'."""


def traced_classes(layer: Any, plan: Plan, x: ShapeDtypes, world: World, dtype: np.dtype) -> tuple[TracedClass, ...]:
    """Return the work of all workers in a layer on blocks like `x`, by class; raises `NotRecorded`.

    `dtype` is the parameters' dtype.
    """
    if isinstance(layer, Wrapper):  # JAX's recomputation for gradients shows only in the whole program
        raise NotRecorded
    if isinstance(plan, MovementPlan):
        mark = Mark(plan, False)
        trace = Trace(forward=(mark,), of_both=(mark._replace(adjoint=True),))
        return (TracedClass(np.arange(world.size), trace),)
    try:
        key = (layer, _fingerprint(x), world, dtype)
        hash(key)
    except TypeError:
        return _classes(layer, plan, x, world, dtype)
    if key not in _known:
        if len(_known) >= 1024:
            del _known[next(iter(_known))]
        _known[key] = _classes(layer, plan, x, world, dtype)
    return _known[key]


_known: dict[Hashable, tuple[TracedClass, ...]] = {}


def _classes(layer: Any, plan: Plan, x: ShapeDtypes, world: World, dtype: np.dtype) -> tuple[TracedClass, ...]:
    tracer = _Tracer(layer, plan, x, world, dtype)
    y = plan.after(x)
    specs = jax.tree.leaves(layer.param_specs(), is_leaf=is_spec) if isinstance(layer, Layer) else []
    numbers = codes([x, y, *(spec.block_shapes for spec in specs)], np.zeros(world.size, np.int64))
    movements: dict[int, Any] = {}
    traces: dict[int, Trace] = {}  # by the first worker of a class
    while True:
        firsts = np.unique(numbers, return_index=True)[1].tolist()
        for worker in firsts:
            if worker not in traces:
                traces[worker] = tracer.trace(worker, y[worker])
        marks = (mark for trace in traces.values() for mark in (*trace.forward, *trace.of_both))
        found = {id(mark.plan): mark.plan for mark in marks if isinstance(mark, Mark)}
        new = [movement for number, movement in found.items() if number not in movements]
        if not new:
            break
        movements |= found
        numbers = codes([blocks for each in new for blocks in (each.inputs, each.outputs)], numbers)
    of_classes = same(numbers)
    for movement in movements.values():
        _check_is_whole(movement, of_classes, traces)
    return tuple(TracedClass(workers, traces[int(workers[0])]) for workers in of_classes)


def _check_is_whole(movement: MovementPlan, of_classes: Sequence[np.ndarray], traces: Mapping[int, Trace]) -> None:
    """Reject a movement that is planned for only some of its participants."""
    taking_part = np.asarray(movement.workers)
    for workers in of_classes:
        marks = (each for each in traces[int(workers[0])].forward if isinstance(each, Mark))
        if any(mark.plan is movement for mark in marks) and not np.isin(workers, taking_part).all():
            raise NotRecorded


def _fingerprint(values: Mapping[int, Any]) -> Hashable:
    """Return a key that distinguishes mappings."""
    if not isinstance(values, ByClass):
        return tuple(values.items())
    return values.classes, tuple(values[worker] for worker in representatives(values))


class _Tracer:
    """Traces a layer on one worker after another."""

    def __init__(self, layer: Any, plan: Plan, x: ShapeDtypes, world: World, dtype: np.dtype) -> None:
        self.layer, self.x, self.dtype = layer, x, dtype
        self.plan: Any = plan
        # A primitive as a layer is its plan.
        self.runs_plan = isinstance(layer, _Primitive) and hasattr(plan, "run")
        self.world = original_world(world)
        self.known: dict[str, list[tuple[Any, Any, Any]]] = {}
        for part, *agreement in _agreements(layer, plan, x, dtype):
            self.known.setdefault(describe(part), []).append(tuple(agreement))
        self.specs = layer.param_specs() if isinstance(layer, Layer) else {}

    def trace(self, worker: int, y: ShapeDtype) -> Trace:
        """Return the work of a worker whose output is like `y`."""
        if worker not in self.plan.workers:
            return Trace()
        world = recording_world(worker, self.world)
        world.agreements = {label: list(several) for label, several in self.known.items()}
        dtype = self.dtype
        params = jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape_on(worker), dtype), self.specs, is_leaf=is_spec
        )
        block = jax.ShapeDtypeStruct(self.x[worker].shape, self.x[worker].dtype)
        token = as_operations.set(True)
        try:
            with simulated_world(world):
                return self._traced(params, block)
        finally:
            as_operations.reset(token)

    def _traced(self, params: Any, x: jax.ShapeDtypeStruct) -> Trace:
        of_x = bool(jnp.issubdtype(x.dtype, jnp.inexact))
        both = _Gradients.of(self._apply, params, x, of_x)
        alone = both if both.of_params else None
        if alone is not None and of_x and any(map(_is_loop, both.backward.steps)):  # a loop belongs to both
            alone = _Gradients.of(self._apply, params, x, False)
        flops = both.forward.flops
        flops_params = 0 if alone is None else alone.flops_of_params - flops
        of_params = [] if alone is None else alone.backward.needed_for(alone.of_params).marks
        flops_x = both.flops - flops - flops_params if of_x else 0
        marks = _of_params(both), of_params, both.backward.marks
        return Trace(
            flops,
            flops_x,
            flops_params,
            bytes_of(both.y),
            _stored(both),
            *map(tuple, marks),
        )

    def _apply(self, params: Any, x: Array) -> Any:
        match self.layer:
            case BlockFunction(fun=fun, P=P):
                return fun(x) if P.active else x
            case ParameterFreeLayer() if self.runs_plan:
                return self.plan.run(self.layer.P_x.world, x)
            case Layer():
                return apply_layer(self.layer, params, x, None, True, jax.random.key(0))[0]
        return self.layer(x)


class _Gradients(NamedTuple):
    """The program of a layer and its gradients.

    - `whole`: all of it. - `before`, `backward`: its steps up to the forward pass's last one, and after that.
    - `y`, `of_params`, `of_x`: its results. - `params`, `x`: its arguments.
    """

    whole: Program
    before: Program
    backward: Program
    y: Value | None
    of_params: list[Value | None]
    of_x: Value | None
    params: list[Value]
    x: Value

    @property
    def forward(self) -> Program:
        """The steps that make y."""
        return self.before.needed_for((self.y,))

    @property
    def flops(self) -> int:
        """The flops of all needed steps."""
        return self.whole.needed_for((self.y, *self.of_params, self.of_x)).flops

    @property
    def flops_of_params(self) -> int:
        """The flops of the steps that compute y and the parameters' gradients."""
        return self.whole.needed_for((self.y, *self.of_params)).flops

    @classmethod
    def of(cls, apply: Callable[[Any, Array], Any], params: Any, x: jax.ShapeDtypeStruct, of_x: bool) -> _Gradients:
        leaves = jax.tree.leaves(params)
        differs = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
        structure = jax.tree.structure(params)

        def gradients(leaves: list[Array], x: Array) -> Any:
            inexact = [leaf for leaf, has in zip(leaves, differs, strict=True) if has]

            def of(inexact: list[Array], *of_x: Array) -> Any:
                own = iter(inexact)
                all_leaves = [next(own) if has else leaf for leaf, has in zip(leaves, differs, strict=True)]
                return apply(jax.tree.unflatten(structure, all_leaves), of_x[0] if of_x else x)

            y, back = jax.vjp(of, inexact, *((x,) if of_x else ()))
            dy = _start.bind(y)
            found = back(dy) if jnp.issubdtype(y.dtype, jnp.inexact) else ([],)
            return y, dy, found[0], found[1:]

        closed, shapes = jax.make_jaxpr(gradients, return_shape=True)(leaves, x)
        whole = Program.of(closed.jaxpr)
        y, _, *rest = whole.results
        n = len(shapes[2])
        at = next(i for i, step in enumerate(whole.steps) if step.eqn.primitive is _start)
        before = Program(whole.args, whole.steps[:at], (y,))
        backward = Program((), whole.steps[at + 1 :], tuple(rest))
        of_block = rest[n] if shapes[3] else None
        return cls(whole, before, backward, y, rest[:n], of_block, list(whole.args[:-1]), whole.args[-1])


def _is_loop(step: ProgramStep) -> bool:
    return step.name in ("scan", "while", "cond")


def _start_result(y: Any) -> Any:
    return y


_start = Primitive("cotangent")
_start.def_abstract_eval(_start_result)


@lru_cache(maxsize=4096)
def recording_world(worker: int, world: World) -> RecordingWorld:
    """Return the world of a worker, the same object each time, since JAX caches traced functions by it."""
    return RecordingWorld(worker, world)


def _agreements(layer: Any, plan: Plan, x: ShapeDtypes, dtype: np.dtype) -> Iterator[tuple[Any, Any, Any, Plan]]:
    """Yield the layers within a layer that agree while traced: with all workers' inputs, parameters, and plan."""
    parts: list[tuple[Any, Plan, ShapeDtypes]] = []
    match layer, plan:
        case DistributedFNOBlock(), FNOBlockPlan():
            of_parts = (plan.spectral, plan.pointwise)
            parts = [(part, of_part, x) for part, of_part in zip(layer._layers.values(), of_parts, strict=True)]
        case PartitionedLayer(), _:
            yield layer, x, layer._param_shapes(dtype), plan
    for each in parts:
        yield from _agreements(*each, dtype)


def bytes_of(*values: Value | None) -> int:
    """Return the bytes of arrays."""
    return sum(value.nbytes for value in values if value is not None)


def _of_params(both: _Gradients) -> list[Mark]:
    """Return the movements of the forward pass, marking those of parameters only."""
    of_x, found = {both.x}, []
    for step in both.before.steps:
        args = step.args[:1] if step.name == "tie" else step.args
        if depends := not of_x.isdisjoint(args):
            of_x.update(step.results)
        found += [mark._replace(of_params=not depends) for mark in marks_in(step.eqn)]
    return found


COMPUTED_AGAIN = {
    *("abs", "add", "and", "ceil", "clamp", "convert_element_type", "copy", "eq", "floor", "ge", "gt", "integer_pow"),
    *("is_finite", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "round", "select_n", "sign", "square"),
    *("stop_gradient", "sub", "xor", "broadcast_in_dim", "expand_dims", "iota", "reshape", "rev", "slice", "squeeze"),
    *("transpose", "one_minus_square"),
}
"""JAX's operations whose results XLA recomputes for each use; a power with an integer exponent is a product."""

_PASSED = {"tie", "passed_to_layer", "tangent_of_a_parameter", "optimization_barrier", "layout_constraint"}
"""Operations whose results are their arguments."""


def _stored(both: _Gradients) -> Stored:
    """Return what is stored for the gradients. XLA recomputes cheap values, so their inputs are stored instead."""
    nothing: frozenset[Value] = frozenset()
    sources = {value: frozenset({value}) for value in both.whole.args}
    for step in both.before.steps:
        args = [sources[value] for value in step.args]
        if args and (step.name in _PASSED or step.is_passed):
            sources |= dict(zip(step.results, args, strict=False))
        elif step.name in COMPUTED_AGAIN:
            sources |= {y: nothing.union(*args) for y in step.results}
        else:
            sources |= {y: frozenset({y}) for y in step.results}
    read = {value for step in both.backward.steps for value in step.args if value in sources}
    kept = nothing.union(*(sources[value] for value in read)) - set(both.params)
    of_y = nothing if both.y is None else sources.get(both.y, nothing) - set(both.params)
    is_own = len(of_y) == 1 and both.x not in of_y and bytes_of(*of_y) == bytes_of(both.y)
    stores_y = is_own and of_y <= kept
    others = kept - {both.x} - (of_y if stores_y else nothing)
    return Stored(both.x in kept, stores_y, bytes_of(*others))
