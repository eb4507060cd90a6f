"""The memory of one worker in a training step: its arrays, from the plans of a network, and how many are live at once.

A step is a list of operations with the arrays that they read and make. An array is live from the operation that makes
it to the last that reads it. What XLA computes again where it is read (`Work.y_is_recomputed`) has no memory, unless
an operation reads it that takes its arguments from memory: a message, a convolution, a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from distdl_jax.nn.residual import WAYS, ResidualPlan
from distdl_jax.nn.sequential import SequentialPlan
from distdl_jax.plans.work import Work
from distdl_jax.primitives.plan import PARAMS, Computes, MovementPlan, Moves, Plan, Traced


class WorkerMemory(NamedTuple):
    """The bytes of one worker.

    - `activations`: what is stored from the forward to the backward pass, by the place of the first layer that reads
      it then; without the network's input.
    - `live`: of all arrays but the parameters, what the optimiser stores, and the network's input, at the fullest time.
    - `unknown`: the places of layers that don't say what they store.
    """

    activations: dict[str, int]
    live: int
    unknown: tuple[str, ...]


@dataclass(eq=False)
class _Block:
    """An array.

    - `has_gradient`: whether it depends on parameters.
    - `sources`: the arrays from which XLA computes it again, if nothing reads it from memory.
    """

    nbytes: int
    has_gradient: bool = False
    sources: tuple[_Block, ...] = ()

    @property
    def stored(self) -> tuple[_Block, ...]:
        """The arrays in memory in which it is."""
        return tuple(block for source in self.sources for block in source.stored) if self.sources else (self,)


@dataclass(frozen=True)
class _Operation:
    """An operation of a step: it reads and makes arrays.

    - `scratch`: bytes that it takes beside them.
    - `in_place`: whether a result may take the place of an array of the same size that it is the last to read.
    """

    reads: Sequence[_Block]
    makes: Sequence[_Block]
    scratch: int = 0
    in_place: bool = False


def worker_memory(
    plan: Plan, worker: int, x_bytes: int, gradients: Mapping[str, int], *, backward: bool = True
) -> WorkerMemory:
    """Return what `worker` stores in a training step: of a loss, its gradients, and the optimiser's update.

    - `x_bytes`: of its block of the network's input.
    - `gradients`: by the place of a layer, the bytes of its parameters' gradients on this worker.
    - `backward`: whether gradients are computed.
    """
    tape = _Tape(worker, gradients)
    y = tape.run(plan, _Block(x_bytes), "")
    tape.operations.append(_Operation((y,), ()))
    if backward:
        tape.go_back(y)
    return WorkerMemory(tape.activations(), _most_live(tape.operations), tuple(dict.fromkeys(tape.unknown)))


@dataclass
class _Tape:
    """The operations of a step on one worker, and how to go back."""

    worker: int
    gradients: Mapping[str, int]
    operations: list[_Operation] = field(default_factory=list)
    backward: list[Callable[[], None]] = field(default_factory=list)
    cotangents: dict[_Block, _Block] = field(default_factory=dict)
    saved: list[tuple[str, _Block]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    of_params: dict[str, _Block] = field(default_factory=dict)

    def run(self, plan: Plan, x: _Block, place: str) -> _Block:
        """Record the operations of a plan on x; return the array that is its output."""
        match plan:
            case SequentialPlan(plans=plans):
                for number, each in enumerate(plans):
                    x = self.run(each, x, _within(place, str(number)))
                return x
            case ResidualPlan(body=body, shortcut=shortcut):
                ways = zip(WAYS, (body, shortcut), strict=True)
                ends = [x if way is None else self.run(way, x, _within(place, name)) for name, way in ways]
                return self._add(ends[0], ends[1])
        return self._leaf(plan, x, place)

    def _leaf(self, plan: Plan, x: _Block, place: str) -> _Block:
        """Record the actions of one layer."""
        beside: list[_Block] = []
        copies: list[_Block] = []
        for action in plan.actions:
            match action:
                case Moves(movement) if movement.part(self.worker) is None:
                    continue
                case Moves(movement, of=of) if of == PARAMS:
                    copies.append(self._move_parameters(movement, place))
                case Moves(movement, beside=True):
                    beside.append(self._move(movement, x, beside=True))
                case Moves(movement):
                    x = self._move(movement, x)
                case Computes():
                    x, beside, copies = self._compute(action, x, place, beside, copies), [], []
                case Traced():
                    x = self._compute(Computes(partial(_work_of, action), action.of, action.uses_params), x, place)
                case _:  # of another kind, of which it isn't known what it stores
                    self.unknown.append(place)
        return x

    def _move(self, movement: MovementPlan, x: _Block, beside: bool = False) -> _Block:
        """Record a movement of x."""
        y_bytes = _nbytes(movement, self.worker)
        forward = _Buffers.of(movement, self.worker)
        if y_bytes == x.nbytes and not forward.received:
            y = x  # it is sent, and stays
        else:
            y = _Block(y_bytes, x.has_gradient)
            _read_from_memory(x)
            self.operations.append(_Operation((x,), (y,), forward.packed(x.nbytes, y_bytes)))

        def back() -> None:
            if (dy := self.cotangents.get(y)) is None:
                return
            scratch = forward.adjoint.packed(y_bytes, x.nbytes)
            if y is x or beside:
                self.operations.append(_Operation((dy,), (), scratch))
                return
            del self.cotangents[y]
            dx = _Block(x.nbytes)
            self.operations.append(_Operation((dy,), (dx,), scratch))
            self._add_cotangent(x, dx)

        self.backward.append(back)
        return y

    def _move_parameters(self, movement: MovementPlan, place: str) -> _Block:
        """Record the movement of a layer's parameters to the workers that compute; return this worker's copy."""
        nbytes = _nbytes(movement, self.worker)
        forward = _Buffers.of(movement, self.worker)
        moves = bool(forward.sent or forward.received)  # else the copies are the parameters
        # Weight and bias in one message are stored twice: packed, and taken apart; their gradients likewise.
        is_packed = moves and len(movement.output(self.worker).shape) == 1
        copy = _Block(nbytes * (1 + is_packed), True)
        self.operations.append(_Operation((), (copy,) if moves else (), forward.packed(nbytes, nbytes)))

        def back() -> None:
            if (cotangent := self.cotangents.pop(copy, None)) is not None:
                gradient = self._gradient(place)
                self.operations.append(_Operation((cotangent,), gradient, forward.adjoint.packed(nbytes, nbytes), True))

        self.backward.append(back)
        return copy

    def _gradient(self, place: str) -> list[_Block]:
        """Return the array of a layer's gradients, until the optimiser's update; nothing where it was made before."""
        if place in self.of_params:
            return []
        self.of_params[place] = _Block(self.gradients.get(place, 0))
        return [self.of_params[place]]

    def _compute(
        self, action: Computes, x: _Block, place: str, beside: Sequence[_Block] = (), copies: Sequence[_Block] = ()
    ) -> _Block:
        """Record a worker's arithmetic on x, on what arrived beside it, and on its copies of the parameters."""
        work = action.work(self.worker)
        if work is None:
            return x
        if work.saved is None:
            self.unknown.append(place)
        arguments = [x, *beside]
        has_gradient = any(argument.has_gradient for argument in arguments) or action.uses_params
        others = [_Block(work.saved)] if work.saved else []
        y = _Block(work.written, has_gradient)
        if work.y_is_recomputed:
            y.sources = (*arguments, *others)
        if not work.fuses_x:
            for argument in arguments:
                _read_from_memory(argument)
        self.operations.append(_Operation((*arguments, *copies), (y, *others), work.scratch, work.fuses_x))
        saved = [*(arguments if work.saves_x else ()), *((y,) if work.saves_y else ()), *others]
        if has_gradient:
            self.saved += [(place, block) for block in saved]
        self.backward.append(lambda: self._compute_back(work, arguments, copies, y, saved, place, action.uses_params))
        return y

    def _compute_back(
        self,
        work: Work,
        arguments: Sequence[_Block],
        copies: Sequence[_Block],
        y: _Block,
        saved: Sequence[_Block],
        place: str,
        uses_params: bool,
    ) -> None:
        """Record the gradients of arithmetic."""
        if (dy := self.cotangents.pop(y, None)) is None:
            return
        differentiated = [argument for argument in arguments if argument.has_gradient]
        cotangents = [_Block(argument.nbytes) for argument in differentiated]
        made = [*cotangents]
        if uses_params:
            of_copies = [_Block(copy.nbytes) for copy in copies]
            made += of_copies or self._gradient(place)
            self.cotangents |= dict(zip(copies, of_copies, strict=True))
        weights = copies if differentiated else ()
        scratch = max(work.scratch_x if differentiated else 0, work.scratch_params if uses_params else 0)
        self.operations.append(_Operation((*saved, *weights, dy), made, scratch, work.fuses_x))
        for argument, cotangent in zip(differentiated, cotangents, strict=True):
            self._add_cotangent(argument, cotangent)

    def _add(self, x: _Block, other: _Block) -> _Block:
        """Record a sum, of which the cotangent is that of both."""
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
            for stored in block.stored:
                if stored in made and stored not in seen:
                    seen.add(stored)
                    found[place] = found.get(place, 0) + stored.nbytes
        return found


