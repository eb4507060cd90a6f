"""The roll call: when a worker's time is up, all say what they do and how long they have compiled; then it is decided
whether that worker waits, and whether it has waited too long."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from distdl_jax.errors import ONE_PROGRAM
from distdl_jax.plans.decomposition import Workers
from distdl_jax.programs.ir import Program
from distdl_jax.programs.matching import find_stops
from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.call_log import Calls
from distdl_jax.watchdog.clock import seconds_text
from distdl_jax.watchdog.deadlock import Kind, State, workers_text
from distdl_jax.watchdog.dependencies import Dependencies, Plans, dependencies_of
from distdl_jax.watchdog.messages import Answer, StillWaiting
from distdl_jax.watchdog.survey import NOT_HEARD_FROM, Compiled, Doing, Known

UNHEARD = 12.0
"""After how many seconds without an answer it is said that a worker was not heard from."""

LISTED = 64
"""Of how many workers a report says what they do."""

RUNNING = State("running")


@dataclass(frozen=True)
class Roll:
    """The roll calls of one coordinator.

    - `number`: of the question that is asked now, 0 for none, of `size` workers since `began_at`. `askers`: for whom;
      `later`: who has asked meanwhile, for whom it will be called again. `answers`: what came back.
    - `rests_until`: when it may be called again.
    - `owed`: since when each worker has owed an answer. `mentioned`: of whose silence has been spoken.
    - `compiled`: how long each worker had when it was last heard of, by rank in COMM_WORLD. `passed`: in how many
      seconds so far some worker has compiled. `began`: what that was when each wait began, by worker and kind.
    """

    number: int = 0
    size: int = 0
    began_at: float = 0.0
    rests_until: float = 0.0
    askers: Mapping[tuple[int, Kind], StillWaiting] = field(default_factory=dict)
    later: Mapping[tuple[int, Kind], StillWaiting] = field(default_factory=dict)
    answers: Mapping[int, Answer] = field(default_factory=dict)
    owed: Mapping[int, float] = field(default_factory=dict)
    mentioned: frozenset[int] = frozenset()
    compiled: Mapping[int, Compiled] = field(default_factory=dict)
    passed: float = 0.0
    began: Mapping[tuple[int, Kind], tuple[int, float]] = field(default_factory=dict)

    @property
    def is_called(self) -> bool:
        """Whether one goes on."""
        return self.number > 0

    def with_asker(self, asker: StillWaiting) -> Roll:
        """One more worker asks. What others have answered before says nothing of how long they compile from then on."""
        key = (asker.worker, asker.kind)
        if self.is_called:
            return replace(self, later={**self.later, key: asker})
        return replace(self, askers={**self.askers, key: asker})

    @property
    def is_due_at(self) -> float:
        """When it is to be called."""
        return self.rests_until if self.askers and not self.is_called else float("inf")

    def called(self, number: int, size: int, now: float) -> Roll:
        """All are asked now."""
        owed = {worker: self.owed.get(worker, now) for worker in range(size)}
        return replace(self, number=number, size=size, began_at=now, answers={}, owed=owed)

    def with_answer(self, answer: Answer) -> Roll:
        """A worker has answered, this question or another."""
        owed = self.owed
        if answer.worker in owed:
            owed = {worker: since for worker, since in owed.items() if worker != answer.worker}
        known = self if owed is self.owed else replace(self, owed=owed, mentioned=self.mentioned - {answer.worker})
        if answer.question != self.number:
            return known
        return replace(known, answers={**self.answers, answer.worker: answer})

    @cached_property
    def owed_since(self) -> float:
        """Since when the last one owes an answer; for ever ago where all have answered, and never where none is due."""
        if not self.is_called:
            return float("inf")
        # Who has answered another question meanwhile is there, and will answer this one.
        since = (self.owed.get(w, self.began_at) for w in range(self.size) if w not in self.answers)
        return max(since, default=-float("inf"))

    def silent(self, now: float) -> tuple[int, ...]:
        """Who has owed an answer for so long that it is to be spoken of, and was not mentioned yet."""
        return tuple(sorted(w for w, since in self._waited_for().items() if now - since >= UNHEARD))

    def unheard(self, now: float) -> dict[int, float]:
        """For how long who has owed an answer, and is to be named."""
        return {w: now - t for w, t in self.owed.items() if now - t >= UNHEARD or w not in self.answers}

    @cached_property
    def speaks_at(self) -> float:
        """When somebody's silence will be spoken of, if nobody answers any more."""
        return min(self._waited_for().values(), default=float("inf")) + UNHEARD

    def _waited_for(self) -> dict[int, float]:
        """Who owes an answer, and was not spoken of; nobody where nobody waits."""
        return {w: since for w, since in self.owed.items() if w not in self.mentioned and self.askers}

    def closed(self, rests_until: float, members: Workers, beyond: Known) -> tuple[Roll, dict[tuple[int, Kind], float]]:
        """After it, with the next one no sooner; and for how many seconds of each asker's wait some worker compiled, of
        these or of those `beyond`."""
        heard = {worker: doing.compiled for worker, doing in beyond.items()}
        for worker, answer in self.answers.items():
            ours = Compiled(answer.detail.compiled, answer.detail.awake)
            heard[members[worker]] = _later(ours, heard.get(members[worker], ours))
        before = {worker: self.compiled.get(worker, Compiled()) for worker in heard}
        heard = {worker: _later(compiled, before[worker]) for worker, compiled in heard.items()}
        # Of all together, no more than has passed: by their own clocks, for the coordinator's may have stood still, and
        # its turns are not when they answered.
        elapsed = max((compiled.awake - before[worker].awake for worker, compiled in heard.items()), default=0.0)
        new = sum(compiled.seconds - before[worker].seconds for worker, compiled in heard.items())
        passed = self.passed + min(elapsed, new)
        # What was heard late may be from before a wait began. But no wait has more of it than it has lasted.
        began = dict(self.began)
        for key, asker in self.askers.items():
            episode, earlier = began.get(key, (-1, 0.0))
            least = passed - asker.seconds
            began[key] = (asker.episode, max(least, earlier if episode == asker.episode else 0.0))
        allowed = {key: passed - began[key][1] for key in self.askers}
        known = replace(self, number=0, askers=self.later, later={}, answers={}, began=began, rests_until=rests_until)
        return replace(known, compiled={**self.compiled, **heard}, passed=passed), allowed


