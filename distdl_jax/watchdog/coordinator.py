"""Worker 0's part: from what all workers have told, whether they can go on, and what they are to do if not.

Messages and the time go in, messages come out: there is no clock and no communication in here. What cannot be decided
from the states alone (`deadlock`) is left to the workers' clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distdl_jax.programs.ir import Program
from distdl_jax.programs.matching import find_stops
from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.deadlock import Deadlock, State, find_deadlock, workers_text
from distdl_jax.watchdog.messages import (
    Answer,
    CannotAgree,
    EndJob,
    Fail,
    Question,
    StateChanged,
    ToCoordinator,
    ToReporter,
    WaitedTooLong,
    WaitLonger,
)

COORDINATOR = 0
"""The world rank of the worker that coordinates."""

SETTLED = 0.5
"""Seconds for which a deadlock must have held before it is decided: what is on its way may change it."""

LATE = 60.0
"""Seconds after which a program is taken to wait for a worker that has left."""

Posts = list[tuple[int, ToReporter]]
"""Messages, each after the worker that is to get it."""


@dataclass
class Inquiry:
    """The question to those whom a deadlock is about, whether they still wait as they had said.

    When all have answered that they do, they all did at one time: when the first of them was asked.
    """

    deadlock: Deadlock
    number: int
    began: float
    said: dict[int, State]
    answered: set[int] = field(default_factory=set)
    decided: bool = False

    def still_holds(self, deadlock: Deadlock, states: Mapping[int, State]) -> bool:
        """Whether it is about `deadlock`, and nobody has said something else since."""
        return deadlock == self.deadlock and all(states[worker] == state for worker, state in self.said.items())

    @property
    def complete(self) -> bool:
        """Whether all have answered."""
        return self.answered.issuperset(self.said)


class Coordinator:
    """What decides for one world of `size` workers.

    - `programs`: what the workers' programs of each checked function communicate, by its name; for reports.
    """

    def __init__(self, size: int, limits: TimeLimits) -> None:
        self.programs: dict[str, Mapping[int, Program]] = {}
        self._size = size
        self._limits = limits
        self._states: dict[int, State] = {}
        self._since: dict[int, float] = {}  # when its state became of the kind that it is
        self._inquiry: Inquiry | None = None
        self._inquiries = 0
        self._ends = False

    def hear(self, message: ToCoordinator, now: float) -> Posts:
        """Take in what a worker tells."""
        match message:
            case StateChanged(worker, state):
                if self._state_of(worker).kind != state.kind:
                    self._since[worker] = now
                self._states[worker] = state
            case Answer(worker, question):
                if self._inquiry is not None and self._inquiry.number == question:
                    self._inquiry.answered.add(worker)
            case CannotAgree(epoch, text):
                return self._to_all(Fail(epoch, text))
            case WaitedTooLong(worker, seconds):
                return self._end_or_wait(worker, seconds)
        return []

    def decide(self, epoch: int, now: float) -> Posts:
        """What follows from the states, if anything: workers are asked again, or all fail, or the job ends."""
        found = find_deadlock(self._states) or self._waits_for_the_gone(now)
        inquiry = self._inquiry
        if found is None:
            self._inquiry = None
            return []
        if inquiry is None or not inquiry.still_holds(found, self._states):
            return self._inquire(found, now)
        if not inquiry.complete or now - inquiry.began <= SETTLED or inquiry.decided or self._ends:
            return []
        inquiry.decided = True
        if any(state.kind == "agreeing" for state in self._states.values()):
            return self._to_all(Fail(epoch, found.text))
        return self._end_all(found.text)

    def _state_of(self, worker: int) -> State:
        return self._states.get(worker, State("running"))

    def _to_all(self, message: ToReporter) -> Posts:
        return [(worker, message) for worker in range(self._size)]

    def _end_all(self, text: str) -> Posts:
        self._ends = True
        return self._to_all(EndJob(text))

    def _inquire(self, found: Deadlock, now: float) -> Posts:
        self._inquiries += 1
        said = {worker: self._states[worker] for worker in found.waiting}
        self._inquiry = Inquiry(found, self._inquiries, now, said)
        return [(worker, Question(self._inquiries)) for worker in found.waiting]

    def _waits_for_the_gone(self, now: float) -> Deadlock | None:
        gone = tuple(sorted(worker for worker, state in self._states.items() if state.kind == "left"))
        if not gone:
            return None
        for worker, state in sorted(self._states.items()):
            if state.kind == "executing" and now - max(self._since[w] for w in (worker, *gone)) > LATE:
                text = f"{workers_text(gone).capitalize()} ended long ago, but worker {worker} {state.describe()}."
                return Deadlock(text, (worker,))
        return None

    def _end_or_wait(self, worker: int, waited: float) -> Posts:
        """What follows when a worker's clock has run out."""
        if self._ends:
            return []
        kinds = {self._state_of(w).kind for w in range(self._size)}
        # A program in which all workers are may simply be long, a scan over a whole training, say.
        is_long = kinds == {"executing"} and waited < self._limits.program
        if "compiling" in kinds or is_long:
            return self._to_all(WaitLonger())
        text = (
            f"Worker {worker} has waited for {waited:.0f} s; the limit is {self._limits.waiting:.0f} s "
            "(DISTDL_JAX_TIMEOUT, in seconds; 0 turns it off)."
        )
        return self._end_all("\n".join([text, *self._where_all_are()]))

    def _where_all_are(self) -> list[str]:
        """What each worker does, and where in the plan those must be that wait, given who is not in the call."""
        lines = [f"Worker {worker} {self._state_of(worker).describe()}." for worker in range(min(self._size, 64))]
        busy = {worker: state for worker, state in self._states.items() if state.kind == "executing" and state.calls}
        if not busy:
            return lines
        call, name = max((state.calls, state.name_of(state.calls)) for state in busy.values())
        programs = self.programs.get(name or "")
        absent = frozenset(w for w in range(self._size) if self._state_of(w).calls < call)
        if programs is None:
            return lines
        if not absent:
            return [
                *lines,
                f"All workers are in {name}, whose plan was found to complete: they must have taken different branches "
                "of a cond, or left a while loop after different numbers of passes (a condition that is NaN on one "
                "worker, say). Its condition must be the same on all workers: all_sum_reduce what it depends on.",
            ]
        lines.append(f"{workers_text(tuple(sorted(absent))).capitalize()} did not come to call {call}, of {name}.")
        for stop in find_stops(programs, absent):
            if stop.operation is not None:
                place = stop.operation.place
                lines.append(
                    f"Worker {stop.worker} waits in operation {stop.place} of {stop.total} of its plan: "
                    f"{stop.operation}, {place.layer} at {place.line}."
                )
        return lines
