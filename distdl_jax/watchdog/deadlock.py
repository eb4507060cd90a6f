"""Whether workers that wait can ever go on: decided from what each of them says that it is doing.

Nothing is concluded from the time that something takes, only from states that cannot change any more: a worker that
waits for one that has left, or that waits itself, and for nothing that is on its way. What a worker has said may be
over by now; so the coordinator has those concerned say it again, and counts the messages between them, before it
concludes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from distdl_jax.errors import ONE_PROGRAM, one_program
from distdl_jax.watchdog.call_log import Calls, CallWindow, Earlier
from distdl_jax.watchdog.dependencies import Dependencies, Plans

Kind = Literal["running", "agreeing", "elsewhere", "executing", "compiling", "left"]


@dataclass(frozen=True)
class State:
    """What one worker is doing.

    - `kind`: "agreeing" (while tracing or making partitions it waits for `waits_for`, about `purpose`), "executing" (in
      a compiled program), "left" (its program has ended, with `status`), or "running" (anything else). "elsewhere" is
      agreeing, in a world of some of these workers, which draws its own conclusions from that.
    - `episode`: which of its agreements, or runs of programs, it is in.
    - `where`: its source line.
    - `calls`: its calls of checked functions. `program`, `function`: the call whose program it executes, and of which
      function; 0 and "" where that is not known.
    """

    kind: Kind
    where: str = ""
    purpose: str = ""
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
        """The function whose plan it executes, in the call that `program` says; empty where that is not known."""
        if self.kind != "executing" or not self.program:
            return ""
        return self.function or (self.calls.name if self.program == self.calls.number else "")

    def is_as(self, other: State | None) -> bool:
        """Whether the worker has not moved between the two."""
        return other is not None and (self.kind, self.episode) == (other.kind, other.episode)

    def describe(self) -> str:
        """What it is doing, after "worker 3 "."""
        match self.kind:
            case "agreeing" | "elsewhere":
                where = self.where if self.kind == "agreeing" else f"{self.where}, in another communicator"
                others = f", and waits for {workers_text(self.waits_for)}" if self.waits_for else ""
                return f"is about to run {self.purpose} ({where}){others}"
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
            return f"call {calls.number}, of {calls.name}"
        if self.function:
            return f"the program of {self.function} ({self.where})"
        last = f"; its last call is {calls.number}, of {calls.name}" if calls.number else ""
        return f"a compiled program ({self.where}{last})"


class Deadlock(NamedTuple):
    """Why some of the workers can never go on.

    - `waiting`: those that it takes to be waiting, which must have been so at one time (world ranks).
    - `about`: whom it is about: all that it names as having gone another way.
    - `call`: where workers trace a function anew in a call that others are past, the call.
    """

    text: str
    waiting: tuple[int, ...]
    about: tuple[int, ...]
    call: int = 0


def _nothing_coming(sender: int, receiver: int) -> bool:
    return False


@dataclass(frozen=True)
class View:
    """What the conclusions are drawn from.

    - `states`: by worker. `windows`: the last calls, where they were asked for.
    - `plans`: what each worker's part in a function needs.
    - `coming`: whether a message of an agreement may be on its way from one worker to another.
    """

    states: Mapping[int, State]
    plans: Plans = field(default_factory=dict)
    windows: Mapping[int, CallWindow] | None = None
    coming: Callable[[int, int], bool] = _nothing_coming


def find_deadlock(view: View) -> Deadlock | None:
    """What keeps some of the workers from ever going on; None where that is not certain."""
    return _failed(view) or _never_runs(view) or _traced_by_some(view) or _standstill(view) or _different_calls(view)


def _failed(view: View) -> Deadlock | None:
    """A worker that has ended with an error, and one that waits: the job has failed already."""
    failed = min(
        (worker for worker, state in view.states.items() if state.kind == "left" and state.status), default=None
    )
    waiting = min((worker for worker, state in view.states.items() if state.waits), default=None)
    if failed is None or waiting is None:
        return None
    return _gone(failed, view.states[failed], waiting, view.states[waiting])


def _gone(worker: int, left: State, waiting: int, state: State) -> Deadlock:
    text = f"Worker {worker} {left.describe()}, but worker {waiting} {state.describe()}. {one_program([state.purpose])}"
    return Deadlock(text, (waiting,), (worker,) if left.status else (worker, waiting))


# --- calls ---


def _never_runs(view: View) -> Deadlock | None:
    """A worker in a program that can't end without one that could not compile, or start, its own part of it."""
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
    known = [(w, s) for w, s in sorted(view.states.items()) if s.kind != "running" and s.calls.digests]
    if not any(state.waits for _, state in known):
        return None
    for worker, state in known[1:]:
        first, reference = known[0]
        if state.calls.digests == reference.calls.digests and state.calls.number == reference.calls.number:
            continue
        if not state.calls.differs_from(reference.calls):
            continue
        call = min(state.calls.number, reference.calls.number)
        ours = theirs = ""
        if view.windows is not None:
            found = _first_difference(view, first, worker)
            if found is None:
                continue
            call, ours, theirs = found
        waiting = tuple(w for w, s in ((first, reference), (worker, state)) if s.waits)
        if not waiting:
            continue
        return Deadlock(_different_text(call, first, ours, worker, theirs), waiting, (first, worker))
    return None