def _later(one: Compiled, other: Compiled) -> Compiled:
    return max(one, other, key=lambda compiled: compiled.awake)


@dataclass(frozen=True)
class Missing:
    """Of those whom workers in one program talk to, perhaps themselves: who has not begun it, who has not ended it,
    and whether some have run programs that were not compared."""

    absent: tuple[int, ...]
    pending: tuple[int, ...]
    mixed: bool


class Limits:
    """How long each of those who have asked may wait, by what all do now."""

    def __init__(self, states: Mapping[int, State], plans: Plans, limits: TimeLimits) -> None:
        self._states, self._plans, self._limits = states, plans, limits
        self._known: dict[object, Missing] = {}  # the same for all in one program, whose needs are the same

    def of(self, asker: StillWaiting) -> float | None:
        """Seconds; None where it does not wait for anybody: its program is long."""
        limits, worker = self._limits, asker.worker
        if asker.kind in ("agreeing", "elsewhere"):
            return limits.waiting
        state = self._states.get(worker, RUNNING)
        if state.plan not in self._plans:
            return limits.program if self._all_are_in_programs and len(self._states) > worker else limits.waiting
        part = self._plans[state.plan].get(worker, Dependencies())
        key = (id(part), state.program, state.calls.number, state.calls.digests)
        if key not in self._known:
            self._known[key] = missing_of(part, state, self._states)
        missing = self._known[key]
        if part.fixed and not _besides(worker, missing.pending) and not (missing.mixed or state.calls.mixed):
            return None
        return limits.waiting if _besides(worker, missing.absent) else limits.program

    @cached_property
    def _all_are_in_programs(self) -> bool:
        return all(state.kind in ("executing", "left") for state in self._states.values())


