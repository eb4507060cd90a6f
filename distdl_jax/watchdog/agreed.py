"""What was agreed on while a function was traced, to be taken as it was when one worker traces the function again.

JAX keeps the traces of a function. A worker that traces one anew with the same arguments has lost them (its caches were
cleared, or an entry was evicted), and does alone what all have agreed on before: nobody will meet it. Nor need anybody,
for what a function is traced to depends on its arguments, and these are as they were, on all workers.

Where functions are traced within each other, the innermost one decides that was traced before: whatever of it the
others have kept or lost, they don't need to be met for it. What lies within was made anew in both of its traces.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from distdl_jax.compat import TracedFunction, functions_traced, is_traced
from distdl_jax.errors import PlanError

MOST_KEYS = 64
"""In how many ways one function may be traced of which the agreements are kept."""


class OthersArePast(BaseException):
    """Raised in the wait for an agreement that the others have made before, and will not make again."""


class Subject(NamedTuple):
    """What is agreed on: in which functions, within the one that it is kept for; of which workers, for what."""

    within: tuple[str, ...]
    team: tuple[int, ...]
    purpose: str


class Agreed(NamedTuple):
    """One agreement: what this worker said, and what was decided (pickled)."""

    contribution: Any
    decision: bytes


class Trace:
    """One trace of one function: what was agreed on in it, by subject, in order.

    - `before`: an earlier one with the same arguments, if there was one that came to its end, and was like this one.
    - `has_changed`: whether there was one, which was not.
    """

    def __init__(self, traced: TracedFunction, before: Trace | None) -> None:
        self.name = traced.name
        self.before = before if before is not None and before.is_over else None
        if self.before is not None:
            self.before.before = None
        self.has_changed = False
        self.made: dict[Subject, list[Agreed]] = {}
        self._record: Any = traced.record
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether it came to its end: a function that raises is traced again, by all workers."""
        if self._record is not None and is_traced(self._record):
            self._is_over, self._record = True, None
        return self._is_over

    def close(self) -> None:
        """It has ended, in one way or the other."""
        if not self.is_over:
            self._record = None

    def keep(self, subject: Subject, agreed: Agreed) -> None:
        """One more agreement."""
        self.made.setdefault(subject, []).append(agreed)

    def earlier(self, subject: Subject, contribution: Any) -> Agreed | None:
        """The same in the earlier trace; None where this worker said something else then."""
        assert self.before is not None
        known, place = self.before.made.get(subject, ()), len(self.made.get(subject, ()))
        return known[place] if place < len(known) and _equal(known[place].contribution, contribution) else None


class _Open(threading.local):
    """The traces of this thread that go on."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []


class Traces:
    """Those of one worker, as long as the functions live."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Callable[..., Any], dict[Hashable, Trace]] = WeakKeyDictionary()
        self._of: WeakKeyDictionary[Any, Trace] = WeakKeyDictionary()
        self._open = _Open()

    def now(self) -> list[Trace]:
        """Those that this thread makes, each within the one before."""
        going_on = [self._of.get(traced.trace) or self._begun(traced) for traced in functions_traced()]
        for trace in self._open.traces:
            if not any(trace is other for other in going_on):
                trace.close()
        self._open.traces = going_on
        return going_on

    def _begun(self, traced: TracedFunction) -> Trace:
        known = self._known.setdefault(traced.function, {})
        trace = Trace(traced, known.pop(traced.key, None))
        known[traced.key] = self._of[traced.trace] = trace
        if len(known) > MOST_KEYS:
            del known[next(iter(known))]
        return trace


@dataclass
class Agreements:
    """How a function of dj.jit is traced.

    - `asks`: whether it is traced anew in a call that counts: then the coordinator says whether the others are past it.
      (What it calls of jax.jit is replayed at once: others that trace it anew, too, may have kept that.)
    - `depth`: within how many functions what it traces is, itself included.
    - `alone`: whether it has said so. `replayed`: whether the last agreement was taken as it was.
    """

    asks: bool = False
    depth: int = 0
    alone: bool = False
    replayed: bool = False

    def agree(
        self,
        traces: list[Trace],
        team: tuple[int, ...],
        purpose: str,
        contribution: Any,
        meet: Callable[[bool], Any],
        fail: Callable[[str], Any],
    ) -> Any:
        """What is decided, by `meet` (which is told whether this worker now says something else than before), or as
        before; `fail` where it alone does."""
        known = _earlier(traces, team, purpose, contribution, self.depth if self.asks and not self.alone else 0)
        if known is None and self.asks and not self.alone:
            try:
                return self._kept(traces, team, purpose, contribution, meet(False))
            except OthersArePast:
                self.alone = True
                known = _earlier(traces, team, purpose, contribution)
        if known is not None:
            self.replayed = True
            _keep(traces, team, purpose, known)
            return pickle.loads(known.decision)
        if self.alone:
            fail(
                f"A worker traces a function anew, at {purpose}, with arguments as before, but what it communicates "
                "has changed, and the others are past that call. What a function takes from outside its arguments must "
                "change on all workers at once."
            )
            raise PlanError(purpose)
        for trace in traces:
            if trace.before is not None:
                trace.before, trace.has_changed = None, True  # on all workers, or this one waits
        changed = any(trace.has_changed for trace in traces)
        return self._kept(traces, team, purpose, contribution, meet(changed))

    def _kept(self, traces: list[Trace], team: tuple[int, ...], purpose: str, contribution: Any, decision: Any) -> Any:
        self.replayed = False
        _keep(traces, team, purpose, Agreed(contribution, pickle.dumps(decision)))
        return decision


def _earlier(
    traces: list[Trace], team: tuple[int, ...], purpose: str, contribution: Any, first: int = 0
) -> Agreed | None:
    for place in reversed(range(first, len(traces))):
        if traces[place].before is not None:
            return traces[place].earlier(Subject(_names(traces, place), team, purpose), contribution)
    return None


def _keep(traces: list[Trace], team: tuple[int, ...], purpose: str, agreed: Agreed) -> None:
    for place, trace in enumerate(traces):
        trace.keep(Subject(_names(traces, place), team, purpose), agreed)


def _names(traces: list[Trace], place: int) -> tuple[str, ...]:
    return tuple(trace.name for trace in traces[place + 1 :])


def _equal(one: Any, other: Any) -> bool:
    try:
        if one == other:
            return True
    except ValueError:  # arrays
        pass
    return pickle.dumps(one) == pickle.dumps(other)  # errors
