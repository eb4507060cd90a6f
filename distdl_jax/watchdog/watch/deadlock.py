"""Deadlocks: whether waiting workers can ever continue, decided from the state that each of them reports.

Conclusions never use durations, only states that cannot change any more: of a worker that waits for one that has left
or waits itself, with no message on its way. A reported state may be out of date; so the coordinator has the workers
concerned confirm it, and counts the messages between them, before it concludes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from distdl_jax.errors import ONE_PROGRAM, one_program, shown_label
from distdl_jax.watchdog.programs.matching import find_cycle
from distdl_jax.watchdog.watch.call_log import Calls, Earlier
from distdl_jax.watchdog.watch.dependencies import Dependencies, Plans

Kind = Literal["running", "agreeing", "elsewhere", "executing", "compiling", "left"]


@dataclass(frozen=True)
class State:
    """The state of one worker.

    - `kind`: "agreeing" (while tracing or making partitions it waits for `waits_for`, about `label`), "executing" (in a
      compiled program), "left" (its program has ended, with `status`), or "running" (anything else). "elsewhere" is
      agreeing, in a world of some of these workers, which draws its own conclusions.
    - `episode`: the number of the current agreement, or run of a program.
    - `where`: its source line.
    - `calls`: its calls of checked functions. `program`, `function`: the call whose program it executes, and its
      function; 0 and "" if not known.
    """

    kind: Kind
    where: str = ""
    label: str = ""
    waits_for: tuple[int, ...] = ()
    episode: int = 0
    calls: Calls = field(default=Calls())
    program: int = 0
    function: str = ""
    status: int = 0

    @property
    def waits(self) -> bool:
        """Whether it may be waiting for others."""
        return self.kind in ("agreeing", "executing")

    @property
    def plan(self) -> str:
        """The function whose plan it executes, in the call `program`; empty if not known."""
        if self.kind != "executing" or not self.program:
            return ""
        return self.function or (self.calls.name if self.program == self.calls.number else "")

    def is_as(self, other: State | None) -> bool:
        """Return whether the worker has not moved between the two states."""
        return other is not None and (self.kind, self.episode) == (other.kind, other.episode)

    def describe(self) -> str:
        """Return its activity, after "worker 3 "."""
        match self.kind:
            case "agreeing" | "elsewhere":
                where = self.where if self.kind == "agreeing" else f"{self.where}, in another communicator"
                others = f", and waits for {workers_text(self.waits_for)}" if self.waits_for else ""
                return f"is about to run {shown_label(self.label)} ({where}){others}"
            case "executing":
                return f"is in {self._describe_call()}"
            case "compiling":
                return f"compiles ({self.where})" if self.where else "compiles"
            case "left":
                ended = f" with exit status {self.status}" if self.status else ""
                ended = f"{ended} {self.where}" if self.where else ended
                return (
                    f"has ended its program{ended}{f', after {self.calls.number} calls' if self.calls.number else ''}"
                )
        return f"is at {self.where}, outside any operation" if self.where else "is outside any operation"

    def _describe_call(self) -> str:
        calls = self.calls
        if calls.inside:
            return f"call {calls.number}, of {calls.name}{f' ({self.where})' if self.where else ''}"
        if self.function:
            return f"the program of {self.function} ({self.where})"
        last = f"; its last call is {calls.number}, of {calls.name}" if calls.number else ""
        return f"a compiled program ({self.where}{last})"


class Deadlock(NamedTuple):
    """Why some of the workers can never continue.

    - `waiting`: the workers assumed to be waiting, which must have been so at one time (world ranks).
    - `about`: the workers named as having gone another way.
    """

    text: str
    waiting: tuple[int, ...]
    about: tuple[int, ...]


@dataclass(frozen=True)
class View:
    """The facts from which conclusions are drawn.

    - `states`: by worker. `in_full`: whether their calls are reported in full.
    - `plans`: the needs of each worker's part in a function.
    - `coming`: whether a message of an agreement may be on its way from one worker to another.
    """

    states: Mapping[int, State]
    plans: Plans = field(default_factory=dict)
    coming: Callable[[int, int], bool] = lambda sender, receiver: False
    in_full: bool = False


def find_deadlock(view: View) -> Deadlock | None:
    """Return what keeps some of the workers from ever continuing; None if that is not certain."""
    return _failed(view) or _never_runs(view) or _traced_by_some(view) or _cycle(view) or _different_calls(view)


def _failed(view: View) -> Deadlock | None:
    """Find a worker that has ended with an error, and one that waits: the job has failed already."""
    failed = min((w for w, state in view.states.items() if state.kind == "left" and state.status), default=None)
    waiting = min((w for w, state in view.states.items() if state.waits), default=None)
    return None if failed is None or waiting is None else _gone(view, failed, waiting)


def _gone(view: View, worker: int, waiting: int) -> Deadlock:
    left, state = view.states[worker], view.states[waiting]
    text = f"Worker {worker} {left.describe()}, but worker {waiting} {state.describe()}. {one_program([state.label])}"
    return Deadlock(text, (waiting,), (worker,) if left.status else (worker, waiting))


# --- calls ---


def _never_runs(view: View) -> Deadlock | None:
    """Find a worker in a program that can't end without one that could not compile, or start, its part of it."""
    for waiting, state in sorted(view.states.items()):
        needed = view.plans.get(state.plan, {}).get(waiting, Dependencies()).required
        for worker in sorted(needed & view.states.keys()):
            call, why = view.states[worker].calls.failed
            if state.plan and call == state.program:
                text = (
                    f"Worker {worker} can't run its program of call {call}, of {state.plan}, and worker {waiting}, "
                    f"which is in its own, waits for it. Worker {worker} says: {why}"
                )
                return Deadlock(text, (waiting,), (worker, waiting))
    return None


