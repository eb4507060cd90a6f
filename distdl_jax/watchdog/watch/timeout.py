"""The timeout: all workers report their states, and then it is decided who waits, and has waited for too long.

A worker announces a wait that has lasted for a fraction of the limit. From then on the coordinator asks all workers
repeatedly. The answers tell how long each wait has lasted, and how long ago each worker compiled: a wait counts from
when no worker compiles any more, unless it has lasted for `COMPILATION` times the limit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from distdl_jax.errors import ONE_PROGRAM
from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.programs.ir import Program
from distdl_jax.watchdog.programs.matching import find_stops
from distdl_jax.watchdog.watch.call_log import Calls
from distdl_jax.watchdog.watch.clock import ASKED, FIRST_LINE, seconds_text
from distdl_jax.watchdog.watch.deadlock import Kind, State, workers_text
from distdl_jax.watchdog.watch.dependencies import Dependencies, Plans, dependencies_of
from distdl_jax.watchdog.watch.messages import Answer, Wait

UNHEARD = 12.0
"""The seconds without an answer after which a line tells that a worker was not heard from."""

LISTED = 64
"""The number of workers whose states are listed in a report; a line names eight."""

NEVER = float("inf")

Place = tuple[Kind, str, str, str]
"""The kind of a wait, its label, function and source line: the same in each step of a loop."""


def place_of(state: State) -> Place:
    """Return the place of a worker's current wait."""
    return state.kind, state.label, state.function, state.where


@dataclass
class OpenQuestion:
    """A question to some workers, by its number, and the answers so far."""

    number: int
    workers: Collection[int]
    answers: dict[int, Answer] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        """The workers that have not answered."""
        return tuple(worker for worker in self.workers if worker not in self.answers)

    @property
    def is_complete(self) -> bool:
        """Whether all have answered."""
        return len(self.answers) == len(self.workers)

    def hear(self, answer: Answer) -> bool:
        """Process an answer; return whether it is one to this question."""
        if answer.question == self.number:
            self.answers[answer.worker] = answer
        return answer.question == self.number


@dataclass
class Timeout:
    """The questions to all workers, while one of them has waited for a fraction of the limit.

    - `question`: the open question, if any. `asked_at`: when all were last asked; `due_at`: when they are next.
    - `is_announced`: whether a wait was announced since.
    - `silent`: since when the workers that did not answer the last question have been silent. `mentioned`: those whose
      silence was reported.
    - `told`: the waits reported in a line, by the time of the line and the place of the wait.
    """

    limit: float
    question: OpenQuestion | None = None
    asked_at: float = -NEVER
    due_at: float = NEVER
    is_announced: bool = False
    silent: dict[int, float] = field(default_factory=dict)
    mentioned: set[int] = field(default_factory=set)
    told: set[tuple[float, Place]] = field(default_factory=set)

    def hear(self, answer: Answer) -> None:
        """Process an answer to any question: its worker is alive. A wait that it announces is considered soon."""
        self.silent.pop(answer.worker, None)
        self.mentioned.discard(answer.worker)
        if self.question is None or not self.question.hear(answer):
            self.is_announced = self.is_announced or bool(answer.waits)

    def ask(self, number: int, size: int, now: float) -> int:
        """Ask all workers now: with this number, or again with that of a question that some have yet to answer.

        **Returns:** the number of the question.
        """
        if self.question is None:
            self.question = OpenQuestion(number, range(size))
        else:
            self.silent = self.missing
        self.asked_at, self.due_at, self.is_announced = now, now + (ASKED[1] * self.limit or FIRST_LINE), False
        return self.question.number

    def close(self, due_at: float) -> None:
        """Close the question; the next one is due by then."""
        self.silent, self.question, self.due_at = self.missing, None, due_at

    @property
    def waiting(self) -> int | None:
        """The first worker whose last answer reports a wait."""
        answers = {} if self.question is None else self.question.answers
        return min((worker for worker, answer in answers.items() if answer.waits), default=None)

    @property
    def missing(self) -> dict[int, float]:
        """Since when each worker that has yet to answer has been silent."""
        missing = () if self.question is None else self.question.missing
        return {worker: self.silent.get(worker, self.asked_at) for worker in missing}

    def asks_at(self) -> float:
        """Return when all workers are next asked."""
        return min(self.due_at, self.asked_at + ASKED[0] * self.limit if self.is_announced else NEVER)

    def closes_at(self) -> float:
        """Return when the decision is made without further answers: a silent worker has as long as the limit."""
        if self.question is None:
            return NEVER
        return -NEVER if self.question.is_complete else max(self.missing.values()) + (self.limit or NEVER)

    def speaks_at(self) -> float:
        """Return when a line about a silent worker is due, if no worker answers any more; never if none waits."""
        if self.waiting is None:
            return NEVER
        silent = (since for worker, since in self.missing.items() if worker not in self.mentioned)
        return min(silent, default=NEVER) + UNHEARD


