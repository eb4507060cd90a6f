"""What a training step of a network costs, foreseen: `cost`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from distdl_jax.costs.amounts import Amounts, alike
from distdl_jax.costs.as_json import to_json
from distdl_jax.costs.compiled_step import CompiledMemory, compile_step
from distdl_jax.costs.counting import count_action, groups
from distdl_jax.costs.layer_cost import LayerCost
from distdl_jax.costs.layers import PlacedLayer, placed_layers
from distdl_jax.costs.links import MachineLinks
from distdl_jax.costs.memory import WorkerMemory, worker_memory
from distdl_jax.costs.picture import draw
from distdl_jax.costs.seconds import Update, step_timing
from distdl_jax.costs.table import table
from distdl_jax.costs.times import Interval, Times
from distdl_jax.costs.traced import completed
from distdl_jax.drawing.drawing import Drawing
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.layer.layer import Layer
from distdl_jax.machine.machine import Machine, load
from distdl_jax.plans.alike import ByClass, derived, on_grids
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.worker_ranks import worker_ranks
from distdl_jax.primitives.plan import Action, Plan, ShapeDtypes
from distdl_jax.spec_trees import is_spec
from distdl_jax.tensors import TensorSpec, check_spec
from distdl_jax.validation import checked_boolean

OPTIMISERS = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "lion": 1, "adam": 2, "adamw": 2}
"""How many numbers an optimiser stores for each parameter."""


@dataclass(frozen=True)
class Cost:
    """What a training step of a network costs each worker.

    - `layers`: layer by layer, in order.
    - `workers`: all layers together: arrays with an entry for each worker, by world rank.
    - `seconds`: of a step on the machine, as an `Interval`: `low`, `mean`, `high`, and `reasons` why not known better.
    - `once`: the times of what is done once a step: the call, and the sum of the loss over all workers.

    - `compiled`: the memory of the fullest worker by XLA, where it was asked for.

    `seconds` and `once` are None without a machine.
    """

    layers: tuple[LayerCost, ...]
    workers: Amounts
    seconds: Interval | None = None
    once: Times | None = None
    compiled: CompiledMemory | None = None
    _plan: Plan | None = field(default=None, repr=False, compare=False)
    _x: ShapeDtypes = field(default_factory=dict, repr=False, compare=False)
    _backward: bool = True

    @property
    def flops(self) -> np.ndarray:
        """The multiplications and additions of each worker."""
        return self.workers.flops

    @property
    def messages(self) -> np.ndarray:
        """The number of messages that each worker sends."""
        return self.workers.messages

    @property
    def bytes(self) -> np.ndarray:
        """The bytes that each worker sends in messages, and hands to collective operations."""
        return self.workers.bytes

    @property
    def memory(self) -> np.ndarray:
        """The bytes that each worker needs at the fullest time of a step.

        The step is one jitted function of the parameters and what the optimiser stores, both donated, and of the input:
        value and gradient of a loss, and the optimiser's update. Where they aren't donated, the new ones come on top.
        The bytes are those of XLA's arrays on a CPU; MPI, Python and compiled programs are not among them.

        Raises `PlanError` where a layer does not say what it stores for the backward pass.
        """
        unknown = {place for each, _ in self._memory for place in each.unknown}
        if unknown:
            shown = ", ".join(
                f"`layers[{layer.place}]` ({layer.name})" for layer in self.layers if layer.place in unknown
            )
            raise PlanError(
                f"The memory can't be foreseen by formula: {shown} does not say what the backward pass reads. Ask for "
                "`compiled=True`, or give `saved` to each `Work` of its plan's `actions` (docs/own-layers.md)."
            )
        return self._most_live

    @property
    def fullest(self) -> int:
        """The world rank of the worker that needs most memory, the first one of several."""
        return int(np.argmax(self._most_live))

    @property
    def activations(self) -> dict[str, np.ndarray]:
        """The bytes that each worker stores from the forward to the backward pass, by the place of a layer.

        Each array counts once, at the first layer that reads it again; the network's input doesn't count.
        """
        found = {layer.place: np.zeros(len(self._x), np.int64) for layer in self.layers}
        for memory, workers in self._memory:
            for place, nbytes in memory.activations.items() if self._backward else ():
                found[place][workers] = nbytes
        return found

    @cached_property
    def _memory(self) -> list[tuple[WorkerMemory, np.ndarray]]:
        """The memory of each kind of workers: those that store, compute and send equally much in each layer."""
        assert self._plan is not None
        found = []
        for workers in alike([layer.amounts for layer in self.layers]):
            worker = int(workers[0])
            gradients = {layer.place: int(layer.amounts.gradients[worker]) for layer in self.layers}
            block = self._x[worker]
            x_bytes = block.size * block.dtype.itemsize
            found.append((worker_memory(self._plan, worker, x_bytes, gradients, backward=self._backward), workers))
        return found

    @property
    def _most_live(self) -> np.ndarray:
        """The bytes of all arrays at the fullest time, as far as layers say what they store."""
        stored = self.workers.parameters + self.workers.optimiser
        for memory, workers in self._memory:
            block = self._x[int(workers[0])]
            stored[workers] += block.size * block.dtype.itemsize + memory.live
        return stored

    def table(self) -> str:
        """Return a table as text: a row for each layer."""
        total = LayerCost("", "all layers", self.workers, self._times)
        return table(self.layers, total, self.once, self.seconds)

    @property
    def _times(self) -> Times | None:
        """The times of everything."""
        times = [each.times for each in self.layers if each.times is not None]
        return None if self.once is None else Times.sum([*times, self.once], len(self.workers.parameters))

    def to_json(self) -> str:
        """Return all numbers as JSON, in the form that docs/cost.md describes."""
        return to_json(self.layers, self.workers, self.once, self.seconds)

    def draw(self) -> Drawing:
        """Return a picture of the times, a bar for each layer, and the table as its text; refuse one without times."""
        if self.seconds is None or self.once is None:
            raise InvalidArgumentError("`machine` (=None) of `dj.cost` must be one for a picture of times.")
        bars = [(layer.title, layer.times) for layer in self.layers if layer.times is not None]
        return Drawing(draw([*bars, ("call, sum of the loss", self.once)], f"A step: {self.seconds}"), self.table())


def cost(
    network: Callable[..., Any],
    x_spec: TensorSpec,
    *,
    machine: Machine | str | os.PathLike[str] | None = None,
    optimiser: str = "adam",
    backward: bool = True,
    dtype: DTypeLike = jnp.float32,
    compiled: bool = False,
) -> Cost:
    """Foresee what a training step of `network` costs each worker: without a message, and nothing runs.

    A step is the value of a loss of the output, the gradient of the parameters, and the optimiser's update. It works in
    any world: in a job, in `dj.simulate`, and for any number of workers on `dj.planning_world(n)`. Plans say what
    workers do; a layer whose plan does not is traced for each worker, on 256 workers at most.

    **Arguments:**

    - `network`: a layer, or a network of layers.
    - `x_spec`: the global shape and the partition of its input.
    - `machine`: that it runs on, for times: a `Machine`, or a path or name that `dj.machine.load` takes. Workers fill
      one host after the other. None: no times.
    - `optimiser`: what the optimiser stores: "adam", "adamw", "sgd", "momentum", "rmsprop", "adagrad" or "lion".
    - `backward`: whether gradients are computed and parameters updated; else it is the forward pass alone.
    - `dtype`: of the input and of the parameters; an input of indices is of int32.
    - `compiled`: whether the step of the worker that needs most memory is compiled, which takes as long as in the job;
      `Cost.compiled` has its memory then. On as many workers as layers are traced on.

    **Returns:** the `Cost`.

    **Raises:** `InvalidTypeError` where `network` is no layer or `x_spec` no spec; `InvalidArgumentError` where
    `optimiser` is none of those, or there is no such machine, or its file says nothing of so many workers; `PlanError`
    where x does not fit, or a layer on more workers than that does not say what it does.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 2])
    >>> layer = dj.nn.DistributedConv2d(P, in_channels=1, out_channels=2, kernel_size=3, padding=1)
    >>> dj.cost(layer, dj.TensorSpec((1, 1, 8, 8), P)).messages.tolist()
    [4, 3, 4, 3]
    """
    if not isinstance(network, Layer):
        raise InvalidTypeError(f"`network` (={network!r}) must be a layer; put functions into an nn.Sequential.")
    check_spec(x_spec, "x_spec")
    if optimiser not in OPTIMISERS:
        raise InvalidArgumentError(f"`optimiser` (={optimiser!r}) must be one of {', '.join(OPTIMISERS)}.")
    world, number = x_spec.partition.world, np.dtype(dtype)
    size = world.size
    takes_indices = getattr(network, "takes_indices", False)
    of_x = np.dtype(np.int32) if takes_indices else number
    shapes: Mapping[int, tuple[int, ...]] = x_spec.block_shapes
    if len(shapes) < size:
        elsewhere = worker_ranks(worker for worker in range(size) if worker not in x_spec.block_shapes)
        placeholders = ByClass(elsewhere, [[x_spec.shape_on(worker) for worker in elsewhere]], x_spec.shape_on)
        shapes = on_grids(shapes, placeholders)
    x = derived(lambda worker: ShapeDtype(x_spec.shape_on(worker), of_x), shapes)
    params = _param_blocks(network, number, size) if takes_indices else None
    plan = completed(network, network.plan(x, params), x, world, number)
    actions = plan.actions
    placed, copies = list(placed_layers(network)), OPTIMISERS[optimiser]
    layers = _layer_amounts(placed, actions, size, backward)
    for layer, amounts in layers:
        _count_parameters(layer, amounts, number.itemsize, copies, backward)
    total = Amounts.sum((amounts for _, amounts in layers), size)
    costs = [LayerCost(layer.place, layer.name, amounts) for layer, amounts in layers]
    result = Cost(tuple(costs), total, _plan=plan, _x=x, _backward=backward)
    if checked_boolean("compiled", compiled):
        result = replace(result, compiled=compile_step(network, x, world, result.fullest, number, copies, backward))
    if machine is None:
        return result
    links = MachineLinks(machine if isinstance(machine, Machine) else load(machine), size, number.name)
    updates = [Update.of(layer, number.itemsize, copies) for layer in placed]
    # Every worker gives each parameter, a placeholder where it has no block, and all that the optimiser stores of it.
    arrays = 1 + sum(len(layer.param_specs) for layer in placed) * (1 + copies * backward)
    timing = step_timing(actions, [layer.place for layer in placed], links, updates, arrays=arrays, backward=backward)
    timed = tuple(replace(layer, times=timing.layers[layer.place]) for layer in costs)
    return replace(result, layers=timed, seconds=timing.seconds, once=timing.step)


def _param_blocks(network: Layer, dtype: np.dtype, size: int) -> dict[int, Any]:
    """Return the shapes and dtypes of all workers' parameters: trees, by world rank."""
    specs = network.param_specs()

    def on(worker: int) -> Any:
        return jax.tree.map(lambda spec: ShapeDtype(spec.shape_on(worker), dtype), specs, is_leaf=is_spec)

    return {worker: on(worker) for worker in range(size)}


def _layer_amounts(
    layers: Sequence[PlacedLayer], actions: Sequence[Action], size: int, backward: bool
) -> list[tuple[PlacedLayer, Amounts]]:
    """Return the layers, each with what all workers compute and send for it."""
    amounts = {layer.place: Amounts.none(size) for layer in layers}
    for action in actions:
        count_action(amounts[action.place], action, backward)
    return [(layer, amounts[layer.place]) for layer in layers]


def _count_parameters(layer: PlacedLayer, amounts: Amounts, itemsize: int, copies: int, backward: bool) -> None:
    for spec in layer.param_specs:
        for worker, workers in groups(spec.block_shapes):
            amounts.parameters[workers] += prod(spec.block_shapes[worker]) * itemsize
    if backward:
        amounts.gradients[...] = amounts.parameters
        amounts.optimiser[...] = copies * amounts.parameters
