"""The timeout: all workers say what they do, and then it is decided who waits, and has waited for too long.

A worker announces a wait that has lasted for a part of the limit. From then on the coordinator asks all workers time
and again. The answers say how long each wait has lasted, and how long ago each worker has compiled: a wait counts from
when nobody compiles any more, but for one of many limits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.watch.call_log import Calls
from distdl_jax.watchdog.watch.clock import ASKED, COMPILATION, FIRST_LINE
from distdl_jax.watchdog.watch.deadlock import Kind, State
from distdl_jax.watchdog.watch.dependencies import Dependencies, Plans
from distdl_jax.watchdog.watch.messages import Answer, OpenQuestion, Wait

UNHEARD = 12.0
"""After how many seconds without an answer it is said that a worker was not heard from."""

NEVER = float("inf")


Place = tuple[Kind, str, str, str]
"""The kind of a wait, its label, function and source line: the same in each step of a loop."""


def place_of(state: State) -> Place:
    """Return the place of the wait that a worker is in."""
    return state.kind, state.label, state.function, state.where


@dataclass(frozen=True)
class Timeout:
    """The questions to all workers.

    - `question`: the question that goes on, if any. `asked_at`: when all were asked last; `due_at`: when they are next.
    - `is_announced`: whether a wait was announced since.
    - `silent`: since when the workers are silent that did not answer the last question. `mentioned`: those of whose
      silence a line was said.
    - `told`: the waits of which a line was said, by the time of the line and the place of the wait.
    """

    question: OpenQuestion = field(default=OpenQuestion())
    asked_at: float = -NEVER
    due_at: float = NEVER
    is_announced: bool = False
    silent: Mapping[int, float] = field(default_factory=dict)
    mentioned: frozenset[int] = frozenset()
    told: frozenset[tuple[float, Place]] = frozenset()

    def hear(self, answer: Answer) -> Timeout:
        """Take in an answer, to whatever question: its worker is there. A wait that it announces is looked at soon."""
        known = self
        if answer.worker in self.silent or answer.worker in self.mentioned:
            silent = {worker: since for worker, since in self.silent.items() if worker != answer.worker}
            known = replace(known, silent=silent, mentioned=self.mentioned - {answer.worker})
        question = self.question.with_answer(answer)
        is_announced = self.is_announced or (question is self.question and bool(answer.waits))
        return replace(known, question=question, is_announced=is_announced)

    def asks_at(self, limit: float) -> float:
        """Return when all workers are asked next."""
        return min(self.due_at, self.asked_at + ASKED[0] * limit if self.is_announced else NEVER)

    def asked(self, number: int, size: int, now: float, limit: float) -> Timeout:
        """Ask all workers now: by this number, or once more by that of the question that some have yet to answer."""
        known = replace(self, asked_at=now, due_at=now + (ASKED[1] * limit or FIRST_LINE), is_announced=False)
        if self.question.number:
            return replace(known, silent=self.missing)
        return replace(known, question=OpenQuestion(number, range(size)))

    @property
    def missing(self) -> dict[int, float]:
        """Since when each worker is silent that has yet to answer."""
        return {worker: self.silent.get(worker, self.asked_at) for worker in self.question.missing}

    def closes_at(self, limit: float) -> float:
        """Return when it is decided, if nobody answers any more: a silent worker is waited for as long as the limit."""
        if not self.question.number:
            return NEVER
        return -NEVER if self.question.is_complete else max(self.missing.values()) + (limit or NEVER)

    @cached_property
    def waiting(self) -> int | None:
        """The first worker that has answered that it waits."""
        return min((worker for worker, answer in self.question.answers.items() if answer.waits), default=None)

    @property
    def speaks_at(self) -> float:
        """When a line about a silent worker is due, if nobody answers any more; never where nobody waits."""
        if self.waiting is None:
            return NEVER
        silent = (since for worker, since in self.missing.items() if worker not in self.mentioned)
        return min(silent, default=NEVER) + UNHEARD

    def closed(self) -> Timeout:
        """Close the question."""
        return replace(self, question=OpenQuestion(), silent=self.missing, due_at=NEVER)

    def waits(self) -> list[tuple[int, Wait]]:
        """Return the waits that the answers tell of, each after its worker."""
        return sorted((worker, wait) for worker, answer in self.question.answers.items() for wait in answer.waits)

    @cached_property
    def compiled(self) -> float:
        """How many seconds ago the last compilation was, of those who have answered."""
        return min((answer.detail.compiled for answer in self.question.answers.values()), default=NEVER)

    def counted(self, wait: Wait, limit: float) -> float:
        """Return the seconds of a wait that count, against this limit."""
        return wait.seconds if wait.seconds >= COMPILATION * limit else min(wait.seconds, self.compiled)


class Missing(NamedTuple):
    """The workers that a program waits for, perhaps the worker itself among them.

    - `absent`: the partners that have not begun it. `pending`: those that have not ended it.
    - `mixed`: whether some have run programs that were not compared.
    """

    absent: tuple[int, ...]
    pending: tuple[int, ...]
    mixed: bool


def missing_of(part: Dependencies, state: State, states: Mapping[int, State]) -> Missing:
    """Return whom a worker waits for that is in a program, in which it has that part."""
    partners = sorted(part.partners)
    absent = tuple(w for w in partners if not _is_in_call(states[w].calls, state))
    pending = tuple(w for w in partners if w in absent or not _has_ended(states[w], state.program))
    return Missing(absent, pending, any(states[w].calls.mixed for w in partners))


def _is_in_call(calls: Calls, state: State) -> bool:
    return calls.passed >= state.program and calls.agrees_with(state.calls)


def _has_ended(state: State, call: int) -> bool:
    return state.calls.done >= call or state.kind == "left"


def _others(worker: int, workers: Collection[int]) -> tuple[int, ...]:
    return tuple(other for other in workers if other != worker)


class WaitLimits:
    """The limits of waits, by what all workers do now."""

    def __init__(self, states: Mapping[int, State], plans: Plans, limits: TimeLimits) -> None:
        self._states, self._plans, self._limits = states, plans, limits
        self._are_all_in_programs = all(state.kind in ("executing", "left") for state in states.values())
        self._known: dict[object, Missing] = {}  # the same for all in one program, whose dependencies are the same

    def of(self, worker: int, wait: Wait) -> float:
        """Return the limit of a worker's wait, in seconds; for ever where its program is long and waits for nobody."""
        limits = self._limits
        if wait.kind in ("agreeing", "elsewhere"):
            return limits.waiting
        if wait.kind == "left":
            return NEVER
        state = self._states[worker]
        if state.plan not in self._plans:
            return limits.program if self._are_all_in_programs else limits.waiting
        part = self._plans[state.plan].get(worker, Dependencies())
        key = (id(part), state.program, state.calls.number, state.calls.digests)
        if key not in self._known:
            self._known[key] = missing_of(part, state, self._states)
        missing = self._known[key]
        if part.fixed and not _others(worker, missing.pending) and not (missing.mixed or state.calls.mixed):
            return NEVER
        return limits.waiting if _others(worker, missing.absent) else limits.program


