"""The memory of one worker in a training step: from what its layers store, or according to XLA.

A step is a list of operations with the arrays that they read and make. An array is live from the operation that makes
it to the last one that reads it. A layer is one forward operation and one backward operation. Alternatively the step is
compiled for one worker, and XLA reports the memory of its arrays; nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.mark import Mark
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.nn.base.layer import Layer, apply_layer
from distdl_jax.partitions.partition import Partition
from distdl_jax.tools.cost.layers import Chain, CountedLayer
from distdl_jax.tools.cost.traced import MOST_WORKERS
from distdl_jax.tools.cost.traces import Communication, Trace
from distdl_jax.transforms.gradients import value_and_grad
from distdl_jax.transports.threads.workers import on_stand_ins
from distdl_jax.transports.world import World


class WorkerMemory(NamedTuple):
    """The bytes of one worker.

    - `activations`: stored from the forward to the backward pass, by the place of the first layer that reads them then;
      without the network's input.
    - `live`: the peak of all arrays except the parameters, the optimiser state, and the network's input.
    """

    activations: dict[str, int]
    live: int


@dataclass(eq=False)
class _Block:
    """An array.

    - `has_gradient`: whether it depends on parameters.
    """

    nbytes: int
    has_gradient: bool = False


@dataclass(frozen=True)
class _Operation:
    """An operation of a step, with the arrays that it reads and makes.

    - `scratch`: additional bytes that it needs, such as message buffers.
    - `in_place`: whether a result may replace an array of the same size of which it is the last reader.
    """

    reads: Sequence[_Block]
    makes: Sequence[_Block]
    scratch: int = 0
    in_place: bool = False


def worker_memory(
    chain: Chain, worker: int, x_bytes: int, gradients: Mapping[str, int], *, backward: bool = True
) -> WorkerMemory:
    """Return the memory of `worker` in a training step: of a loss, its gradients, and the optimiser's update.

    - `x_bytes`: of its block of the network's input.
    - `gradients`: by the place of a layer, the bytes of its parameters' gradients on this worker.
    - `backward`: whether gradients are computed.
    """
    tape = _Tape(worker, gradients)
    y = tape.run(chain, _Block(x_bytes))
    tape.operations.append(_Operation((y,), ()))
    if backward:
        tape.go_back(y)
    return WorkerMemory(tape.activations(), _most_live(tape.operations))


@dataclass
class _Tape:
    """The operations of a step on one worker, and their reversal."""

    worker: int
    gradients: Mapping[str, int]
    operations: list[_Operation] = field(default_factory=list)
    backward: list[Callable[[], None]] = field(default_factory=list)
    cotangents: dict[_Block, _Block] = field(default_factory=dict)
    saved: list[tuple[str, _Block]] = field(default_factory=list)
    of_params: dict[str, _Block] = field(default_factory=dict)

    def run(self, chain: Chain, x: _Block) -> _Block:
        """Record layers on x, in order; return the array of their output."""
        for node in chain:
            if isinstance(node, CountedLayer):
                x = self._compute(node, node.trace(self.worker), x)
            else:
                ways = x, other = tuple(x if way is None else self.run(way, x) for way in node.ways)
                if node.kind == "sum":
                    x = self._add(x, other)
                elif node.kind == "product":  # with far fewer numbers
                    self.saved += [(node.place, way) for way in ways]
                    x = self._join(ways, _Block(x.nbytes, True), ways, in_place=True)
                else:
                    y = node.y[self.worker]
                    has_gradient = x.has_gradient or other.has_gradient
                    x = self._join(ways, _Block(y.size * y.dtype.itemsize, has_gradient))
        return x

    def _gradient(self, place: str) -> list[_Block]:
        """Return the array of a layer's gradients, until the optimiser's update; nothing if it exists already."""
        if place in self.of_params:
            return []
        self.of_params[place] = _Block(self.gradients.get(place, 0))
        return [self.of_params[place]]

    def _compute(self, layer: CountedLayer, trace: Trace, x: _Block) -> _Block:
        """Record the work of a worker in a layer."""
        output = layer.y[self.worker]
        nbytes, buffers = output.size * output.dtype.itemsize, self._buffers(trace.forward)
        if not trace.written and (not trace.forward or (nbytes == x.nbytes and not buffers)):
            return x
        stored, has_gradient = trace.stored, layer.has_gradient or layer.uses_params
        others = [_Block(stored.others)] if stored.others else []
        y = _Block(nbytes, has_gradient)
        self.operations.append(_Operation((x,), (y, *others), buffers))
        saved = [*((x,) if stored.x else ()), *((y,) if stored.y else ()), *others]
        if has_gradient:
            self.saved += [(layer.place, block) for block in saved]
            self.backward.append(lambda: self._compute_back(layer, trace, x, y, saved))
        return y

    def _compute_back(self, layer: CountedLayer, trace: Trace, x: _Block, y: _Block, saved: Sequence[_Block]) -> None:
        """Record the gradients of a layer."""
        if (dy := self.cotangents.pop(y, None)) is None:
            return
        dx = [_Block(x.nbytes)] if x.has_gradient else []
        made = [*dx, *(self._gradient(layer.place) if layer.uses_params else ())]
        buffers = self._buffers(trace.backward(x.has_gradient))
        self.operations.append(_Operation((*saved, dy), made, buffers))
        for cotangent in dx:
            self._add_cotangent(x, cotangent)

    def _buffers(self, communication: Communication) -> int:
        """Return the largest total of message buffers in one movement: packed at once, and received."""
        return max((_packed(each, self.worker) for each in communication if isinstance(each, Mark)), default=0)

    def _join(
        self, parts: Sequence[_Block], y: _Block, reads: Sequence[_Block] = (), *, in_place: bool = False
    ) -> _Block:
        """Record an array that combines two; their cotangents are made of its own and of `reads`."""
        self.operations.append(_Operation(parts, (y,), in_place=in_place))

        def back() -> None:
            if (dy := self.cotangents.pop(y, None)) is not None:
                made = [_Block(part.nbytes) for part in parts]
                self.operations.append(_Operation((*reads, dy), made))
                for part, cotangent in zip(parts, made, strict=True):
                    self._add_cotangent(part, cotangent)

        self.backward.append(back)
        return y

    def _add(self, x: _Block, other: _Block) -> _Block:
        """Record a sum, which shares its cotangent with both terms."""
        y = _Block(x.nbytes, x.has_gradient or other.has_gradient)
        self.operations.append(_Operation((x, other), (y,), in_place=True))

        def back() -> None:
            if (dy := self.cotangents.pop(y, None)) is not None:
                self._add_cotangent(x, dy)
                self._add_cotangent(other, dy)

        self.backward.append(back)
        return y

    def _add_cotangent(self, block: _Block, cotangent: _Block) -> None:
        """Add to the cotangent of an array, if it has one."""
        if not block.has_gradient:
            return
        if (other := self.cotangents.get(block)) is not None:
            total = _Block(block.nbytes)
            self.operations.append(_Operation((other, cotangent), (total,), in_place=True))
            cotangent = total
        self.cotangents[block] = cotangent

    def go_back(self, y: _Block) -> None:
        """Record the loss, the backward pass, and the optimiser's update."""
        dy = _Block(y.nbytes)
        self.operations.append(_Operation((y,), (dy,), in_place=True))
        self.cotangents[y] = dy
        for back in reversed(self.backward):
            back()
        self.operations.append(_Operation((*self.of_params.values(),), ()))

    def activations(self) -> dict[str, int]:
        """Return the bytes that are stored until the backward pass, by the layer that reads them first."""
        found: dict[str, int] = {}
        made = {block for operation in self.operations for block in operation.makes}
        seen: set[_Block] = set()
        for place, block in self.saved:
            if block in made and block not in seen:
                seen.add(block)
                found[place] = found.get(place, 0) + block.nbytes
        return found


