"""Texts about workers that have waited for too long, or are silent, or have ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from distdl_jax.errors import ONE_PROGRAM
from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.watchdog.programs.ir import Program
from distdl_jax.watchdog.programs.matching import find_stops
from distdl_jax.watchdog.watch.clock import seconds_text
from distdl_jax.watchdog.watch.deadlock import State, workers_text
from distdl_jax.watchdog.watch.dependencies import dependencies_of

LISTED = 64
"""Of how many workers a report says what they do; a line names eight."""


class LongWait(NamedTuple):
    """A wait of a worker of which a line may be said, and the limit of the clock; 0 for none."""

    seconds: float
    worker: int
    limit: float


@dataclass(frozen=True)
class Situation:
    """The states of all workers, their programs by function, and since how many seconds ago the silent ones are so."""

    states: Mapping[int, State]
    programs: Mapping[str, Mapping[int, Program]]
    unheard: Mapping[int, float]

    def describe(self, worker: int) -> str:
        """Return what a worker does."""
        if worker in self.unheard:
            return f"worker {worker} was not heard from for {seconds_text(self.unheard[worker])}"
        return f"worker {worker} {self.states[worker].describe()}"

    def _describe(self, workers: Iterable[int]) -> str:
        listed = [*workers]
        more = [f"{len(listed) - 8} more"] if len(listed) > 8 else []
        return "; ".join([*map(self.describe, listed[:8]), *more])

    def time_is_up(self, wait: LongWait) -> str:
        """Return what to say of a wait that was too long."""
        first = (
            f"Worker {wait.worker} has waited for {seconds_text(wait.seconds)}; the limit is {wait.limit:g} s "
            "(DISTDL_JAX_TIMEOUT, in seconds; 0 turns it off)."
        )
        listed = [f"{_capitalized(self.describe(worker))}." for worker in range(min(len(self.states), LISTED))]
        return "\n".join([first, *listed, *(self._in_the_plan() or self._without_a_plan(wait.worker))])

    def line_about_a_wait(self, wait: LongWait, awaited: Workers) -> str:
        """Return what to say of a wait that may be as it should; `awaited`: who keeps it, as `blockers` are."""
        worker, others = wait.worker, tuple(other for other in awaited if other != wait.worker)
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
        """Return what to say long before the limit."""
        return (
            f"distdl_jax: {self._describe(silent)}: gone, stopped, cut off, or in code that does not let Python run. "
            f"{_capitalized(self.describe(waiting))}. The clock (DISTDL_JAX_TIMEOUT) decides.\n"
        )

    def line_about_the_end(self, seconds: float) -> str:
        """Return what to say of workers whose programs ended that long ago; nobody need hurry."""
        left = tuple(worker for worker, state in sorted(self.states.items()) if state.kind == "left")
        others = [worker for worker in sorted(self.states) if worker not in left]
        ended = f"{workers_text(left).capitalize()} ended {seconds_text(seconds)} ago or more"
        return f"distdl_jax: {ended}; the job goes on: {self._describe(others)}.\n" if others else ""

    def _in_the_plan(self) -> list[str]:
        """Say where in the plan the workers must be that wait, given who is not in the call."""
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
            # A program may go on beside its thread, which has left the call.
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
        """Say what is most often the matter where nobody has compared the programs: a worker has left, or traces what
        another one runs."""
        states = self.states
        left = tuple(w for w, state in sorted(states.items()) if state.kind == "left")
        if left and states[waiting].kind == "executing":
            return [f"Worker {waiting} may wait for {workers_text(left)}, which ended before. {ONE_PROGRAM}"]
        for worker, state in sorted(states.items()):
            past = tuple(w for w in state.waits_for if states[w].kind == "executing")
            if state.kind == "agreeing" and past:
                return [
                    f"Worker {worker} asks for what others hold, which is done only while a function is traced, or "
                    f"runs without jit; {workers_text(past)} did not come to that. Most often a shape, a dtype or a "
                    "static argument of a jax.jit function has changed on some workers only; dj.jit finds that at "
                    f"once. Or a call without jit is left out on {workers_text(past)}. {ONE_PROGRAM}"
                ]
        return []


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


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
