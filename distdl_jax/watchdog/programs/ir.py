"""The communication of one worker's program: its operations in order, with its loops and branches.

Extracted from a traced program (`tracing.program_reader`), compared between workers before anything runs (`matching`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from distdl_jax.plans.worker_ranks import Workers


@dataclass(frozen=True, slots=True)
class Place:
    """The origin of an operation; ignored in comparisons.

    - `line`: the user's source line, `train.py:31 in loss`; empty if it is not known.
    - `layer`: the layers and primitives around it, outermost first.
    - `backward`: whether it belongs to a derivative.
    """

    line: str = ""
    layer: str = ""
    backward: bool = False


Origin = int
"""The origin of a value, as a set of bits: bit i for leaf i of a program's arguments, and after these n, bit n + k for
the result of movement k, or for a constant that has this number. The origin of a movement's input is not included."""


class Result(NamedTuple):
    """A leaf of a program's result: its path, its shape and dtype, and its origin."""

    path: str
    kind: str
    origin: Origin


class LayerCall(NamedTuple):
    """A call of a layer: its description, the same on all workers, its line, and the origin of its first parameter."""

    layer: str
    line: str
    origin: Origin


class Flow(NamedTuple):
    """The origins of the inputs of movements, and of the results, in a program.

    - `arguments`: the paths of the leaves of its arguments.
    - `movements`: the origin of the input of each call of a movement, in order; 0 at the numbers of constants.
    - `constants`: the numbers and the paths of the constants that have one.
    - `branches`: the flow where all conditionals take branch 0, 1, ..., if these deliver different values.
    """

    arguments: tuple[str, ...] = ()
    movements: tuple[Origin, ...] = ()
    layers: tuple[LayerCall, ...] = ()
    results: tuple[Result, ...] = ()
    constants: tuple[tuple[int, str], ...] = ()
    branches: tuple[Flow, ...] = ()

    def where(self, branch: int) -> Flow:
        """Return the flow where all conditionals take this branch, or their last one."""
        return self.branches[min(branch, len(self.branches) - 1)] if self.branches else self


class PartOf(NamedTuple):
    """The movement of which an operation is part, by its number in this worker's program, or its adjoint."""

    number: int
    is_adjoint: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """One blocking MPI operation of one worker.

    - `kind`: its MPI name: send, recv, sendrecv, or a collective's.
    - `team`: the workers of its communicator (world ranks).
    - `dest`, `source`: the partners' world ranks; None if there is none. `from_any`: whether it receives from any
      worker of the team that sends first.
    - `send_tag`, `recv_tag`: of its messages; None if a message with any tag is received.
    - `root`: a world rank, for a collective that has one.
    - `count`, `dtype`: of the sent data, or for a collective, of the data as given by the root or each worker.
    - `received`, `received_dtype`: the number of received elements, and their dtype if it is not `dtype`.
    - `op`: the operation of a reduction.
    - `movements`: the movement of which it is part, in each of the reader's ways to distinguish movements; none if it
      is not part of one. `call`: that movement's number in the program's `Flow`. Both ignored in comparisons.
    """

    kind: str
    team: Workers
    dest: int | None = None
    source: int | None = None
    send_tag: int = 0
    recv_tag: int | None = 0
    root: int | None = None
    count: int = 0
    received: int = 0
    dtype: str = ""
    received_dtype: str = ""
    itemsize: int = 0
    op: str = ""
    from_any: bool = False
    movements: tuple[PartOf, ...] = field(default=(), compare=False, repr=False)
    call: int | None = field(default=None, compare=False, repr=False)
    place: Place = field(default=Place(), compare=False)

    def __reduce__(self) -> tuple[object, ...]:
        return Operation, tuple(getattr(self, name) for name in self.__slots__)

    @property
    def is_message(self) -> bool:
        """Whether it is a message between two workers, not a collective of a team."""
        return self.kind in ("send", "recv", "sendrecv")

    @property
    def bytes_sent(self) -> int:
        """The bytes that this worker passes to MPI."""
        if self.is_message:
            return self.count * self.itemsize if self.dest is not None else 0
        return self.count * self.itemsize

    def __str__(self) -> str:
        return f"{self.kind}{self._partners()}{self._amount()}"

    def _partners(self) -> str:
        if self.is_message:
            sent = "" if self.dest is None else f" to worker {self.dest}"
            received = "" if self.source is None else f" from worker {self.source}"
            received = " from any worker" if self.from_any else received
            return f"{sent}{' and' if sent and received else ''}{received}"
        root = "" if self.root is None else f" with root {self.root}"
        return f" in the team {list(self.team)}{root}"

    def _amount(self) -> str:
        if self.kind == "sendrecv" and self.received_dtype not in ("", self.dtype):
            return f" ({self.count} x {self.dtype} and {self.received} x {self.received_dtype})"
        if self.kind == "sendrecv" and self.count != self.received:
            return f" ({self.count} and {self.received} x {self.dtype})"
        return f" ({self.received if self.kind == 'recv' else self.count} x {self.dtype})"


