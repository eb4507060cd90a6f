"""One worker's part of an exchange: local copies, and messages in rounds that can't deadlock.

An exchange is a linear operator F: it maps every worker's input block to every worker's output block. Each entry of F
is 0 or 1, and a *piece* is a box of ones: `output[dest box] += input[source box]`. The transposed operator F* is then
the same set of pieces reversed, as in `ExchangePlan.reverse`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import Any


class RowList(ABC):
    """A list of row numbers, as a value: along one dimension, a piece may have it in place of a range."""

    __slots__ = ()

    array: Any

    @property
    @abstractmethod
    def ascends(self) -> bool:
        """Whether the numbers are nondecreasing."""


Start = int | RowList
"""Row numbers: the first of them if they are consecutive, otherwise all."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that moves from a worker's input block to a worker's output block.

    - `source_start`: its start relative to the sender's input block; along one dimension it may be a list of rows.
    - `dest_start`: its start relative to the receiver's output block; or a list of rows.
    - `shape`: the same on both sides, and never empty.

    >>> piece = Piece(source_start=(4, 0), dest_start=(0, 1), shape=(1, 3))
    >>> piece.source, piece.dest
    ((slice(4, 5, None), slice(0, 3, None)), (slice(0, 1, None), slice(1, 4, None)))
    """

    source_start: tuple[Start, ...]
    dest_start: tuple[Start, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def source(self) -> tuple[slice | Any, ...]:
        """The piece as an index of the sender's input block."""
        return _index(self.source_start, self.shape)

    @property
    def dest(self) -> tuple[slice | Any, ...]:
        """The piece as an index of the receiver's output block."""
        return _index(self.dest_start, self.shape)

    @property
    def fills_box(self) -> bool:
        """Whether it is a box in the output block, not a list of rows."""
        return all(isinstance(start, int) for start in self.dest_start)

    @property
    def ascends(self) -> bool:
        """Whether the numbers of the rows that it fills ascend."""
        return all(start.ascends for start in self.dest_start if not isinstance(start, int))

    def reverse(self) -> Piece:
        """Return the same piece in the reverse direction."""
        return Piece(self.dest_start, self.source_start, self.shape)


def _index(starts: tuple[Start, ...], shape: tuple[int, ...]) -> tuple[slice | Any, ...]:
    sides = zip(starts, shape, strict=True)
    return tuple(slice(start, start + n) if isinstance(start, int) else start.array for start, n in sides)


@dataclass(frozen=True, slots=True)
class Message:
    """Everything that is sent from one worker to another in one exchange: its pieces, each row-major, concatenated.

    - `partner`: the world rank of the other worker.
    - `pieces`: one or more, in the same order on both sides. Several only if a periodic boundary folds a range.
    """

    partner: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """The number of elements of the packed message."""
        return sum(piece.size for piece in self.pieces)

    def reverse(self) -> Message:
        """Return the same message in the reverse direction."""
        return Message(self.partner, tuple(piece.reverse() for piece in self.pieces))


@dataclass(frozen=True, slots=True)
class Round:
    """One blocking step: a sendrecv, or only a send, or only a receive."""

    send: Message | None
    recv: Message | None

    def reverse(self) -> Round:
        """Return the same step with send and receive swapped."""
        return Round(
            send=None if self.recv is None else self.recv.reverse(),
            recv=None if self.send is None else self.send.reverse(),
        )


@dataclass(frozen=True)
class ExchangePlan:
    """One worker's part of an exchange: `output = 0`, then every copy and every received piece adds to it.

    - `in_shape`, `out_shape`: the shapes of this worker's blocks. A worker that owns (or needs) nothing has (0, ..., 0)
      there, with a zero-volume array of any shape as its block.
    - `copies`: pieces from this worker's input to its own output; never sent.
    - `rounds`: the messages, in order of execution, each round as one blocking step.
    - `in_disjoint`, `out_disjoint`: no element of the input (output) is in two pieces, counting copies and messages. If
      `out_disjoint`, adding is the same as writing.
    """

    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    copies: tuple[Piece, ...]
    rounds: tuple[Round, ...]
    in_disjoint: bool = True
    out_disjoint: bool = True

    def reverse(self) -> ExchangePlan:
        """Return the plan of the adjoint, from needed back to owned blocks, in which overlapping pieces add up.

        Round for round the same with send and receive swapped, so it can't deadlock either. `reverse` undoes itself.

        >>> there = Piece((0,), (2,), (1,))
        >>> plan = ExchangePlan((1,), (3,), (), (Round(send=Message(5, (there,)), recv=None),))
        >>> back = plan.reverse()
        >>> back.in_shape, back.rounds[0].recv.partner, back.rounds[0].recv.pieces[0].dest_start
        ((3,), 5, (0,))
        >>> back.reverse() == plan
        True
        """
        return ExchangePlan(
            in_shape=self.out_shape,
            out_shape=self.in_shape,
            copies=tuple(piece.reverse() for piece in self.copies),
            rounds=tuple(step.reverse() for step in self.rounds),
            in_disjoint=self.out_disjoint,
            out_disjoint=self.in_disjoint,
        )

    @property
    def sends(self) -> tuple[Message, ...]:
        """The messages that this worker sends, in order."""
        return tuple(step.send for step in self.rounds if step.send is not None)

    @property
    def recvs(self) -> tuple[Message, ...]:
        """The messages that this worker receives, in order."""
        return tuple(step.recv for step in self.rounds if step.recv is not None)

    @property
    def copied(self) -> int:
        """The number of elements that local copies move."""
        return sum(piece.size for piece in self.copies)

    @property
    def covers_output(self) -> bool:
        """Whether every element of the output is in exactly one piece, so that no zero fill is needed."""
        arriving = self.copied + sum(message.size for message in self.recvs)
        return self.out_disjoint and arriving == prod(self.out_shape)

    @property
    def is_identity(self) -> bool:
        """Whether the output is the input, and there are no messages."""
        whole = (Piece((0,) * len(self.in_shape), (0,) * len(self.in_shape), self.in_shape),)
        copies = whole if prod(self.in_shape) else ()
        return self.in_shape == self.out_shape and not self.rounds and self.copies == copies