def different_functions(called: Mapping[int, Mapping[int, str]]) -> str | None:
    """What is wrong where a call, by its number, is another function's on two workers."""
    first, *others = sorted(called)
    for worker in others:
        for call, name in sorted(called[worker].items()):
            if (other := called[first].get(call, name)) != name:
                return _different_text(call, first, other, worker, name)
    return None


def _different_text(call: int, first: int, ours: str, second: int, theirs: str) -> str:
    return (
        f"The workers call different functions: call {call} is {ours} on worker {first} and {theirs} on worker "
        f"{second}. {ONE_PROGRAM}"
    )


def different_earlier_calls(name: str, earlier: Mapping[int, Earlier]) -> tuple[str, tuple[int, int]] | None:
    """What is wrong where two workers that trace `name` together are known to have made different calls before, and
    which two."""
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


def _first_difference(view: View, first: int, second: int) -> tuple[int, str, str] | None:
    """The first call that is another function's on each: its number, and both."""
    assert view.windows is not None
    a, b = view.windows.get(first, CallWindow()), view.windows.get(second, CallWindow())
    for call in range(max(a.last - len(a.names), b.last - len(b.names)) + 1, min(a.last, b.last) + 1):
        if (ours := a.name_of(call)) != (theirs := b.name_of(call)):
            return call, str(ours), str(theirs)
    return None


_WITHOUT_JIT = (
    "without jit (JAX_DISABLE_JIT, jax.disable_jit()) it runs line by line. Disable it on all workers, or none."
)
_CHANGED = (
    "the shapes, dtypes or static arguments of that call changed on some workers only (a Python number in place of an "
    "array, of weak type, is such a change). Every worker must see the same changes: bring the batch to one size on "
    "all workers (a worker without samples passes an empty block of its usual dtype)."
)


def _traced_by_some(view: View) -> Deadlock | None:
    """A worker that traces a function in a call that one for which it waits has passed."""
    tracing = [w for w, s in view.states.items() if s.kind == "agreeing" and _traces(s.calls)]
    # First those who trace what was never agreed on: the others can go on.
    for worker in sorted(tracing, key=lambda w: (view.states[w].calls.agreed_before, w)):
        state = view.states[worker]
        calls = state.calls
        past = tuple(w for w in state.waits_for if _is_past(view, worker, w) and not view.coming(w, worker))
        if past:
            text = (
                f"Worker {worker} traces {calls.name} anew in call {calls.number} (at {state.where}), but "
                f"{workers_text(past)} did not: {_WITHOUT_JIT if 'jax_disable_jit' in state.where else _CHANGED}"
            )
            return Deadlock(text, (worker,), (worker, *past), calls.number)
    return None


def _traces(calls: Calls) -> bool:
    return calls.tracing and calls.inside and calls.passed < calls.number


