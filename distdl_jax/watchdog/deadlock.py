"""Whether workers that wait can ever go on: decided from what each of them says that it is doing.

Nothing is concluded from the time that something takes, only from states that cannot change any more. What a worker has
said may be over before it can say so (Python code that keeps the interpreter's lock stops its watchdog too); so those
who are said to wait are asked again before anything is decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from distdl_jax.errors import ONE_PROGRAM

Kind = Literal["running", "agreeing", "executing", "compiling", "left"]


@dataclass(frozen=True)
class State:
    """What one worker is doing.

    - `kind`: "agreeing" (while tracing or making partitions it waits for `waits_for`, about `purpose`, `since` a time
      of its own clock), "executing" (in a compiled program), "left" (its program has ended, with `status`), or
      "running" (anything else).
    - `where`: its source line.
    - `calls`: how many calls of checked functions it has begun; `names`: those of the last ones.
    - `in_call`, `tracing`: whether it is in the last of them, and whether it traces it.
    """

    kind: Kind
    where: str = ""
    purpose: str = ""
    waits_for: tuple[int, ...] = ()
    since: float = 0.0
    calls: int = 0
    names: tuple[str, ...] = ()
    in_call: bool = False
    tracing: bool = False
    status: int = 0

    def name_of(self, call: int) -> str | None:
        """The function of the given call (from 1); None where it is not remembered."""
        place = len(self.names) - (self.calls - call) - 1
        return self.names[place] if 0 <= place < len(self.names) else None

    def describe(self) -> str:
        """What it is doing, after "worker 3 "."""
        match self.kind:
            case "agreeing":
                return f"is about to run {self.purpose} ({self.where}), and waits for {workers_text(self.waits_for)}"
            case "executing":
                return f"is in {self._describe_call()}"
            case "compiling":
                return f"compiles ({self.where})"
            case "left":
                ended = f"with exit status {self.status}" if self.status else "as if all were done"
                return f"has ended its program {ended}, after {self.calls} calls"
        return f"is at {self.where}, outside any operation" if self.where else "is outside any operation"

    def _describe_call(self) -> str:
        if self.in_call:
            return f"call {self.calls}, of {self.name_of(self.calls)}"
        last = f"; its last call is {self.calls}, of {self.name_of(self.calls)}" if self.calls else ""
        return f"a compiled program ({self.where}{last})"


class Deadlock(NamedTuple):
    """Why some of the workers can never go on, and which workers that is said to be waiting (by world rank) it rests
    on; all else that it rests on is for ever."""

    text: str
    waiting: tuple[int, ...]


def find_deadlock(states: Mapping[int, State]) -> Deadlock | None:
    """What keeps some of the workers (by world rank) from ever going on; None where that is not certain."""
    return _different_calls(states) or _gone(states) or _traced_by_some(states) or _agreements_in_a_cycle(states)


def _different_calls(states: Mapping[int, State]) -> Deadlock | None:
    known = [(worker, state) for worker, state in sorted(states.items()) if state.names]
    for worker, state in known[1:]:
        first, reference = known[0]
        for call in _calls_in_common(reference, state):
            ours, theirs = reference.name_of(call), state.name_of(call)
            if ours != theirs:
                text = (
                    f"The workers call different functions: call {call} is {ours} on worker {first} and {theirs} on "
                    f"worker {worker}. {ONE_PROGRAM}"
                )
                return Deadlock(text, ())
    return None


def _calls_in_common(a: State, b: State) -> range:
    start = max(a.calls - len(a.names), b.calls - len(b.names)) + 1
    return range(start, min(a.calls, b.calls) + 1)


def _gone(states: Mapping[int, State]) -> Deadlock | None:
    gone = {worker: state for worker, state in states.items() if state.kind == "left"}
    for waiting, state in sorted(states.items()):
        for worker, left in sorted(gone.items()):
            waits = (state.kind == "agreeing" and (worker in state.waits_for or left.status != 0)) or (
                state.kind == "executing" and (left.status != 0 or state.calls > left.calls)
            )
            if waits:
                text = f"Worker {worker} {left.describe()}, but worker {waiting} {state.describe()}. {ONE_PROGRAM}"
                return Deadlock(text, (waiting,))
    return None


def _traced_by_some(states: Mapping[int, State]) -> Deadlock | None:
    for tracing, state in sorted(states.items()):
        if state.kind != "agreeing" or not state.tracing:
            continue
        past = [worker for worker in state.waits_for if worker in states and _is_past(states[worker], state.calls)]
        if past:
            name = state.name_of(state.calls)
            text = (
                f"Worker {tracing} traces {name} anew in call {state.calls} (at {state.where}), but "
                f"{workers_text(tuple(past))} did not: the shapes, dtypes or static arguments of that call changed on "
                "some workers only. Every worker must see the same changes: bring the batch to one size on all "
                "workers (a worker without samples passes an empty block of its usual dtype)."
            )
            return Deadlock(text, (tracing,))
    return None


def _is_past(state: State, call: int) -> bool:
    """Whether the worker will never trace the given call."""
    if state.kind == "left" or state.calls > call:
        return True
    return state.calls == call and (state.kind == "executing" or not state.in_call)


def _agreements_in_a_cycle(states: Mapping[int, State]) -> Deadlock | None:
    for start in sorted(states):
        path: list[int] = []
        worker: int | None = start
        while worker is not None and worker not in path:
            path.append(worker)
            state = states.get(worker)
            waits_for = state.waits_for if state is not None and state.kind == "agreeing" else ()
            worker = next((w for w in waits_for if _holds_up(w, path[-1], states)), None)
        if worker is not None:
            cycle = path[path.index(worker) :]
            listed = "; ".join(f"worker {w} {states[w].describe()}" for w in cycle)
            return Deadlock(f"The workers wait for each other in a cycle: {listed}. {ONE_PROGRAM}", tuple(cycle))
    return None


def _holds_up(worker: int, waiting: int, states: Mapping[int, State]) -> bool:
    """Whether `waiting`, which is in an agreement, cannot go on before another one, that of `worker`, ends.

    Who is in the same agreement has told the one that it waits for, though that one may not have looked yet.
    """
    theirs, ours = states.get(worker), states[waiting]
    if theirs is None or theirs.kind != "agreeing":
        return False
    has_told = theirs.purpose == ours.purpose and theirs.waits_for == (waiting,)
    return not (has_told and (len(ours.waits_for) > 1 or waiting < worker))


def workers_text(workers: tuple[int, ...]) -> str:
    """ "worker 3", "workers 1, 2 and 5"."""
    if len(workers) == 1:
        return f"worker {workers[0]}"
    shown = [str(worker) for worker in workers[:8]]
    if len(workers) > 8:
        return f"workers {', '.join(shown)} and {len(workers) - 8} more"
    return f"workers {', '.join(shown[:-1])} and {shown[-1]}" if shown else "no worker"
