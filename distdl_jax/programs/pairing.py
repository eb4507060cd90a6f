"""Movements of the workers that are one: those whose operations meet. Then their adjoints must meet, too."""

from __future__ import annotations

from collections.abc import Sequence

Movement = tuple[int, int]
"""A worker, and the number that a movement has in its program."""


class Pairing:
    """The movements that have met, going forward.

    Two movements of equal plans have equal messages. Where some workers leave out the adjoint of the one, and others
    the adjoint of the other, the two that are left fit each other, and each worker gets another one's gradient.
    """

    def __init__(self) -> None:
        self._met: dict[Movement, dict[int, set[Movement]]] = {}  # by worker; the same dictionary for all that are one

    def meet(self, movements: Sequence[Movement]) -> None:
        """Note that operations of these have met: they are one."""
        known = {id(met): met for met in map(self._of, movements)}
        if len(known) == 1:
            return
        together: dict[int, set[Movement]] = {}
        for each in known.values():
            for worker, of_worker in each.items():
                together.setdefault(worker, set()).update(of_worker)
        for of_worker in together.values():
            for movement in of_worker:
                self._met[movement] = together

    def are_apart(self, one: Movement, other: Movement) -> bool:
        """Return whether adjoints of these must not meet: one has met another movement of that worker, not this."""
        of_one, of_other = self._met.get(one, {}), self._met.get(other, {})
        return of_one is not of_other and (other[0] in of_one or one[0] in of_other)

    def one_of_each(self) -> list[dict[int, int]]:
        """Return the movements, each by its number on its workers, which have one of them each."""
        found = {id(met): met for met in self._met.values()}.values()
        numbers = [{worker: [n for _, n in of_worker] for worker, of_worker in met.items()} for met in found]
        return [
            {worker: n[0] for worker, n in each.items()} for each in numbers if all(len(n) == 1 for n in each.values())
        ]

    def _of(self, movement: Movement) -> dict[int, set[Movement]]:
        return self._met.get(movement) or {movement[0]: {movement}}