class _Buffers(NamedTuple):
    """The bytes of the messages that one worker sends and receives in a movement: of all, and of the longest."""

    sent: int
    received: int
    longest_sent: int
    longest_received: int

    @classmethod
    def of(cls, movement: MovementPlan, worker: int) -> _Buffers:
        """Return those of a movement."""
        operations = movement.operations(worker)
        sent = [each.bytes_sent for each in operations]
        received = [(each.received if each.is_message else each.count) * each.itemsize for each in operations]
        return cls(sum(sent), sum(received), max(sent, default=0), max(received, default=0))

    @property
    def adjoint(self) -> _Buffers:
        """Those of the adjoint, which sends what the movement receives."""
        return _Buffers(self.received, self.sent, self.longest_received, self.longest_sent)

    def packed(self, x_bytes: int, y_bytes: int) -> int:
        """Return the bytes of the buffers of messages: packed at once from x, and received for y."""
        return min(self.sent, x_bytes) + max(min(self.received, y_bytes), self.longest_received)


def _most_live(operations: Sequence[_Operation]) -> int:
    """Return the bytes of the arrays that are live at the fullest time."""
    of_each = [(_stored(each.reads), _stored(each.makes, made=True), each) for each in operations]
    last: dict[_Block, int] = {}
    for number, (reads, makes, _) in enumerate(of_each):
        last |= dict.fromkeys((*reads, *makes), number)
    made = {block for _, makes, _ in of_each for block in makes}
    live = most = 0
    for number, (reads, makes, operation) in enumerate(of_each):
        ends = {block for block in (*reads, *makes) if last[block] == number and block in made}
        live += sum(block.nbytes for block in makes)
        sizes = {block.nbytes for block in ends if block not in makes}
        reused = max((block.nbytes for block in makes if operation.in_place and block.nbytes in sizes), default=0)
        most = max(most, live + operation.scratch - reused)
        live -= sum(block.nbytes for block in ends)
    return most


def _stored(blocks: Sequence[_Block], made: bool = False) -> tuple[_Block, ...]:
    """Return the arrays in memory in which `blocks` are; of those `made`, only those that are there themselves."""
    if made:
        return tuple(block for block in blocks if not block.sources)
    return tuple(stored for block in blocks for stored in block.stored)


def _read_from_memory(block: _Block) -> None:
    """Note that an array is read by an operation that takes its arguments from memory."""
    block.sources = ()


def _nbytes(movement: MovementPlan, worker: int) -> int:
    output = movement.output(worker)
    return output.size * output.dtype.itemsize


def _within(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _work_of(action: Traced, worker: int) -> Work | None:
    return next((does for does in action.forward(worker) if isinstance(does, Work)), None)
