"""What a training step of a network costs, foreseen: `cost`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from distdl_jax.costs.amounts import Amounts
from distdl_jax.costs.counting import count_action, groups
from distdl_jax.costs.layers import PlacedLayer, placed_layers
from distdl_jax.costs.step_program import step_actions
from distdl_jax.costs.traced import completed
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.layer.layer import Layer
from distdl_jax.plans.alike import ByClass, derived, on_grids
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.worker_ranks import worker_ranks
from distdl_jax.primitives.plan import Action
from distdl_jax.spec_trees import is_spec
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
    """

    layers: tuple[LayerCost, ...]
    workers: Amounts

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


def cost(
    network: Callable[..., Any],
    x_spec: TensorSpec,
    *,
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
    - `optimiser`: what the optimiser stores: "adam", "adamw", "sgd", "momentum", "rmsprop", "adagrad" or "lion".
    - `backward`: whether gradients are computed and parameters updated; else it is the forward pass alone.
    - `dtype`: of the input and of the parameters; an input of indices is of int32.

    **Returns:** the `Cost`.

    **Raises:** `InvalidTypeError` where `network` is no layer or `x_spec` no spec; `InvalidArgumentError` where
    `optimiser` is none of those; `PlanError` where x does not fit, or a layer on more workers than that does not say
    what it does.

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
    shapes: Mapping[int, tuple[int, ...]] = x_spec.block_shapes
    if len(shapes) < size:
        elsewhere = worker_ranks(worker for worker in range(size) if worker not in x_spec.block_shapes)
        placeholders = ByClass(elsewhere, [[x_spec.shape_on(worker) for worker in elsewhere]], x_spec.shape_on)
        shapes = on_grids(shapes, placeholders)
    x = derived(lambda worker: ShapeDtype(x_spec.shape_on(worker), of_x), shapes)
    params = _param_blocks(network, number, size) if takes_indices else None
    plan = completed(network, network.plan(x, params), x, x_spec.partition.world, number)
    layers = _layer_amounts(list(placed_layers(network)), step_actions(plan), size, backward)
    for layer, amounts in layers:
        _count_parameters(layer, amounts, number.itemsize, OPTIMISERS[optimiser], backward)
    costs = tuple(LayerCost(layer.place, layer.name, amounts) for layer, amounts in layers)
    return Cost(costs, Amounts.sum((each.amounts for each in costs), size))


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
