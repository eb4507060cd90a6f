"""The roll call: when a worker's time is up, all say what they do and how long they have compiled; then it is decided
whether that worker waits, and whether it has waited too long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distdl_jax.programs.ir import Program
from distdl_jax.programs.matching import find_stops
from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.calls import Calls
from distdl_jax.watchdog.deadlock import Kind, State, workers_text
from distdl_jax.watchdog.messages import Answer, StillWaiting
from distdl_jax.watchdog.needs import Needs, Plans, needs_of

UNHEARD = 12.0
"""After how many seconds without an answer a report says that a worker was not heard from."""

LISTED = 64
"""Of how many workers a report says what they do."""

RUNNING = State("running")


@dataclass(frozen=True)
class Roll:
    """The roll calls of one coordinator.

    - `number`: of the question that is asked now, 0 for none. `askers`: who has asked. `answers`: what came back.
    - `owed`: since when each worker has owed an answer.
    - `compiled`: how long each worker had compiled when it was last asked, `at` that time. `passed`: in how many
      seconds so far some worker has compiled. `began`: what that was when each wait began, by worker and kind.
    """

    number: int = 0
    askers: tuple[StillWaiting, ...] = ()
    answers: Mapping[int, Answer] = field(default_factory=dict)
    owed: Mapping[int, float] = field(default_factory=dict)
    compiled: Mapping[int, float] = field(default_factory=dict)
    at: float = 0.0
    passed: float = 0.0
    began: Mapping[tuple[int, Kind], tuple[int, float]] = field(default_factory=dict)

    @property
    def is_called(self) -> bool:
        """Whether one goes on."""
        return self.number > 0

    def with_asker(self, asker: StillWaiting) -> tuple[Roll, bool]:
        """One more worker asks; whether the roll must be called for it."""
        others = tuple(a for a in self.askers if (a.worker, a.kind) != (asker.worker, asker.kind))
        return replace(self, askers=(*others, asker)), not self.is_called

    def called(self, number: int, size: int, now: float) -> Roll:
        """All are asked now."""
        owed = {worker: self.owed.get(worker, now) for worker in range(size)}
        return replace(self, number=number, answers={}, owed=owed)

    def with_answer(self, answer: Answer) -> Roll:
        """A worker has answered, this question or another."""
        owed = self.owed
        if answer.worker in owed:
            owed = {worker: since for worker, since in owed.items() if worker != answer.worker}
        if answer.question != self.number:
            return self if owed is self.owed else replace(self, owed=owed)
        return replace(self, owed=owed, answers={**self.answers, answer.worker: answer})

    def ends_at(self, size: int, limit: float) -> float:
        """When it ends, if nobody answers any more: whoever is silent for longer than the limit can't be waited for."""
        if not self.is_called:
            return float("inf")
        return max((self.owed.get(w, 0.0) + limit for w in range(size) if w not in self.answers), default=0.0)

    def is_over(self, size: int, now: float, limit: float) -> bool:
        """Whether all have answered, who can."""
        return now >= self.ends_at(size, limit)

    def closed(self, now: float) -> tuple[Roll, dict[tuple[int, Kind], float]]:
        """After it, and how many seconds each asker has waited while some worker compiled."""
        compiled = {worker: answer.detail.compiled for worker, answer in self.answers.items()}
        new = sum(seconds - self.compiled.get(worker, 0.0) for worker, seconds in compiled.items())
        new = min(new, now - self.at)  # of all together, no more than has passed
        passed = self.passed + new
        began = dict(self.began)
        for asker in self.askers:
            key = (asker.worker, asker.kind)
            if began.get(key, (-1, 0.0))[0] != asker.episode:
                began[key] = (asker.episode, passed - min(new, asker.seconds))
        allowed = {(a.worker, a.kind): passed - began[a.worker, a.kind][1] for a in self.askers}
        known = replace(self, number=0, askers=(), answers={}, began=began)
        return replace(known, compiled={**self.compiled, **compiled}, at=now, passed=passed), allowed


def limit_of(asker: StillWaiting, states: Mapping[int, State], plans: Plans, limits: TimeLimits) -> float | None:
    """How long the worker may wait; None where it does not wait for anybody: its program is long."""
    state = states.get(asker.worker, RUNNING)
    if asker.kind == "agreeing":
        return limits.waiting
    if (found := _those_in_its_program(asker.worker, state, states, plans)) is None:
        together = all(s.kind in ("executing", "left") for s in states.values()) and len(states) > asker.worker
        return limits.program if together else limits.waiting
    part, absent, pending = found
    if (
        part.fixed
        and not pending
        and not any(states[w].calls.mixed for w in (asker.worker, *part.talks) if w in states)
    ):
        return None
    return limits.waiting if absent else limits.program