def _is_past(view: View, tracing: int, worker: int) -> bool:
    """Whether the worker has passed the call that `tracing` is in, and both have made the same calls until then."""
    ours = view.states[tracing].calls
    theirs = view.states[worker].calls if worker in view.states else Calls()
    if theirs.passed < ours.number or not ours.digests:
        return False
    if (digest := theirs.digest_at(ours.number)) is not None:
        return digest == ours.digests[-1]
    if view.windows is None:
        return True  # their calls must be looked at
    a, b = view.windows.get(tracing, CallWindow()), view.windows.get(worker, CallWindow())
    begins = max(a.last - len(a.names), b.last - len(b.names)) + 1
    common = range(begins, ours.number + 1)
    return bool(common) and a.last >= ours.number and all(a.name_of(call) == b.name_of(call) for call in common)


# --- who waits for whom ---


def _standstill(view: View) -> Deadlock | None:
    """Workers that wait for each other, or for one that has left: the most of them of whom each waits for another."""
    stuck = {worker for worker, state in view.states.items() if state.waits or state.kind == "left"}
    never_comes = _NeverComes(view, stuck)
    held = {w: set(_held_up_by(view, w, stuck, never_comes)) for w in stuck if view.states[w].kind != "left"}
    holds: dict[int, list[int]] = {}
    for worker, others in held.items():
        for other in others:
            holds.setdefault(other, []).append(worker)
    moves = [worker for worker, others in held.items() if not others]
    while moves:
        worker = moves.pop()
        del held[worker]
        for other in holds.get(worker, ()):
            held[other].discard(worker)
            if not held[other]:
                moves.append(other)
    # Who has left explains more than who waits.
    reasons = {w: min(others, key=lambda o: (view.states[o].kind != "left", o)) for w, others in held.items()}
    for start in sorted(reasons):
        path = [start]
        while (following := reasons.get(path[-1])) is not None and following not in path:
            path.append(following)
        if following is None:
            *_, waiting, worker = path
            return _gone(worker, view.states[worker], waiting, view.states[waiting])
        cycle = path[path.index(following) :]
        listed = "; ".join(f"worker {w} {view.states[w].describe()}" for w in cycle)
        advice = one_program(view.states[w].purpose for w in cycle)
        text = f"The workers wait for each other in a cycle: {listed}. {advice}"
        return Deadlock(text, tuple(sorted(cycle)), tuple(sorted(cycle)))
    return None


def _held_up_by(view: View, waiting: int, stuck: set[int], never_comes: _NeverComes) -> Iterable[int]:
    """Those of `stuck` without any of which the worker can't go on; none where it is not certain."""
    state = view.states[waiting]
    if state.kind == "agreeing":
        candidates = (w for w in state.waits_for if w in stuck)
        return (w for w in candidates if not view.coming(w, waiting) and not _has_told(view.states[w], waiting, state))
    if name := state.plan:
        return view.plans.get(name, {}).get(waiting, Dependencies()).required & never_comes.to(state) - {waiting}
    return ()


class _NeverComes:
    """Who of those that go no further has not begun a program that another one is in: the same for all who are in the
    same one."""

    def __init__(self, view: View, stuck: set[int]) -> None:
        self._view, self._stuck = view, stuck
        self._known: dict[object, frozenset[int]] = {}

    def to(self, state: State) -> frozenset[int]:
        """Those that do not come to the program that this one is in."""
        key = (state.program, state.calls.number, state.calls.digests)
        if key not in self._known:
            others = ((w, self._view.states[w].calls) for w in self._stuck)
            self._known[key] = frozenset(
                w for w, calls in others if calls.passed < state.program and state.calls.agrees_with(calls)
            )
        return self._known[key]


def _has_told(theirs: State, waiting: int, ours: State) -> bool:
    """Whether a worker that is in the same agreement has told the one that waits for it, which has yet to look."""
    same = theirs.kind == "agreeing" and theirs.purpose == ours.purpose and theirs.waits_for == (waiting,)
    return same and (len(ours.waits_for) > 1 or waiting < min(ours.waits_for))


def workers_text(workers: tuple[int, ...]) -> str:
    """ "worker 3", "workers 1, 2 and 5"."""
    if len(workers) == 1:
        return f"worker {workers[0]}"
    shown = [str(worker) for worker in workers[:8]]
    if len(workers) > 8:
        return f"workers {', '.join(shown)} and {len(workers) - 8} more"
    return f"workers {', '.join(shown[:-1])} and {shown[-1]}" if shown else "no worker"
