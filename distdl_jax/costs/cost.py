"""What a training step of a network costs, foreseen: `cost`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from distdl_jax.costs.amounts import Amounts
from distdl_jax.costs.as_json import to_json
from distdl_jax.costs.layer_cost import LayerCost
from distdl_jax.costs.layers import PlacedLayer, placed_layers
from distdl_jax.costs.links import MachineLinks
from distdl_jax.costs.picture import draw
from distdl_jax.costs.seconds import optimiser_update, step_timing
from distdl_jax.costs.step_program import step_actions, step_events
from distdl_jax.costs.table import table
from distdl_jax.costs.times import Interval, Times
from distdl_jax.costs.traced import completed
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.layer.layer import Layer
from distdl_jax.machine.machine import Machine, load
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.plan import Action
from distdl_jax.spec_trees import is_spec
from distdl_jax.tensors import TensorSpec, check_spec

OPTIMISERS = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "lion": 1, "adam": 2, "adamw": 2}
"""How many numbers an optimiser stores for each parameter."""


@dataclass(frozen=True)
class Cost:
    """What a training step of a network costs each worker.

    - `layers`: layer by layer, in order.
    - `workers`: all layers together: arrays with an entry for each worker, by world rank.
    - `seconds`: of a step on the machine, as an `Interval`: `low`, `mean`, `high`, and `reasons` why not known better.
    - `once`: the times of what is done once a step: the call, and the sum of the loss over all workers.

    `seconds` and `once` are None without a machine.
    """

    layers: tuple[LayerCost, ...]
    workers: Amounts
    seconds: Interval | None = None
    once: Times | None = None

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

    def draw(self) -> str:
        """Return a picture of the times as SVG: a bar for each layer; refuse a cost without a machine."""
        if self.seconds is None or self.once is None:
            raise InvalidArgumentError("`machine` (=None) of `dj.cost` must be one for a picture of times.")
        bars = [(layer.title, layer.times) for layer in self.layers if layer.times is not None]
        return draw([*bars, ("call, sum of the loss", self.once)], f"A step: {self.seconds}")


def cost(
    network: Callable[..., Any],
    x_spec: TensorSpec,
    *,
    machine: Machine | str | os.PathLike[str] | None = None,
    optimiser: str = "adam",
    backward: bool = True,
    dtype: DTypeLike = jnp.float32,
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
    size, number = x_spec.partition.world.size, np.dtype(dtype)
    takes_indices = getattr(network, "takes_indices", False)
    of_x = np.dtype(np.int32) if takes_indices else number
    x = {worker: ShapeDtype(x_spec.shape_on(worker), of_x) for worker in range(size)}
    params = _param_blocks(network, number, size) if takes_indices else None
    actions = step_actions(completed(network, network.plan(x, params), x, x_spec.partition.world, number))
    placed, copies = list(placed_layers(network)), OPTIMISERS[optimiser]
    layers = _layer_amounts(placed, actions, size, backward)
    for layer, amounts in layers:
        _count_parameters(layer, amounts, number.itemsize, copies, backward)
    total = Amounts.sum((amounts for _, amounts in layers), size)
    if machine is None:
        return Cost(tuple(LayerCost(layer.place, layer.name, amounts) for layer, amounts in layers), total)
    links = MachineLinks(machine if isinstance(machine, Machine) else load(machine), size, number.name)
    updates = [optimiser_update(layer, number.itemsize, size, copies) for layer in placed]
    timing = step_timing(actions, [layer.place for layer in placed], links, updates, backward=backward)
    costs = tuple(LayerCost(layer.place, layer.name, amounts, timing.layers[layer.place]) for layer, amounts in layers)
    return Cost(costs, total, timing.seconds, timing.step)


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
    for worker in range(size):
        for event in step_events(actions, worker, backward=backward):
            amounts[event.place].count(event, worker)
    return [(layer, amounts[layer.place]) for layer in layers]


def _count_parameters(layer: PlacedLayer, amounts: Amounts, itemsize: int, copies: int, backward: bool) -> None:
    for spec in layer.param_specs:
        for worker, shape in spec.block_shapes.items():
            amounts.parameters[worker] += int(np.prod(shape, dtype=np.int64)) * itemsize
    if backward:
        amounts.gradients[...] = amounts.parameters
        amounts.optimiser[...] = copies * amounts.parameters