def _packed(mark: Mark, worker: int) -> int:
    """Return the bytes of the message buffers of one worker in a movement."""
    movement = mark.plan
    if not mark.moves or worker not in movement.inputs:
        return 0
    x, y = (each.size * each.dtype.itemsize for each in (movement.inputs[worker], movement.output(worker)))
    operations = movement.operations(worker)
    sent = [each.bytes_sent for each in operations]
    received = [(each.received if each.is_message else each.count) * each.itemsize for each in operations]
    if mark.adjoint:  # it sends what the movement receives
        x, y, sent, received = y, x, received, sent
    return mark.copies * (min(sum(sent), x) + max(min(sum(received), y), max(received, default=0)))


def _most_live(operations: Sequence[_Operation]) -> int:
    """Return the peak bytes of the live arrays."""
    last: dict[_Block, int] = {}
    for number, each in enumerate(operations):
        last |= dict.fromkeys((*each.reads, *each.makes), number)
    made = {block for each in operations for block in each.makes}
    live = most = 0
    for number, operation in enumerate(operations):
        reads, makes = operation.reads, operation.makes
        ends = {block for block in (*reads, *makes) if last[block] == number and block in made}
        live += sum(block.nbytes for block in makes)
        sizes = {block.nbytes for block in ends if block not in makes}
        reused = max((block.nbytes for block in makes if operation.in_place and block.nbytes in sizes), default=0)
        most = max(most, live + operation.scratch - reused)
        live -= sum(block.nbytes for block in ends)
    return most