def blockers(waiting: int, states: Mapping[int, State], plans: Plans, unheard: Collection[int]) -> tuple[int, ...]:
    """Return who does not wait, of those that a worker waits for, or that these wait for.

    All of them are returned where nobody is left, or where it is not certain whom one of them waits for.
    """
    seen: set[int] = set()
    ahead, about, is_certain = [waiting], set[int](), True
    while ahead:
        if (worker := ahead.pop()) in seen:
            continue
        seen.add(worker)
        state, others = states[worker], tuple[int, ...]()
        if worker in unheard or not (state.waits or state.kind == "elsewhere"):
            about.add(worker)
        elif state.kind != "executing":
            others = state.waits_for
        elif state.plan in plans and not state.calls.mixed:
            part = plans[state.plan].get(worker, Dependencies())
            missing = missing_of(part, state, states)
            found = (_others(worker, workers) for workers in (missing.absent, missing.pending, part.partners))
            others = next(filter(None, found), ())
        else:  # it may wait for anybody, or be in a program of its own that does not end
            is_certain, others = False, tuple(states)
        ahead += others
        # Of a worker that ended before and one that waits for it, nobody can tell which of them has gone another way.
        if any(states[other].kind == "left" and not states[other].status for other in others):
            about.add(worker)
    return tuple(sorted(about if about and is_certain else seen))