class LongWait(NamedTuple):
    """A wait of a worker that may be reported in a line, and the limit of the clock; 0 for none."""

    seconds: float
    worker: int
    limit: float


class Missing(NamedTuple):
    """The workers for which a program waits, possibly including the worker itself.

    - `absent`: the partners that have not started it. `pending`: those that have not ended it.
    - `mixed`: whether some have run programs that were not compared.
    """

    absent: tuple[int, ...]
    pending: tuple[int, ...]
    mixed: bool


def missing_of(part: Dependencies, state: State, states: Mapping[int, State]) -> Missing:
    """Return the workers for which a worker waits that is in a program with this part."""
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


class Situation:
    """The states of all workers, as answered: how long each may wait, for whom it waits, and the texts about that.

    - `states`: by worker. `plans`, `programs`: by function, from the coordinator.
    - `unheard`: for how many seconds silent workers have been silent.
    """

    def __init__(
        self,
        states: Mapping[int, State],
        plans: Plans,
        programs: Mapping[str, Mapping[int, Program]],
        limits: TimeLimits,
        unheard: Mapping[int, float],
    ) -> None:
        self.states, self.plans, self.programs, self.limits, self.unheard = states, plans, programs, limits, unheard
        self._are_all_in_programs = all(state.kind in ("executing", "left") for state in states.values())
        self._missing: dict[object, Missing] = {}  # the same for all in one program, which have equal dependencies

    def limit_of(self, worker: int, wait: Wait) -> float:
        """Return the limit of a worker's wait, in seconds; infinite if its program is long and waits for no worker."""
        if wait.kind in ("agreeing", "elsewhere"):
            return self.limits.waiting
        if wait.kind == "left":
            return NEVER
        state = self.states[worker]
        if state.plan not in self.plans:
            return self.limits.program if self._are_all_in_programs else self.limits.waiting
        part = self.plans[state.plan].get(worker, Dependencies())
        key = (id(part), state.program, state.calls.number, state.calls.digests)
        if key not in self._missing:
            self._missing[key] = missing_of(part, state, self.states)
        missing = self._missing[key]
        if part.fixed and not _others(worker, missing.pending) and not (missing.mixed or state.calls.mixed):
            return NEVER
        return self.limits.waiting if _others(worker, missing.absent) else self.limits.program

    def blockers(self, waiting: int) -> Workers:
        """Return the workers that don't wait, among those that a worker waits for, directly or indirectly.

        All of them are returned if no such worker is left, or if some dependency is uncertain.
        """
        seen: set[int] = set()
        ahead, about, is_certain = [waiting], set[int](), True
        while ahead:
            if (worker := ahead.pop()) in seen:
                continue
            seen.add(worker)
            state, others = self.states[worker], tuple[int, ...]()
            if worker in self.unheard or not (state.waits or state.kind == "elsewhere"):
                about.add(worker)
            elif state.kind != "executing":
                others = state.waits_for
            elif state.plan in self.plans and not state.calls.mixed:
                part = self.plans[state.plan].get(worker, Dependencies())
                missing = missing_of(part, state, self.states)
                candidates = (_others(worker, workers) for workers in (missing.absent, missing.pending, part.partners))
                others = next(filter(None, candidates), ())
            else:  # it may wait for any worker, or be in a separate program that does not end
                is_certain, others = False, tuple(self.states)
            ahead += others
            # If one worker ended before and another waits for it, it is not known which has gone another way.
            if any(self.states[other].kind == "left" and not self.states[other].status for other in others):
                about.add(worker)
        return tuple(sorted(about if about and is_certain else seen))

    # --- texts ---

    def describe(self, worker: int) -> str:
        """Return a worker's activity."""
        if worker in self.unheard:
            return f"worker {worker} was not heard from for {seconds_text(self.unheard[worker])}"
        return f"worker {worker} {self.states[worker].describe()}"

    def _describe(self, workers: Iterable[int]) -> str:
        listed = [*workers]
        more = [f"{len(listed) - 8} more"] if len(listed) > 8 else []
        return "; ".join([*map(self.describe, listed[:8]), *more])

    def time_is_up(self, wait: LongWait) -> str:
        """Return the error about a wait that was too long."""
        first = (
            f"Worker {wait.worker} has waited for {seconds_text(wait.seconds)}; the limit is {wait.limit:g} s "
            "(DISTDL_JAX_TIMEOUT, in seconds; 0 turns it off)."
        )
        listed = [f"{_capitalized(self.describe(worker))}." for worker in range(min(len(self.states), LISTED))]
        return "\n".join([first, *listed, *(self._in_the_plan() or self._without_a_plan(wait.worker))])

    def line_about_a_wait(self, wait: LongWait) -> str:
        """Return a line about a wait that may be legitimate."""
        worker, awaited = wait.worker, self.blockers(wait.worker)
        others = _others(worker, awaited)
        verb = "has waited" if others == awaited else "has waited, or computed,"
        lines = [f"Worker {worker} {verb} for {seconds_text(wait.seconds)}: it {self.states[worker].describe()}"]
        if others:
            lines.append(_capitalized(self._describe(others)))
        too = tuple(w for w, state in sorted(self.states.items()) if state.waits and w not in (worker, *others))
        if too:
            lines.append(f"{workers_text(too).capitalize()} {'wait' if too[1:] else 'waits'}, too")
        limit = f"; the limit is {wait.limit:g} s (DISTDL_JAX_TIMEOUT)" if wait.limit else ""
        return f"distdl_jax: {'. '.join(lines)}. The job goes on{limit}.\n"

    def line_about_the_silent(self, silent: Iterable[int], waiting: int) -> str:
        """Return a line that is due long before the limit."""
        return (
            f"distdl_jax: {self._describe(silent)}: gone, stopped, cut off, or in code that does not let Python run. "
            f"{_capitalized(self.describe(waiting))}. The clock (DISTDL_JAX_TIMEOUT) decides.\n"
        )

    def line_about_the_end(self, seconds: float) -> str:
        """Return a line about workers whose programs ended that long ago; there is no urgency."""
        left = tuple(worker for worker, state in sorted(self.states.items()) if state.kind == "left")
        others = [worker for worker in sorted(self.states) if worker not in left]
        ended = f"{workers_text(left).capitalize()} ended {seconds_text(seconds)} ago or more"
        return f"distdl_jax: {ended}; the job goes on: {self._describe(others)}.\n" if others else ""

    def _in_the_plan(self) -> list[str]:
        """Tell where in the plan the waiting workers must be, given those that are not in the call."""
        states, programs = self.states, self.programs
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
        absent = frozenset(w for w, state in states.items() if state.calls.number < call or w in self.unheard)
        if plan is None:
            return []
        if not absent:
            # A program may still run when its thread has left the call.
            others = [(w, s.calls) for w, s in sorted(states.items()) if s.kind != "executing" or s.program != call]
            gone = tuple(worker for worker, calls in others if calls.number > call or not calls.inside)
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

    def _without_a_plan(self, waiting: int) -> list[str]:
        """Tell the usual cause if programs were not compared: a worker has left, or traces what another one runs."""
        states = self.states
        left = tuple(w for w, state in sorted(states.items()) if state.kind == "left")
        if left and states[waiting].kind == "executing":
            return [f"Worker {waiting} may wait for {workers_text(left)}, which ended before. {ONE_PROGRAM}"]
        for worker, state in sorted(states.items()):
            past = tuple(w for w in state.waits_for if states[w].kind == "executing")
            if state.kind == "agreeing" and past:
                return [
                    f"Worker {worker} asks for what others hold, which happens while a function is traced, or runs "
                    f"without jit; {workers_text(past)} did not come to that. Most often a shape, a dtype or a static "
                    "argument of a jax.jit function has changed on some workers only; dj.jit finds that at once. Or a "
                    f"call without jit is left out on {workers_text(past)}. {ONE_PROGRAM}"
                ]
        return []


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def _ended_the_call(gone: Workers, call: int, name: str) -> str:
    return (
        f"{workers_text(gone).capitalize()} came to call {call}, of {name}, whose plan was found to complete, and left "
        "it while others are still in it: by an exception (in a callback, for instance) that the program has caught, "
        "or after another branch of a cond or fewer passes of a while loop."
    )


def _by_the_data(name: str) -> str:
    return (
        f"The workers have come to {name}, whose plan was found to complete: they must have taken different branches "
        "of a cond, or left a while loop after different numbers of passes (a condition that is NaN on one worker, "
        "for instance). Its condition must be the same on all workers: use all_sum_reduce on the values that it "
        "depends on."
    )
