"""Agreements of a checked function's trace, replayed when one worker traces the function again alone.

JAX keeps the trace of a function. A worker that has lost it (its caches were cleared, or an entry was evicted) traces
the function again, and nobody meets it: the others agreed on everything before. Nor need anybody, for the arguments, on
which a trace depends, are as they were on all workers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distdl_jax.errors import PlanError


class OthersArePast(BaseException):
    """Raised in the wait for an agreement that the others have made before, and will not make again."""


class Agreed(NamedTuple):
    """One agreement: of which workers, for what, what this worker said, and what was decided (pickled)."""

    team: tuple[int, ...]
    label: str
    contribution: Any
    decision: bytes


@dataclass
class Agreements:
    """Those of one trace of a checked function.

    - `before`: those of an earlier trace with the same arguments that have not been replayed yet; None where there was
      no such trace.
    - `asks`: whether the trace belongs to a call that counts: then they are replayed once the coordinator says that the
      others are past the call, and at once otherwise.
    - `made`: those of this trace, in order. `alone`: whether the others are past it.
    - `replayed`: whether the last one was. `has_changed`: whether one was not as before.
    """

    before: list[Agreed] | None = None
    asks: bool = False
    made: list[Agreed] = field(default_factory=list)
    alone: bool = False
    replayed: bool = False
    has_changed: bool = False

    def agree(
        self,
        team: tuple[int, ...],
        label: str,
        contribution: Any,
        meet: Callable[[bool], Any],
        fail: Callable[[str], Any],
    ) -> Any:
        """Return what is decided: by `meet`, in which the workers of `team` meet, or as before.

        `meet` is told whether this worker says something else than before; `fail` makes all workers raise.
        """
        known = self._earlier(team, label, contribution)
        if not self.alone and (self.asks or known is None):
            self.has_changed = self.has_changed or (self.before is not None and not self.asks)
            try:
                agreed = Agreed(team, label, contribution, pickle.dumps(meet(self.has_changed)))
            except OthersArePast:
                self.alone = True
            else:
                return self._keep(agreed, known, replayed=False)
        if known is None:
            fail(
                f"A worker traces a function anew, at {label}, with arguments as before, but what it communicates "
                "has changed, and the others are past that call. What a function takes from outside its arguments must "
                "change on all workers at once."
            )
            raise PlanError(label)
        return self._keep(known, known, replayed=True)

    def _earlier(self, team: tuple[int, ...], label: str, contribution: Any) -> Agreed | None:
        """Return the first of those before in which this worker said the same, unless one was not as before."""
        if self.before is None or self.has_changed:
            return None
        alike = (agreed for agreed in self.before if agreed[:2] == (team, label))
        return next((agreed for agreed in alike if _equal(agreed.contribution, contribution)), None)

    def _keep(self, agreed: Agreed, known: Agreed | None, replayed: bool) -> Any:
        if self.before is not None and known is not None:
            self.before = [other for other in self.before if other is not known]
        self.replayed = replayed
        self.made.append(agreed)
        return pickle.loads(agreed.decision)


def _equal(one: Any, other: Any) -> bool:
    try:
        if one == other:
            return True
    except ValueError:  # arrays
        pass
    return pickle.dumps(one) == pickle.dumps(other)  # errors
