"""Trees: who sends to whom, and when, to spread one worker's data over a team or to sum or gather a team's data.

A broadcast over n participants takes ceil(log2 n) steps; the reduction is the same tree, walked backwards. Trees of
point-to-point messages serve small teams because a receiver needs no buffer but the one it receives into.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple


class Step(NamedTuple):
    """One blocking message of one participant: the direction, and the position of the partner."""

    action: Literal["send", "receive"]
    partner: int


@lru_cache(maxsize=4096)
def broadcast_steps(size: int, position: int) -> tuple[Step, ...]:
    """Return what the participant at `position` of `size` does, in order, when position 0 has the data.

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
    """Return what the participant at `position` of `size` does, in order, to bring the sum to position 0.

    >>> reduction_steps(4, 2)
    (Step(action='receive', partner=3), Step(action='send', partner=0))
    """
    opposite: dict[str, Literal["send", "receive"]] = {"send": "receive", "receive": "send"}
    return tuple(Step(opposite[step.action], step.partner) for step in reversed(broadcast_steps(size, position)))


BRANCHES = 32
"""How many others a participant of a gathering hears, at most: a team that is not larger is a star."""


def gathered(team: tuple[int, ...], worker: int) -> tuple[int | None, tuple[int, ...]]:
    """Return whom `worker` tells what it has gathered (the team's first: nobody), and whom it hears before.

    >>> gathered((7, 3, 5), 3)
    (7, ())
    >>> gathered(tuple(range(100)), 3)
    (0, (97, 98, 99))
    """
    position = team.index(worker)
    first = BRANCHES * position + 1
    return team[(position - 1) // BRANCHES] if position else None, team[first : first + BRANCHES]