def _those_in_its_program(
    worker: int, state: State, states: Mapping[int, State], plans: Plans
) -> tuple[Needs, list[int], list[int]] | None:
    """The worker's part in the program that it executes; who of those that it talks to there has not begun it, and who
    has not ended it. None where the program is not known."""
    calls = state.calls
    if state.kind != "executing" or not state.program or state.program != calls.number or calls.name not in plans:
        return None
    part = plans[calls.name].get(worker, Needs())
    absent = [w for w in sorted(part.talks) if not _has_passed(states.get(w, RUNNING).calls, calls)]
    pending = [w for w in sorted(part.talks) if w in absent or not _has_ended(states.get(w, RUNNING), calls.number)]
    return part, absent, pending


def _has_passed(theirs: Calls, ours: Calls) -> bool:
    return theirs.passed >= ours.number and theirs.agrees_with(ours)


def _has_ended(state: State, call: int) -> bool:
    return state.calls.done >= call or state.kind == "left"


def time_is_up(
    asker: StillWaiting,
    limit: float,
    states: Mapping[int, State],
    plans: Plans,
    programs: Mapping[str, Mapping[int, Program]],
    roll: Roll,
    size: int,
    now: float,
) -> tuple[str, tuple[int, ...]]:
    """What to say of a wait that was too long, and whom it is about."""
    first = (
        f"Worker {asker.worker} has waited for {asker.seconds:.0f} s; the limit is {limit:.0f} s "
        "(DISTDL_JAX_TIMEOUT, in seconds; 0 turns it off)."
    )
    unheard = {w: now - since for w, since in roll.owed.items() if now - since >= UNHEARD or w not in roll.answers}
    lines = [first]
    for worker in range(min(size, LISTED)):
        if worker in unheard:
            lines.append(f"Worker {worker} was not heard from for {unheard[worker]:.0f} s.")
        else:
            lines.append(f"Worker {worker} {states.get(worker, RUNNING).describe()}.")
    lines += _in_the_plan(size, states, programs, frozenset(unheard))
    return "\n".join(lines), _held_up_by(asker, size, states, plans, unheard)


def _in_the_plan(
    size: int, states: Mapping[int, State], programs: Mapping[str, Mapping[int, Program]], unheard: frozenset[int]
) -> list[str]:
    """Where in the plan those must be that wait, given who is not in the call."""
    executing = [s for s in states.values() if s.kind == "executing"]
    busy = [s for s in executing if s.calls.number and (s.calls.inside or s.program == s.calls.number)]
    if not busy:
        names = {state.function for state in executing if state.function in programs}
        return [_by_the_data(name) for name in sorted(names) if not needs_of(0, sum(programs[name].values(), ())).fixed]
    call, name = max((state.calls.number, state.calls.name) for state in busy)
    plan = programs.get(name)
    absent = frozenset(w for w in range(size) if states.get(w, RUNNING).calls.number < call or w in unheard)
    if plan is None:
        return []
    if not absent:
        return [_by_the_data(name)]
    lines = [f"{workers_text(tuple(sorted(absent))).capitalize()} did not come to call {call}, of {name}."]
    for stop in find_stops(plan, absent):
        if stop.operation is not None:
            place = stop.operation.place
            lines.append(
                f"Worker {stop.worker} waits in operation {stop.place} of {stop.total} of its plan: "
                f"{stop.operation}, {place.layer} at {place.line}."
            )
    return lines


def _by_the_data(name: str) -> str:
    return (
        f"The workers have come to {name}, whose plan was found to complete: they must have taken different branches "
        "of a cond, or left a while loop after different numbers of passes (a condition that is NaN on one worker, "
        "say). Its condition must be the same on all workers: all_sum_reduce what it depends on."
    )


def _held_up_by(
    asker: StillWaiting, size: int, states: Mapping[int, State], plans: Plans, unheard: Mapping[int, float]
) -> tuple[int, ...]:
    """Who does not wait, of those that the worker waits for, or that these wait for; all where nobody is left."""
    seen: set[int] = set()
    ahead = [asker.worker]
    about: set[int] = set()
    is_certain = True
    while ahead:
        if (worker := ahead.pop()) in seen:
            continue
        seen.add(worker)
        state = states.get(worker, RUNNING)
        if worker in unheard or not state.waits:
            about.add(worker)
        elif state.kind == "agreeing":
            ahead.extend(state.waits_for)
        elif (found := _those_in_its_program(worker, state, states, plans)) is not None and not state.calls.mixed:
            ahead.extend(found[1] or found[2] or found[0].talks)
        else:
            is_certain = False  # it may wait for anybody, or be in a program of its own that does not end
            ahead.extend(range(size))
    return tuple(sorted(about if about and is_certain else seen))
