"""Which movements of the workers are one: those whose operations meet. Then so must their adjoints."""

from __future__ import annotations

from collections.abc import Sequence

Movement = tuple[int, int]
"""A worker, and the number that a movement has in its program."""


class Pairing:
    """What has been seen to meet, going forward.

    Two movements of equal plans have equal messages. Where some workers leave out the adjoint of the one, and others
    that of the other, the two that are left fit each other, and each worker gets another one's gradient.
    """

    def __init__(self) -> None:
        self._met: dict[Movement, dict[int, set[Movement]]] = {}  # those that are one share it, by worker

    def meet(self, movements: Sequence[Movement]) -> None:
        """Operations of these have met: they are one."""
        known = {id(met): met for met in map(self._of, movements)}
        if len(known) == 1:
            return
        together: dict[int, set[Movement]] = {}
        for each in known.values():
            for worker, its in each.items():
                together.setdefault(worker, set()).update(its)
        for its in together.values():
            for movement in its:
                self._met[movement] = together

    def are_apart(self, one: Movement, other: Movement) -> bool:
        """Whether adjoints of these must not meet: one of them has met another movement of that worker, not this."""
        ours, theirs = self._met.get(one, {}), self._met.get(other, {})
        return ours is not theirs and (other[0] in ours or one[0] in theirs)

    def _of(self, movement: Movement) -> dict[int, set[Movement]]:
        return self._met.get(movement) or {movement[0]: {movement}}
