"""The cost of a network's training step, from the programs of its layers: `cost`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError, Removed
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.nn.base.layer import Layer
from distdl_jax.partitions.spec_trees import is_spec
from distdl_jax.partitions.tensors import TensorSpec, check_spec
from distdl_jax.plans.alike import ByClass, derived, on_grids
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.worker_ranks import worker_ranks
from distdl_jax.text import aligned, number
from distdl_jax.tools.cost.amounts import Amounts, alike
from distdl_jax.tools.cost.classes import groups
from distdl_jax.tools.cost.layers import Chain, Counter, PlacedLayer, nodes_in, placed_layers
from distdl_jax.tools.cost.memory import CompiledMemory, WorkerMemory, compile_step, worker_memory
from distdl_jax.tools.cost.step import count_step
from distdl_jax.tools.cost.units import BANDWIDTHS, TIMES, quantity
from distdl_jax.transports.world import World
from distdl_jax.validation import check_function, checked_boolean, checked_dtype

VERSION = 3
"""Of the JSON format."""

COLUMNS = ("Mflop", "messages", "MB sent", "MB stored")
"""Of the table: the largest amounts that a worker computes, sends and stores."""


@dataclass(frozen=True, eq=False)
class LayerCost:
    """The cost of one layer.

    - `place`, `name`: where it is in the network, "3.body.0", and its class.
    - `amounts`: the storage, computation and messages of each worker for it.
    """

    place: str
    name: str
    amounts: Amounts

    @property
    def title(self) -> str:
        """Its place and its class: "3.body.0 DistributedConv2d"."""
        return f"{self.place} {self.name}".strip()

    def numbers(self, activations: np.ndarray) -> list[float]:
        """Return its column entries, for the worker with the most; `activations`: bytes that the layer stores."""
        stored = self.amounts.parameters + self.amounts.gradients + self.amounts.optimiser + activations
        return in_columns(self.amounts, stored.max())


def in_columns(amounts: Amounts, stored: int) -> list[float]:
    """Return the entries of a row, for the worker with the most, with the bytes that it stores."""
    return [amounts.flops.max() / 1e6, amounts.operations.max(), amounts.bytes.max() / 1e6, stored / 1e6]


WAITING = "ms waiting"
NOTE = "Waiting is a lower bound, messages x latency + bytes / bandwidth: without arithmetic, and without late workers."

OPTIMISERS = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "lion": 1, "adam": 2, "adamw": 2}
"""The number of values that an optimiser stores for each parameter."""


@dataclass(frozen=True, eq=False)
class Cost:
    """The cost of a network's training step on each worker.

    - `layers`: layer by layer, in order.
    - `workers`: all layers together: arrays with an entry for each worker, by world rank.
    - `compiled`: the memory of the fullest worker according to XLA, if requested.
    """

    layers: tuple[LayerCost, ...]
    workers: Amounts
    compiled: CompiledMemory | None = None
    _chain: Chain = field(default=(), repr=False, compare=False)
    _x: ShapeDtypes = field(default_factory=dict, repr=False, compare=False)
    _backward: bool = True

    _ROW: ClassVar[str] = "layer"

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
        """The bytes that each worker sends in messages, or passes to collective operations."""
        return self.workers.bytes

    @property
    def memory(self) -> np.ndarray:
        """The peak memory of each worker in a step, in bytes.

        The step is one jitted function of the parameters and the optimiser state, both donated, and of the input: value
        and gradient of a loss, and the optimiser's update. Without donation, the new ones are additional. The bytes are
        those of XLA's arrays on a CPU; MPI, Python and compiled programs are not included.

        """
        return self._most_live

    @property
    def fullest(self) -> int:
        """The world rank of the worker that needs most memory, the first one if tied."""
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
        """The memory of each class of workers: those that store, compute and send the same amounts in each layer."""
        found = []
        for workers in alike([layer.amounts for layer in self.layers]):
            worker = int(workers[0])
            gradients = {layer.place: int(layer.amounts.gradients[worker]) for layer in self.layers}
            block = self._x[worker]
            x_bytes = block.size * block.dtype.itemsize
            memory = worker_memory(self._chain, worker, x_bytes, gradients, backward=self._backward)
            found.append((memory, workers))
        return found

    @property
    def _most_live(self) -> np.ndarray:
        """The peak bytes of all arrays, as far as layers report what they store."""
        stored = self.workers.parameters + self.workers.optimiser
        for memory, workers in self._memory:
            block = self._x[int(workers[0])]
            stored[workers] += block.size * block.dtype.itemsize + memory.live
        return stored

    def __str__(self) -> str:
        return self.table()

    def table(self, *, bandwidth: str | None = None, latency: str | None = None) -> str:
        """Return a table as text: a row for each layer; bytes and counts of the worker with the most.

        **Arguments:**

        - `bandwidth`, `latency`: of a worker's messages, such as "10 GB/s" or "100 Gbit/s", and "2 us". With either of
          them there is one more column, messages x latency + bytes / bandwidth: a lower bound of waiting. It leaves out
          arithmetic, other workers that are late, and messages of several workers that share a link.

        **Returns:** the text.

        **Raises:** `InvalidTypeError`, `InvalidArgumentError` for something else than a number with a unit.

        >>> import distdl_jax as dj
        >>> P = dj.planning_world(4).grid([1, 1, 4, 1])
        >>> pool = dj.nn.DistributedMaxPool2d(P, 3, stride=1, padding=1)
        >>> print(dj.cost(pool, dj.TensorSpec((1, 8, 64, 64), P)).table(bandwidth="1 GB/s", latency="2 us"))
        layer                 Mflop  messages  MB sent  MB stored  ms waiting
        ---------------------------------------------------------------------
        DistributedMaxPool2d  0.066         2    0.004          0       0.008
        ---------------------------------------------------------------------
        all layers            0.066         2    0.004      0.112       0.008
        <BLANKLINE>
        Waiting is a lower bound, messages x latency + bytes / bandwidth: without arithmetic, and without late workers.
        """
        activations, waits = self.activations, bandwidth is not None or latency is not None
        per_byte = 0.0 if bandwidth is None else 1 / quantity("bandwidth", bandwidth, BANDWIDTHS, "10 GB/s")
        per_message = 0.0 if latency is None else quantity("latency", latency, TIMES, "2 us")
        rows = [[self._ROW, *COLUMNS]]
        rows += ([each.title, *map(number, each.numbers(activations[each.place]))] for each in self.layers)
        rows.append([f"all {self._ROW}s", *map(number, in_columns(self.workers, self._most_live.max()))])
        if waits:
            all_amounts = [*(each.amounts for each in self.layers), self.workers]
            seconds = [float(np.max(each.operations * per_message + each.bytes * per_byte)) for each in all_amounts]
            rows = [
                [*row, cell] for row, cell in zip(rows, (WAITING, *(number(1e3 * s) for s in seconds)), strict=True)
            ]
        lines = aligned(rows)
        lines.insert(1, "-" * max(map(len, lines)))
        lines.insert(-1, lines[1])
        return "\n".join(line.rstrip() for line in [*lines, *(["", NOTE] if waits else [])])

    def to_json(self) -> str:
        """Return all numbers as JSON, in the format of docs/cost.md."""
        activations = self.activations
        layers = [
            {
                "place": layer.place,
                "name": layer.name,
                "amounts": _lists(layer.amounts),
                "activations": activations[layer.place].tolist(),
            }
            for layer in self.layers
        ]
        return json.dumps({"version": VERSION, "workers": _lists(self.workers), "layers": layers})

    draw = Removed("dj.draw(cost)")


@dataclass(frozen=True, eq=False)
class StepCost(Cost):
    """The cost of a function of blocks on each worker, from its traced programs; rows are the lines that send."""

    _ROW: ClassVar[str] = "line"

    @property
    def memory(self) -> np.ndarray:
        """The bytes of the fullest worker by XLA, for each worker: an upper bound for the others."""
        if self.compiled is None:
            raise InvalidArgumentError("The memory of a function is known to XLA alone: ask by `compiled=True`.")
        return np.full_like(self.workers.parameters, self.compiled.total)

    @property
    def fullest(self) -> int:
        """The world rank of the worker with the largest arguments, and of these the one that sends most."""
        return int(np.lexsort((-self.bytes, -self.workers.parameters))[0])

    @property
    def activations(self) -> dict[str, np.ndarray]:
        """Zeros: what is kept is known to XLA alone."""
        return {layer.place: np.zeros_like(self.workers.parameters) for layer in self.layers}

    @property
    def _most_live(self) -> np.ndarray:
        return self.workers.parameters if self.compiled is None else self.memory


def _lists(amounts: Amounts) -> dict[str, list[int]]:
    return {field.name: getattr(amounts, field.name).tolist() for field in fields(amounts)}


def cost(
    network: Callable[..., Any],
    *specs: Any,
    optimiser: str = "adam",
    backward: bool = True,
    dtype: DTypeLike = jnp.float32,
    compiled: bool = False,
) -> Cost:
    """Count the cost of a training step on each worker, without communication or execution.

    The step is a distributed function, or any other function of blocks, with its arguments: `dj.cost(step, *specs)`. Or
    it is that of a network of layers: the value of a loss of the output, the gradient of the parameters, and the
    optimiser's update, `dj.cost(network, x_spec)`. It works in any world: in a job, in `dj.simulate`, and for any
    number of workers on `dj.planning_world(n)`.

    A distributed function is traced for each worker, on more than 16 for those at the ends of each dimension of the
    grid, and for the second ones along it, which stand for all between. Each layer of a network is traced for one
    worker of each shape of blocks. What depends on shapes computed by other workers (a layer of your own, a step of
    layers) is traced for each worker, on at most 256.

    **Arguments:**

    - `network`: a function, jitted or not; a layer, or a network of layers.
    - `specs`: for a function, its arguments, with a `TensorSpec` in place of a block, and whole arrays or
      `jax.ShapeDtypeStruct`s. For a network, the global shape and the partition of its input.
    - `optimiser`: of a network, for its state: "adam", "adamw", "sgd", "momentum", "rmsprop", "adagrad" or "lion".
    - `backward`: of a network, whether gradients are computed and parameters updated; otherwise only the forward pass.
    - `dtype`: of blocks, and of a network's parameters; its input of indices has int32. In a function's, a block of
      another dtype is `(spec, dtype)`.
    - `compiled`: whether to compile the step of the worker that needs most memory, which takes as long as in the job;
      its memory is in `Cost.compiled`. The number of workers is limited as for tracing.

    **Returns:** the `Cost`. Of a function, its rows are the lines that send, all flops count as forward, `parameters`
    are all arguments, and `memory` is known if it is compiled.

    **Raises:** `InvalidTypeError` if `network` is not a function, or `x_spec` not a spec; `InvalidArgumentError` if
    `optimiser` is not one of these, or no argument has a spec; `PlanError` if x does not fit, or a layer that has to
    be traced for each worker is on too many.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 2])
    >>> layer = dj.nn.DistributedConv2d(P, in_channels=1, out_channels=2, kernel_size=3, padding=1)
    >>> dj.cost(layer, dj.TensorSpec((1, 1, 8, 8), P)).messages.tolist()
    [4, 3, 4, 3]
    >>> f = dj.distribute(lambda x: x * x.mean(), (dj.TensorSpec((1, 1, 8, 8), P),), dj.BLOCKS)
    >>> print(dj.cost(f, dj.TensorSpec((1, 1, 8, 8), P)).workers.collectives_forward.tolist())
    [1, 1, 1, 1]
    """
    if not isinstance(network, Layer):
        check_function("network", network)
        if optimiser != "adam" or backward is not True:
            raise InvalidArgumentError("`optimiser` and `backward` are of networks: a function is the whole step.")
        counted = count_step(network, specs, checked_dtype("dtype", dtype), checked_boolean("compiled", compiled))
        lines = tuple(LayerCost(line, "", amounts) for line, amounts in counted.lines.items())
        return StepCost(lines, counted.workers, counted.compiled)
    if len(specs) != 1:
        raise InvalidTypeError(f"dj.cost takes the spec of a network's input alone, but got {len(specs)} arguments.")
    x_spec: TensorSpec = specs[0]
    check_spec(x_spec, "x_spec")
    if not isinstance(optimiser, str) or optimiser not in OPTIMISERS:
        raise InvalidArgumentError(f"`optimiser` (={optimiser!r}) must be one of {', '.join(OPTIMISERS)}.")
    number, backward = checked_dtype("dtype", dtype), checked_boolean("backward", backward)
    copies = OPTIMISERS[optimiser]
    result = count(network, x_spec, number, copies, backward=backward)
    if checked_boolean("compiled", compiled):
        args = network, result._x, _world(network, x_spec), result.fullest, number, copies, backward
        result = replace(result, compiled=compile_step(*args))
    return result


def count(
    network: Layer,
    x_spec: TensorSpec,
    dtype: np.dtype,
    copies: int,
    *,
    backward: bool = True,
) -> Cost:
    """Count a step; `copies`: the optimiser's values per parameter."""
    world = _world(network, x_spec)
    size = world.size
    takes_indices = getattr(network, "takes_indices", False)
    x_dtype = np.dtype(np.int32) if takes_indices else dtype
    shapes: Mapping[int, tuple[int, ...]] = x_spec.block_shapes
    if len(shapes) < size:
        elsewhere = worker_ranks(worker for worker in range(size) if worker not in x_spec.block_shapes)
        placeholders = ByClass(elsewhere, [[x_spec.shape_on(worker) for worker in elsewhere]], x_spec.shape_on)
        shapes = on_grids(shapes, placeholders)
    x = derived(lambda worker: ShapeDtype(x_spec.shape_on(worker), x_dtype), shapes)
    params = _param_blocks(network, dtype, size) if takes_indices else None
    try:
        plan = network.plan(x, params)
    except jax.errors.JAXTypeError as error:
        raise PlanError(
            f"`network` can't be planned: a part of it depends on values ({str(error).splitlines()[0]})."
        ) from error
    chain = Counter(world, dtype).chain(network, plan, x)
    layers = list(placed_layers(network))
    amounts = {layer.place: Amounts.none(size) for layer in layers}
    for node in nodes_in(chain):
        amounts[node.place].count(node, backward)
    costs = []
    for layer in layers:
        own = amounts[layer.place]
        _count_parameters(layer, own, dtype.itemsize, copies, backward)
        costs.append(LayerCost(layer.place, layer.name, own))
    return Cost(tuple(costs), Amounts.sum(amounts.values(), size), _chain=chain, _x=x, _backward=backward)


def _world(network: Layer, x_spec: TensorSpec) -> World:
    """Return the world of a network; the spec may be on another planning world."""
    return (getattr(network, "input_partition", None) or x_spec.partition).world


def _param_blocks(network: Layer, dtype: np.dtype, size: int) -> dict[int, Any]:
    """Return the shapes and dtypes of all workers' parameters: trees, by world rank."""
    specs = network.param_specs()

    def on(worker: int) -> Any:
        return jax.tree.map(lambda spec: ShapeDtype(spec.shape_on(worker), dtype), specs, is_leaf=is_spec)

    return {worker: on(worker) for worker in range(size)}


def _count_parameters(layer: PlacedLayer, amounts: Amounts, itemsize: int, copies: int, backward: bool) -> None:
    for spec in layer.param_specs:
        for worker, workers in groups(spec.block_shapes):
            amounts.parameters[workers] += prod(spec.block_shapes[worker]) * itemsize
    if backward:
        amounts.gradients[...] = amounts.parameters
        amounts.optimiser[...] = copies * amounts.parameters