def _different_calls(view: View) -> Deadlock | None:
    """Find two workers whose calls differ, one of which waits: by digests, and then, in full, by name."""
    known = [(w, s) for w, s in sorted(view.states.items()) if s.kind != "running" and s.calls.digests]
    for worker, state in known[1:]:
        first, reference = known[0]
        waiting = tuple(w for w, s in ((first, reference), (worker, state)) if s.waits)
        if not waiting or not state.calls.differs_from(reference.calls):
            continue
        if not view.in_full:
            return Deadlock(f"The calls of {workers_text((first, worker))} differ.", waiting, (first, worker))
        if (call := state.calls.first_difference(reference.calls)) is not None:
            text = _different_text(call, first, reference.calls[call], worker, state.calls[call])
            return Deadlock(text, waiting, (first, worker))
    return None


def different_functions(called: Mapping[int, Mapping[int, str]]) -> str | None:
    """Return the error if a call, by its number, has different functions on two workers."""
    first, *others = sorted(called)
    for worker in others:
        for call, name in sorted(called[worker].items()):
            if (other := called[first].get(call, name)) != name:
                return _different_text(call, first, other, worker, name)
    return None


def _different_text(call: int, first: int, name: str, second: int, other: str) -> str:
    return (
        f"The workers call different functions: call {call} is {name} on worker {first} and {other} on worker "
        f"{second}. {ONE_PROGRAM}"
    )


def different_earlier_calls(name: str, earlier: Mapping[int, Earlier]) -> tuple[str, tuple[int, int]] | None:
    """Return the error if two workers that trace `name` have made different earlier calls, and name the two."""
    known = [(worker, calls) for worker, calls in sorted(earlier.items()) if calls.digest is not None]
    for worker, calls in known[1:]:
        first, reference = known[0]
        if calls == reference:
            continue
        what = f"after {calls.number}" if calls.number != reference.number else "after as many, but not of the same"
        text = (
            f"The workers call different functions: worker {first} traces {name} after {reference.number} calls of "
            f"functions that all workers must call, worker {worker} {what}. {ONE_PROGRAM}"
        )
        return text, (first, worker)
    return None


_WITHOUT_JIT = (
    "without jit (JAX_DISABLE_JIT, jax.disable_jit()) it runs line by line. Disable it on all workers, or none."
)
_CHANGED = (
    "the shapes, dtypes or static arguments of that call changed on some workers only (a Python number in place of an "
    "array, of weak type, is such a change). Every worker must see the same changes. For a batch of another size: omit "
    "it (`drop_last=True`), pad it to the usual size (a worker without samples passes an empty block of its usual "
    "dtype), or pass its global size, which changes on all workers, as a static argument. Or that worker alone has "
    "lost what JAX keeps of traces: call jax.clear_caches(), or clear_cache() of a function, on all workers or on none."
)


