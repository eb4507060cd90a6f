"""What a training step of a network costs, foreseen: `cost`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from distdl_jax.costs.amounts import Amounts
from distdl_jax.costs.layers import PlacedLayer, placed_layers
from distdl_jax.costs.memory import worker_memory
from distdl_jax.costs.step_program import step_events
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.layer.layer import Layer
from distdl_jax.nn.remat_precision import Wrapper
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.plan import Action, Plan
from distdl_jax.tensors import TensorSpec, check_spec

OPTIMISERS = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "lion": 1, "adam": 2, "adamw": 2}
"""How many numbers an optimiser stores for each parameter."""


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs.

    - `place`, `name`: where it is in the network, "3.body.0", and its class.
    - `amounts`: what each worker stores, computes and sends for it.
    """

    place: str
    name: str
    amounts: Amounts


@dataclass(frozen=True)
class Cost:
    """What a training step of a network costs each worker.

    - `layers`: layer by layer, in order.
    - `workers`: all layers together: arrays with an entry for each worker, by world rank.
    - `most_live`: the bytes of all arrays of each worker at the fullest time, as far as layers say what they store.
    - `unknown`: the layers that don't.
    """

    layers: tuple[LayerCost, ...]
    workers: Amounts
    most_live: np.ndarray
    unknown: tuple[str, ...]

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
        if self.unknown:
            raise PlanError(
                f"The memory can't be foreseen: {', '.join(self.unknown)} does not say what the backward pass reads. "
                "Give `saved` to each `Work` of its plan's `actions` (docs/own-layers.md)."
            )
        return self.most_live

    @property
    def fullest(self) -> int:
        """The world rank of the worker that needs most memory, the first one of several."""
        return int(np.argmax(self.memory))


def cost(
    network: Callable[..., Any],
    x_spec: TensorSpec,
    *,
    optimiser: str = "adam",
    backward: bool = True,
    dtype: DTypeLike = jnp.float32,
) -> Cost:
    """Foresee what a training step of `network` costs each worker: from plans alone, without a message.

    A step is the value of a loss of the output, the gradient of the parameters, and the optimiser's update. It works in
    any world: in a job, in `dj.simulate`, and for any number of workers on `dj.planning_world(n)`.

    **Arguments:**

    - `network`: a layer, or a network of layers.
    - `x_spec`: the global shape and the partition of its input.
    - `optimiser`: what the optimiser stores: "adam", "adamw", "sgd", "momentum", "rmsprop", "adagrad" or "lion".
    - `backward`: whether gradients are computed and parameters updated; else it is the forward pass alone.
    - `dtype`: of the input and of the parameters.

    **Returns:** the `Cost`.

    **Raises:** `InvalidTypeError` where `network` is no layer or `x_spec` no spec; `InvalidArgumentError` where
    `optimiser` is none of those; `PlanError` where x does not fit, or a layer does not say what it does.

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
    x = {worker: ShapeDtype(x_spec.shape_on(worker), number) for worker in range(size)}
    placed = list(placed_layers(network))
    for place, layer in placed:
        if isinstance(layer, Wrapper):
            raise PlanError(
                f"`layers[{place}]` is {type(layer).__name__}, whose plan is that of the layer in it: what it does "
                "beyond that is not foreseen. Ask for the cost of the network without it."
            )
    plan = network.plan(x)
    layers = _layer_amounts(placed, plan.actions, size, backward)
    for layer, amounts in layers:
        _count_parameters(layer, amounts, number.itemsize, OPTIMISERS[optimiser], backward)
    most_live, unknown = _count_memory(layers, plan, x, backward)
    costs = tuple(LayerCost(layer.place, layer.name, amounts) for layer, amounts in layers)
    return Cost(costs, Amounts.sum((each.amounts for each in costs), size), most_live, unknown)


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


def _count_memory(
    layers: Sequence[tuple[PlacedLayer, Amounts]], plan: Plan, x: Mapping[int, ShapeDtype], backward: bool
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Count the layers' activations; return each worker's bytes at the fullest time, and layers that don't say all."""
    most = np.zeros(len(x), np.int64)
    unknown: set[str] = set()
    for worker, block in x.items():
        gradients = {layer.place: int(amounts.gradients[worker]) for layer, amounts in layers}
        stored = sum(int(amounts.parameters[worker] + amounts.optimiser[worker]) for _, amounts in layers)
        x_bytes = block.size * block.dtype.itemsize
        memory = worker_memory(plan, worker, x_bytes, gradients, backward=backward)
        most[worker] = stored + x_bytes + memory.live
        unknown.update(memory.unknown)
        for layer, amounts in layers:
            amounts.activations[worker] = memory.activations.get(layer.place, 0) if backward else 0
    return most, tuple(f"`layers[{layer.place}]` ({layer.name})" for layer, _ in layers if layer.place in unknown)