def missing_of(part: Dependencies, state: State, states: Mapping[int, State]) -> Missing:
    """For a worker that is in a program, in which it has that part."""
    others = sorted(part.partners)
    absent = tuple(w for w in others if not _has_passed(states.get(w, RUNNING).calls, state))
    gone = set(absent)
    pending = tuple(w for w in others if w in gone or not _has_ended(states.get(w, RUNNING), state.program))
    return Missing(absent, pending, any(states[w].calls.mixed for w in others if w in states))


def _besides(worker: int, others: tuple[int, ...]) -> bool:
    return any(other != worker for other in others)


def _has_passed(theirs: Calls, ours: State) -> bool:
    return theirs.passed >= ours.program and theirs.agrees_with(ours.calls)


def _has_ended(state: State, call: int) -> bool:
    return state.calls.done >= call or state.kind == "left"


def was_not_heard_from(worker: int, owed: Mapping[int, float], now: float) -> str:
    """What is said of a worker that has owed an answer for some time."""
    return f"worker {worker} was not heard from for {seconds_text(now - owed[worker])}"


def time_is_up(
    asker: StillWaiting,
    limit: float,
    states: Mapping[int, State],
    programs: Mapping[str, Mapping[int, Program]],
    unheard: Mapping[int, float],
    size: int,
) -> str:
    """What to say of a wait that was too long; `unheard`: for how long who was not heard from."""
    first = (
        f"Worker {asker.worker} has waited for {seconds_text(asker.seconds)}; the limit is {limit:g} s "
        "(DISTDL_JAX_TIMEOUT, in seconds; 0 turns it off)."
    )
    lines = [first]
    for worker in range(min(size, LISTED)):
        if worker in unheard:
            lines.append(f"Worker {worker} was not heard from for {seconds_text(unheard[worker])}.")
        else:
            lines.append(f"Worker {worker} {states.get(worker, RUNNING).describe()}.")
    lines += _in_the_plan(size, states, programs, frozenset(unheard)) or _without_a_plan(asker, states)
    return "\n".join(lines)


def _in_the_plan(
    size: int, states: Mapping[int, State], programs: Mapping[str, Mapping[int, Program]], unheard: frozenset[int]
) -> list[str]:
    """Where in the plan those must be that wait, given who is not in the call."""
    executing = [s for s in states.values() if s.kind == "executing"]
    busy = [(s.program, s.plan) for s in executing if s.plan]
    busy = busy or [(s.calls.number, s.calls.name) for s in executing if s.calls.number and s.calls.inside]
    if not busy:
        names = {state.function for state in executing if state.function in programs}
        return [
            _by_the_data(name)
            for name in sorted(names)
            if not dependencies_of(0, sum(programs[name].values(), ())).fixed
        ]
    call, name = max(busy)
    plan = programs.get(name)
    absent = frozenset(w for w in range(size) if states.get(w, RUNNING).calls.number < call or w in unheard)
    if plan is None:
        return []
    if not absent:
        calls = {worker: states.get(worker, RUNNING).calls for worker in range(size) if worker not in unheard}
        gone = tuple(worker for worker, its in calls.items() if its.number > call or not its.inside)
        return [_ended_the_call(gone, call, name) if gone else _by_the_data(name)]
    lines = [f"{workers_text(tuple(sorted(absent))).capitalize()} did not come to call {call}, of {name}."]
    for stop in find_stops(plan, absent):
        if stop.operation is not None:
            place = stop.operation.place
            lines.append(
                f"Worker {stop.worker} waits in operation {stop.place} of {stop.total} of its plan: "
                f"{stop.operation}, {place.layer} at {place.line}."
            )
    return lines


