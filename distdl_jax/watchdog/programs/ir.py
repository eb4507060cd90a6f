"""What one worker's program communicates: its operations in order, with its loops and branches.

Read off a traced program (`tracing.program_reader`), compared between workers before anything runs (`matching`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from distdl_jax.plans.worker_ranks import Workers


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operation comes from; ignored in comparisons.

    - `line`: the user's source line, `train.py:31 in loss`; empty if it is not known.
    - `layer`: the layers and primitives around it, outermost first.
    - `backward`: whether it belongs to a derivative.
    """

    line: str = ""
    layer: str = ""
    backward: bool = False


Origin = int
"""Where a value comes from, as a set of bits: bit i for leaf i of a program's arguments, and bit n + k, after these n,
for what comes out of its movement k. What went into that is not in the set."""


class Result(NamedTuple):
    """A leaf of a program's result: its path, its shape and dtype, and where it comes from."""

    path: str
    kind: str
    origin: Origin


class LayerCall(NamedTuple):
    """A call of a layer: its description, the same on all workers, its line, and where its first parameter is from."""

    layer: str
    line: str
    origin: Origin


class Flow(NamedTuple):
    """Where what a program moves, and its results, come from.

    - `arguments`: the paths of the leaves of its arguments.
    - `movements`: of each call of a movement, in order, where the array comes from that it is given.
    """

    arguments: tuple[str, ...] = ()
    movements: tuple[Origin, ...] = ()
    layers: tuple[LayerCall, ...] = ()
    results: tuple[Result, ...] = ()


class PartOf(NamedTuple):
    """The movement that an operation is part of, by its number in this worker's program, or its adjoint."""

    number: int
    is_adjoint: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """One blocking MPI operation of one worker.

    - `kind`: MPI's name for it: send, recv, sendrecv, or a collective's.
    - `team`: the workers of its communicator (world ranks).
    - `dest`, `source`: the partners' world ranks; None if there is none. `from_any`: whether it receives from
      whoever of the team is the first to send.
    - `send_tag`, `recv_tag`: of its messages; None if one with any tag is received.
    - `root`: of a collective that has one, a world rank.
    - `count`, `dtype`: of what is sent, or, by the root's or each worker's account, of what a collective moves.
    - `received`, `received_dtype`: elements that a message received holds, and their dtype if it is not `dtype`.
    - `op`: what a reduction computes.
    - `movements`: the movement that it is part of, in each of the ways to tell that a reader of programs knows; none
      if it is no part of one. `call`: that movement's number in the program's `Flow`. Both
      ignored in comparisons.
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
        """The bytes that this worker hands to MPI."""
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
    """A loop: `length` times `body`; None if only the running program knows how often."""

    length: int | None
    body: Program
    place: Place = field(default=Place(), compare=False)


@dataclass(frozen=True)
class Cond:
    """One of `branches`, as the data decide; every worker is to take the same one."""

    branches: tuple[Program, ...]
    place: Place = field(default=Place(), compare=False)


Program = tuple[Operation | Loop | Cond, ...]


def operations(program: Program, *, first_branch: bool = False) -> Iterator[tuple[Operation, int | None]]:
    """Yield every operation of a program and how often it runs: once for each pass of the loops around it; None where
    that is not known before. Of conditionals all branches, or the first one, as if it were taken."""

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
    """Return how many operations are written in a program, each once."""
    return sum(1 for _ in operations(program))


def simplified(items: Program) -> Program:
    """Return the program without loops and conditionals that don't communicate; of equal branches one is left."""
    left: list[Operation | Loop | Cond] = []
    for item in items:
        match item:
            case Operation():
                left.append(item)
            case Loop(length, body, place):
                if (body := simplified(body)) and length != 0:
                    left.append(Loop(length, body, place))
            case Cond(branches, place):
                branches = tuple(simplified(branch) for branch in branches)
                if all(branch == branches[0] for branch in branches):
                    left.extend(branches[0])
                else:
                    left.append(Cond(branches, place))
    return tuple(left)


def most_branches(program: Program) -> int:
    """Return the number of branches of the conditional that has most."""
    most = 0
    for item in program:
        match item:
            case Loop(_, body):
                most = max(most, most_branches(body))
            case Cond(branches):
                most = max(most, len(branches), *(most_branches(branch) for branch in branches))
    return most


UNKNOWN_LENGTH = 2
"""How many passes are played of a loop whose length is not known: what one leaves behind comes upon the next."""


class Pass:
    """How far a worker is in a program or in the body of a loop: the next item, and the passes left after this one."""

    __slots__ = ("items", "left", "next")

    def __init__(self, items: Program, left: int) -> None:
        self.items, self.next, self.left = items, 0, left


class Cursor:
    """How far one worker is in its program, and which halves of its operation still wait."""

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
        """Everything that decides what it does next but how many passes are left."""
        return (*((id(p.items), p.next) for p in self.stack), self.sends, self.receives, self.joins)

    def passes_left(self) -> tuple[int, ...]:
        return tuple(p.left for p in self.stack)

    def place(self) -> int:
        """Return the number of the operation that it is at, from 1 in the order in which they are written."""
        place = 1
        for p in self.stack:
            place += count_operations(p.items[: p.next - 1])
            if p.next and isinstance(item := p.items[p.next - 1], Cond):
                place += count_operations(sum(item.branches[: min(self._branch, len(item.branches) - 1)], ()))
        return place