@dataclass(frozen=True)
class Loop:
    """A loop: `length` times `body`; None if the number is known only at run time."""

    length: int | None
    body: Program
    place: Place = field(default=Place(), compare=False)


@dataclass(frozen=True)
class Cond:
    """One of `branches`, depending on the data; every worker must take the same one."""

    branches: tuple[Program, ...]
    place: Place = field(default=Place(), compare=False)


Program = tuple[Operation | Loop | Cond, ...]


def operations(program: Program, *, first_branch: bool = False) -> Iterator[tuple[Operation, int | None]]:
    """Yield every operation of a program and how often it runs: once for each pass of the loops around it; None if
    unknown in advance. For conditionals all branches, or the first one, as if it were taken."""

    def walk(program: Program, times: int | None) -> Iterator[tuple[Operation, int | None]]:
        for item in program:
            match item:
                case Operation():
                    yield item, times
                case Loop(length, body):
                    yield from walk(body, None if length is None or times is None else times * length)
                case Cond(branches):
                    taken = branches[:1] if first_branch else branches
                    for branch in taken:
                        yield from walk(branch, None if len(taken) > 1 else times)

    return walk(program, 1)


def count_operations(program: Program) -> int:
    """Return the number of distinct operations in a program."""
    return sum(1 for _ in operations(program))


def simplified(items: Program, *, merge: bool = True) -> Program:
    """Return the program without loops and conditionals that don't communicate; with `merge`, equal branches are one.

    Equal operations may move other values, so branches are not merged if these are compared.
    """
    left: list[Operation | Loop | Cond] = []
    for item in items:
        match item:
            case Operation():
                left.append(item)
            case Loop(length, body, place):
                if (body := simplified(body, merge=merge)) and length != 0:
                    left.append(Loop(length, body, place))
            case Cond(branches, place):
                branches = tuple(simplified(branch, merge=merge) for branch in branches)
                if not any(branches) or (merge and all(branch == branches[0] for branch in branches)):
                    left.extend(branches[0])
                else:
                    left.append(Cond(branches, place))
    return tuple(left)


def most_branches(program: Program) -> int:
    """Return the largest number of branches of a conditional."""
    most = 0
    for item in program:
        match item:
            case Loop(_, body):
                most = max(most, most_branches(body))
            case Cond(branches):
                most = max(most, len(branches), *(most_branches(branch) for branch in branches))
    return most


UNKNOWN_LENGTH = 2
"""The number of simulated passes of a loop of unknown length, so that leftovers of one meet the next."""


class Pass:
    """A worker's progress in a program or the body of a loop: the next item, and the passes left after this one."""

    __slots__ = ("items", "left", "next")

    def __init__(self, items: Program, left: int) -> None:
        self.items, self.next, self.left = items, 0, left


class Cursor:
    """The progress of one worker in its program, and the halves of its operation that still wait."""

    def __init__(self, rank: int, program: Program, total: int, branch: int) -> None:
        self.rank = rank
        self.operation: Operation | None = None
        self.sends = self.receives = self.joins = False
        self.total = total
        self.new_pass: Pass | None = None  # the pass of a loop that has started since the last operation
        self._branch = branch
        self.stack = [Pass(program, 0)]

    def advance(self) -> bool:
        """Go to the next operation; false at the end of the program."""
        self.operation = None
        while self.stack:
            top = self.stack[-1]
            # The end of a body: another pass, or back to what contains it.
            if top.next == len(top.items):
                if top.left:
                    top.left -= 1
                    top.next = 0
                    self.new_pass = top
                else:
                    self.stack.pop()
                continue
            item = top.items[top.next]
            top.next += 1
            match item:
                case Operation():
                    self.operation = item
                    self.sends, self.receives = item.dest is not None, item.source is not None or item.from_any
                    self.joins = not item.is_message
                    # An operation between two ends of nothing is done at once.
                    if self.sends or self.receives or self.joins:
                        return True
                case Loop(length, body):
                    self.stack.append(Pass(body, (UNKNOWN_LENGTH if length is None else length) - 1))
                case Cond(branches):
                    self.stack.append(Pass(branches[min(self._branch, len(branches) - 1)], 0))
        return False

    @property
    def waits(self) -> bool:
        return self.sends or self.receives or self.joins

    def position(self) -> tuple[object, ...]:
        """Everything that determines its next actions, except the number of passes left."""
        return (*((id(p.items), p.next) for p in self.stack), self.sends, self.receives, self.joins)

    def passes_left(self) -> tuple[int, ...]:
        return tuple(p.left for p in self.stack)

    def place(self) -> int:
        """Return the number of its current operation, from 1 in program order."""
        place = 1
        for p in self.stack:
            place += count_operations(p.items[: p.next - 1])
            if p.next and isinstance(item := p.items[p.next - 1], Cond):
                place += count_operations(sum(item.branches[: min(self._branch, len(item.branches) - 1)], ()))
        return place