RATE = 1e-6
"""Of the update: so small that the numbers stay as at the beginning of training."""


@dataclass(frozen=True)
class CompiledMemory:
    """The bytes of the arrays in one worker's compiled step, as assigned by XLA.

    - `worker`: its world rank.
    - `arguments`: parameters, the optimiser state, and the block of the input.
    - `results`: results in separate memory: the loss, and values that aren't donated.
    - `temporaries`: activations, gradients, messages, and scratch memory.
    """

    worker: int
    arguments: int
    results: int
    temporaries: int

    @property
    def total(self) -> int:
        """The total."""
        return self.arguments + self.results + self.temporaries


def compile_step(
    network: Layer, x: ShapeDtypes, world: World, worker: int, dtype: np.dtype, copies: int, backward: bool
) -> CompiledMemory:
    """Compile the step of `worker`, with blocks like `x`; `copies`: the number of values that the optimiser stores per
    parameter, whose arrays are donated with the parameters.

    All workers trace their steps, in threads, since they agree on plans. Messages are calls of the same shapes.
    """
    if world.size > MOST_WORKERS:
        raise InvalidArgumentError(f"`compiled` (=True) must be False on more than {MOST_WORKERS} workers.")

    def on_worker(rank: int) -> CompiledMemory | None:
        params = jax.eval_shape(lambda: network.init(jax.random.key(0), dtype))
        block = jax.ShapeDtypeStruct(x[rank].shape, x[rank].dtype)
        if backward:
            step = jax.jit(training_step(network, Partition()), donate_argnums=(0, 1))
            lowered = step.lower(params, [params] * copies, None, block)
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


def training_step(network: Layer, P: Partition) -> Callable[..., Any]:
    """Return a step of parameters, the optimiser state, the layers' state, and x.

    It computes the value and the gradient of a loss, and an update that reads and writes everything that is stored. It
    returns the new values of the first three, and the loss.
    """

    def loss(params: Any, state: Any, x: Array) -> tuple[Array, Any]:
        y, state = apply_layer(network, params, x, state, True, jax.random.key(0))
        return jnp.sum((y * y.conj()).real), state

    def step(params: Any, stored: list[Any], state: Any, x: Array) -> tuple[Any, ...]:
        (value, state), gradient = value_and_grad(loss, has_aux=True, partition=P)(params, state, x)
        stored = [jax.tree.map(partial(_mean, power), tree, gradient) for power, tree in enumerate(stored, start=1)]
        moved = jax.tree.map(_direction, gradient, *stored)
        return jax.tree.map(lambda p, m: (p - RATE * m).astype(p.dtype), params, moved), stored, state, value

    return step


def _mean(power: int, mean: Array, gradient: Array) -> Array:
    """Return the running mean of a power of the gradient."""
    return (0.9 * mean + 0.1 * gradient**power).astype(mean.dtype)


def _direction(gradient: Array, *means: Array) -> Array:
    """Return the direction of sgd, momentum or Adam, with no, one or two running means."""
    if len(means) < 2:
        return means[0] if means else gradient
    return means[0] / (jnp.sqrt(jnp.abs(means[1])) + 1e-8)