def _without_a_plan(asker: StillWaiting, states: Mapping[int, State]) -> list[str]:
    """What is most often the matter where workers wait in what nobody has compared: one of them has left, or a worker
    traces what another one runs."""
    left = tuple(w for w, state in sorted(states.items()) if state.kind == "left")
    if left and asker.kind == "executing":
        return [f"Worker {asker.worker} may wait for {workers_text(left)}, which ended before. {ONE_PROGRAM}"]
    for worker, state in sorted(states.items()):
        if state.kind == "agreeing":
            past = tuple(w for w in state.waits_for if w in states and states[w].kind == "executing")
            if past:
                return [
                    f"Worker {worker} asks for what others hold, which is done only while a function is traced, or "
                    f"runs without jit; {workers_text(past)} did not trace it: most often a shape, a dtype or a static "
                    "argument of a jax.jit function has changed on some workers only. dj.jit finds that at once."
                ]
    return []


def _ended_the_call(gone: Workers, call: int, name: str) -> str:
    return (
        f"{workers_text(gone).capitalize()} came to call {call}, of {name}, whose plan was found to complete, and is "
        "no longer in it while others are: there it ended by an exception (of a callback, say) that the program has "
        "caught, or after another branch of a cond or fewer passes of a while loop."
    )


def _by_the_data(name: str) -> str:
    return (
        f"The workers have come to {name}, whose plan was found to complete: they must have taken different branches "
        "of a cond, or left a while loop after different numbers of passes (a condition that is NaN on one worker, "
        "say). Its condition must be the same on all workers: all_sum_reduce what it depends on."
    )


def line_about_the_end(asker: StillWaiting, states: Mapping[int, State], roll: Roll, now: float) -> list[str]:
    """Of workers whose programs have ended, the first says who is waited for; nobody need hurry."""
    left = tuple(sorted(worker for worker, state in states.items() if state.kind == "left"))
    others = [worker for worker in range(roll.size) if worker not in left]
    what = "; ".join(
        f"worker {worker} {states.get(worker, RUNNING).describe()}"
        if worker in roll.answers
        else was_not_heard_from(worker, roll.owed, now)
        for worker in others[:8]
    )
    ended = f"{workers_text(left).capitalize()} ended {seconds_text(asker.seconds)} ago or more"
    return [f"distdl_jax: {ended}; the job goes on: {what}.\n"] if others else []


def known_here(members: Workers, states: Mapping[int, State], plans: Plans, unheard: Collection[int] = ()) -> Known:
    """What each worker of a world does, by what is known there."""
    return {member: _doing(worker, members, states, plans, unheard) for worker, member in enumerate(members)}


def _doing(worker: int, members: Workers, states: Mapping[int, State], plans: Plans, unheard: Collection[int]) -> Doing:
    state, is_unheard = states.get(worker, RUNNING), worker in unheard
    if is_unheard or not (state.waits or state.kind == "elsewhere"):
        return Doing(what=NOT_HEARD_FROM if is_unheard else state.describe())
    if state.kind in ("agreeing", "elsewhere"):
        # Where somebody is silent nobody was asked for whom those elsewhere wait.
        waits_for = state.waits_for or (tuple(unheard) if state.kind == "elsewhere" else ())
        return Doing(waits=True, waits_for=frozenset(members[other] for other in waits_for).union(state.beyond))
    if state.plan in plans and not state.calls.mixed:
        part = plans[state.plan].get(worker, Dependencies())
        missing = missing_of(part, state, states)
        found = (missing.absent, missing.pending, tuple(part.partners))
        waits_for = next((others for others in found if _besides(worker, others)), ())
        return Doing(waits=True, waits_for=frozenset(members[other] for other in waits_for))
    # It may wait for anybody, or be in a program of its own that does not end.
    return Doing(waits=True, perhaps=frozenset(members))