def _traced_by_some(view: View) -> Deadlock | None:
    """Find a worker that traces a function in a call that a worker it waits for has already passed."""
    for worker, state in sorted(view.states.items()):
        if state.kind != "agreeing" or not _traces(state.calls):
            continue
        past = tuple(w for w in state.waits_for if _is_past(view, w, state.calls) and not view.coming(w, worker))
        if past:
            text = (
                f"Worker {worker} traces {state.calls.name} again in call {state.calls.number} (at {state.where}), but "
                f"{workers_text(past)} did not: {_WITHOUT_JIT if 'jax_disable_jit' in state.where else _CHANGED}"
            )
            return Deadlock(text, (worker,), (worker, *past))
    return None


def _traces(calls: Calls) -> bool:
    return calls.tracing and calls.inside and calls.passed < calls.number


def _is_past(view: View, worker: int, traced: Calls) -> bool:
    """Return whether a worker has passed a traced call, and has made the same calls until then."""
    calls = view.states[worker].calls if worker in view.states else Calls()
    if calls.passed < traced.number or not traced.digests:
        return False
    if (digest := calls.digest_at(traced.number)) is None:
        return not view.in_full  # if not, they must be asked for
    return digest == traced.digests[-1]


# --- who waits for whom ---


def _cycle(view: View) -> Deadlock | None:
    """Find the largest set of workers that wait for each other, or for one that has left."""
    stuck = {worker for worker, state in view.states.items() if state.waits or state.kind == "left"}
    absent = _absent(view, stuck)
    needed = {w: set(_needed(view, w, stuck, absent)) for w in stuck if view.states[w].kind != "left"}
    needed_by: dict[int, list[int]] = {}
    for worker, others in needed.items():
        for other in others:
            needed_by.setdefault(other, []).append(worker)
    moves = [worker for worker, others in needed.items() if not others]
    while moves:
        worker = moves.pop()
        del needed[worker]
        for other in needed_by.get(worker, ()):
            needed[other].discard(worker)
            if not needed[other]:
                moves.append(other)
    for worker, others in sorted(needed.items()):  # a worker that has left explains more than one that waits
        if left := [other for other in others if view.states[other].kind == "left"]:
            return _gone(view, min(left), worker)
    if not needed:
        return None
    cycle = find_cycle(min(needed), lambda worker: sorted(needed[worker]))
    listed = "; ".join(f"worker {worker} {view.states[worker].describe()}" for worker in cycle)
    advice = one_program(view.states[worker].label for worker in cycle)
    text = f"The workers wait for each other in a cycle: {listed}. {advice}"
    return Deadlock(text, tuple(sorted(cycle)), tuple(sorted(cycle)))


def _needed(view: View, waiting: int, stuck: set[int], absent: Callable[[State], frozenset[int]]) -> Iterable[int]:
    """Return the workers of `stuck` each of which the worker needs to continue; none if that is not certain."""
    state = view.states[waiting]
    if state.kind == "agreeing":
        others = (w for w in state.waits_for if w in stuck)
        return (w for w in others if not view.coming(w, waiting) and not _has_sent(view.states[w], waiting, state))
    if name := state.plan:
        return view.plans.get(name, {}).get(waiting, Dependencies()).required & absent(state) - {waiting}
    return ()


def _absent(view: View, stuck: set[int]) -> Callable[[State], frozenset[int]]:
    """Return the workers of `stuck` that have not started the program of a state: found once for all in one program."""
    known: dict[object, frozenset[int]] = {}

    def of(state: State) -> frozenset[int]:
        key = (state.program, state.calls.number, state.calls.digests)
        if key not in known:
            others = ((w, view.states[w].calls) for w in stuck)
            known[key] = frozenset(w for w, c in others if c.passed < state.program and state.calls.agrees_with(c))
        return known[key]

    return of


def _has_sent(sender: State, waiting: int, state: State) -> bool:
    """Return whether a worker in the same agreement has sent its part to the waiting one, which has yet to look."""
    same = sender.kind == "agreeing" and sender.label == state.label and sender.waits_for == (waiting,)
    return same and (len(state.waits_for) > 1 or waiting < min(state.waits_for))


def workers_text(workers: tuple[int, ...]) -> str:
    """Return "worker 3", or "workers 1, 2 and 5"."""
    if len(workers) == 1:
        return f"worker {workers[0]}"
    shown = [str(worker) for worker in workers[:8]]
    if len(workers) > 8:
        return f"workers {', '.join(shown)} and {len(workers) - 8} more"
    return f"workers {', '.join(shown[:-1])} and {shown[-1]}" if shown else "no worker"
