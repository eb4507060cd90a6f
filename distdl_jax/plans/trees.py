"""Trees of messages to spread one worker's data over a team, or to sum or gather a team's data.

A broadcast over n participants takes ceil(log2 n) steps; the reduction is the same tree, reversed. Trees of
point-to-point messages are used for small teams because a receiver needs only its receive buffer. An all-gather by
recursive doubling is a chain of ceil(log2 p) exchanges, in each of which blocks become up to twice as long.

Source: Bruck et al. (1997), "Efficient algorithms for all-to-all communications in multiport message-passing systems".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from distdl_jax.plans.decomposition import Range
from distdl_jax.plans.messages import ExchangePlan, Message, Piece, Round
from distdl_jax.plans.worker_ranks import Workers


class Step(NamedTuple):
    """One blocking message of one participant: the direction, and the position of the partner."""

    action: Literal["send", "receive"]
    partner: int


@lru_cache(maxsize=4096)
def broadcast_steps(size: int, position: int) -> tuple[Step, ...]:
    """Return the steps of the participant at `position` of `size`, in order, when position 0 has the data.

    Every message goes from a lower to a higher position, and a participant receives before it sends, so that the
    blocking messages cannot form a cycle.

    >>> broadcast_steps(4, 0)
    (Step(action='send', partner=2), Step(action='send', partner=1))
    >>> broadcast_steps(4, 2)
    (Step(action='receive', partner=0), Step(action='send', partner=3))
    """
    steps = []
    distance = 1 << max(size - 1, 0).bit_length()
    while distance := distance >> 1:
        if position % (2 * distance) == distance:
            steps.append(Step("receive", position - distance))
        elif position % (2 * distance) == 0 and position + distance < size:
            steps.append(Step("send", position + distance))
    return tuple(steps)


@lru_cache(maxsize=4096)
def reduction_steps(size: int, position: int) -> tuple[Step, ...]:
    """Return the steps of the participant at `position` of `size`, in order, to bring the sum to position 0.

    >>> reduction_steps(4, 2)
    (Step(action='receive', partner=3), Step(action='send', partner=0))
    """
    opposite: dict[str, Literal["send", "receive"]] = {"send": "receive", "receive": "send"}
    return tuple(Step(opposite[step.action], step.partner) for step in reversed(broadcast_steps(size, position)))


BRANCHES = 32
"""The largest number of senders to one participant of a gather: a team that is not larger is a star."""


def gathered(team: tuple[int, ...], worker: int) -> tuple[int | None, tuple[int, ...]]:
    """Return to whom `worker` sends its gathered data (the team's first: None), and from whom it receives before.

    >>> gathered((7, 3, 5), 3)
    (7, ())
    >>> gathered(tuple(range(100)), 3)
    (0, (97, 98, 99))
    """
    position = team.index(worker)
    first = BRANCHES * position + 1
    return team[(position - 1) // BRANCHES] if position else None, team[first : first + BRANCHES]


def doubling_steps(
    line: Workers, ranges: Sequence[Range], place: int, shape: tuple[int, ...], d: int
) -> tuple[ExchangePlan, ...]:
    """Return the exchanges that give the worker at `place` of a line the blocks of all its workers along dimension `d`.

    Before the exchange of distance m, 1, 2, 4, ..., the worker at place i holds the blocks i to i + m - 1 (modulo p).
    It sends them to place i - m and gets the blocks of place i + m; in the last exchange only the missing ones, and all
    are put in their final places. So a worker sends each block but one once in total, any blocks may be empty, and p
    need not be a power of 2. The reverse steps, in reverse order, are a reduce-scatter by recursive halving.

    They can't deadlock: in each exchange all workers call one sendrecv, or its nonempty half, with the places at
    distance m, and all workers process the exchanges in the same order.

    - `line`: the world ranks of the workers, in order.
    - `ranges`: of their blocks along `d`, consecutive from 0 on.
    - `shape`: of the block of the worker at `place`.

    >>> steps = doubling_steps((7, 8, 9), ((0, 2), (2, 4), (4, 5)), 0, (2,), 0)
    >>> [(step.sends[0].partner, step.recvs[0].partner, step.out_shape) for step in steps]
    [(9, 8, (4,)), (8, 9, (5,))]
    """
    p, whole = len(line), ranges[-1][1]

    def run(first: int, count: int) -> list[Range]:
        """Return the ranges of `count` blocks from place `first` on, merged if consecutive."""
        first %= p
        last = first + count - 1
        if last < p:
            return [(ranges[first][0], ranges[last][1])]
        return [(ranges[first][0], whole), (0, ranges[last - p][1])]

    def length(runs: list[Range]) -> int:
        return sum(stop - start for start, stop in runs)

    def pieces(runs: list[Range], at: int, ends: bool) -> tuple[Piece, ...]:
        """Return the pieces of the sender's first entries, `runs`, at `at`, or for `ends` at their final places."""
        pieces, source = [], 0
        for start, stop in runs:
            size = (*shape[:d], stop - start, *shape[d + 1 :])
            if 0 not in size:
                pieces.append(Piece(_corner(shape, d, source), _corner(shape, d, start if ends else at + source), size))
            source += stop - start
        return tuple(pieces)

    steps, m = [], 1
    while m < p:
        # The last exchange may need fewer blocks than there are, and leaves everything where it belongs.
        count, ends = min(m, p - m), 2 * m >= p
        own, after = run(place, m), run(place, m + count)
        sent = pieces(run(place, count), length(run(place - m, m)), ends)
        coming = pieces(run(place + m, count), length(own), ends)
        send = Message(line[(place - m) % p], sent) if sent else None
        recv = Message(line[(place + m) % p], coming) if coming else None
        steps.append(
            ExchangePlan(
                (*shape[:d], length(own), *shape[d + 1 :]),
                (*shape[:d], length(after), *shape[d + 1 :]),
                pieces(own, 0, ends),
                (Round(send, recv),) if sent or coming else (),
                in_disjoint=not sent,
            )
        )
        m *= 2
    return tuple(steps)


def _corner(shape: tuple[int, ...], d: int, start: int) -> tuple[int, ...]:
    return tuple(start if e == d else 0 for e in range(len(shape)))
