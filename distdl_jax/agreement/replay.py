"""Cache of trace-time agreements, replayed when one worker retraces a function of `dj.jit` alone.

JAX caches the trace of a function. A worker that has lost it (its caches were cleared, or an entry was evicted) traces
the function again, and no other worker meets it. None needs to: a trace depends on the arguments, which are as before.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distdl_jax.errors import PlanError


class OthersArePast(BaseException):
    """Interrupts the wait for an agreement that the others have made before, and will not make again."""


class Agreed(NamedTuple):
    """One agreement: its team and label, this worker's contribution, and the decision (pickled)."""

    team: tuple[int, ...]
    label: str
    contribution: Any
    decision: bytes


@dataclass
class Agreements:
    """The agreements of one trace of a checked function.

    - `before`: the agreements of an earlier trace with the same arguments that have not been replayed yet; None without
      such a trace.
    - `asks`: whether the trace belongs to a counted call: then agreements are replayed once the coordinator says that
      the others are past the call, and at once otherwise.
    - `made`: the agreements of this trace, in order. `alone`: whether the others are past it.
    - `replayed`: whether the last one was replayed. `has_changed`: whether one was not as before.
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
        """Return the decision of `meet`, in which the workers of `team` meet, or of the same agreement before.

        The argument of `meet` is whether this worker's contributions have changed; `fail` makes all workers raise.
        """
        known = self._earlier(team, label, contribution)
        if not self.alone and (self.asks or known is None):
            self.has_changed = self.has_changed or (self.before is not None and not self.asks)
            try:
                agreed = Agreed(team, label, contribution, pickle.dumps(meet(self.has_changed)))
            except OthersArePast:
                self.alone = True
            else:
                return self._record(agreed, known, replayed=False)
        if known is None:
            fail(
                f"A worker traces a function anew, at {label}, with arguments as before, but what it communicates "
                "has changed, and the others are past that call. What a function takes from outside its arguments must "
                "change on all workers at once."
            )
            raise PlanError(label)
        return self._record(known, known, replayed=True)

    def _earlier(self, team: tuple[int, ...], label: str, contribution: Any) -> Agreed | None:
        """Return the first agreement before with the same contribution, unless one was not as before."""
        if self.before is None or self.has_changed:
            return None
        alike = (agreed for agreed in self.before if agreed[:2] == (team, label))
        return next((agreed for agreed in alike if _equal(agreed.contribution, contribution)), None)

    def _record(self, agreed: Agreed, known: Agreed | None, replayed: bool) -> Any:
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
