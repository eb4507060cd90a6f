"""One worker of a process as the others see it, and the sentences about why some of them can never continue.

The sentences are made while the workers concerned wait, so their threads don't move.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from time import monotonic
from typing import Any

from distdl_jax.errors import ONE_PROGRAM, one_program, shown_label
from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.source_lines import line_of
from distdl_jax.watchdog.programs.diagnosis import describe, tags_text
from distdl_jax.watchdog.programs.ir import Operation
from distdl_jax.watchdog.programs.matching import Stop
from distdl_jax.watchdog.watch.call_log import Calls
from distdl_jax.watchdog.watch.clock import seconds_text
from distdl_jax.watchdog.watch.deadlock import State, View, different_functions, find_deadlock, workers_text
from distdl_jax.watchdog.watch.status import WorkerStatus

AGREEMENT = "agreement"
"""The kind of operation by which workers agree on something while they trace; its `op` is the label."""

_COMPARE = (
    " Or an output is not used, or not differentiated, on one of them, and an operation of the backward pass is "
    "missing there: dj.grad and dj.value_and_grad, used in place of JAX's, prevent that, jitted or not."
)


class Participant:
    """One worker at the rendezvous: its operation, and the parts of it that still wait.

    - `sends`, `receives`, `meets`: the halves of a message, or the meeting of a team, that wait for partners.
    - `listens`: whether it waits for the decision of the first worker of its team.
    - `given`, `result`: its input and output.
    - `since`: when it arrived at the operation. `done`: the number of operations it has completed.
    - `ended`: whether its program has ended.
    - `gave_up`: whether its operation was ended before it was complete.
    - `raised`: the error that it was last made to raise here.
    - `thread`: runs its program; `status`: the activity of the thread.
    """

    def __init__(self, rank: int, size: int, lock: threading.Lock) -> None:
        self.rank = rank
        self.wake = threading.Condition(lock)
        self.operation: Operation | None = None
        self.given: Any = None
        self.result: Any = None
        self.sends = self.receives = self.meets = self.listens = False
        self.done = self.failures_seen = 0
        self.ended = self.gave_up = False
        self.since = 0.0
        self.thread = 0
        self.raised: BaseException | None = None
        self.status = WorkerStatus(rank, size)

    @property
    def waits(self) -> bool:
        """Whether part of its operation waits for others."""
        return self.sends or self.receives or self.meets or self.listens

    @property
    def label(self) -> str:
        """The label of its current agreement; empty outside of one."""
        agrees = self.operation is not None and self.operation.kind == AGREEMENT and not self.ended
        return self.operation.op if agrees and self.operation is not None else ""

    def begin(self, operation: Operation, given: Any) -> None:
        """Start an operation."""
        self.operation, self.given, self.result, self.gave_up = operation, given, None, False
        self.since = monotonic()
        self.sends, self.receives = operation.dest is not None, operation.source is not None
        self.meets = not operation.is_message

    def end(self) -> Any:
        """End the operation, which is complete, and return the worker's result."""
        self.done += 1
        result, self.given, self.result = self.result, None, None
        return result

    def release(self) -> None:
        """End its wait."""
        self.sends = self.receives = self.meets = self.listens = False
        self.wake.notify()

    def give_up(self) -> None:
        """End its wait, if it waits; a complete operation stays complete."""
        if self.waits:
            self.gave_up = True
            self.release()

    def is_at(self, team: Workers) -> bool:
        """Return whether it waits in a collective of this team."""
        return self.meets and self.operation is not None and self.operation.team == team

    def place(self) -> str:
        """Describe its operation, the layer, and the user's line at which the thread is: the same in each pass."""
        assert self.operation is not None
        return describe(replace(self.operation, place=replace(self.operation.place, line=_line(self))))


def deadlock_text(chain: list[Participant]) -> str:
    """Explain why workers can't continue: each of `chain` waits for the next, the last for the first, or has ended."""
    if (text := _watchdog_text(chain)) is not None:
        return text
    first, last = chain[0], chain[-1]
    if last.ended:
        done = "1 operation" if last.done == 1 else f"{last.done} operations"
        what = f"{_at(first)}, but worker {last.rank} has ended its program, after {done}"
    elif len(chain) == 2:
        stops = (Stop(worker.rank, worker.operation, worker.done + 1, 0) for worker in chain)
        what = f"{_at(first)}, but {_at(last)}: neither can go on{tags_text(*stops)}"
    else:
        what = f"{'; '.join(map(_at, chain))}: each waits for the next"
    return f"The workers wait for each other for ever: {what}. {_advice(chain)}"


def amounts_text(first: Participant, second: Participant) -> str:
    """Explain that two workers' operations belong together but differ in length or dtype."""
    pair = sorted((first, second), key=lambda worker: worker.rank)
    if not (first.label and second.label) and (text := _watchdog_text(pair)) is not None:
        return text
    what = f"The workers' programs differ: {_at(*pair)}, but {_at(*reversed(pair))}"
    if first.label or second.label:
        return f"{what}. {_advice(pair)}"
    return (
        f"{what}: the two belong together, and must mean the same data. Look for a shape, dtype or argument that "
        "differs between these workers."
    )


def wait_text(first: Participant, seconds: float, awaited: list[Participant], others: Workers) -> str:
    """Tell that a worker has waited for this long for `awaited`, which run; `others` wait, too."""
    doing = _at(first).removeprefix(f"worker {first.rank} ")
    lines = [f"Worker {first.rank} has waited for {seconds_text(seconds)}: it {doing}"]
    lines += [f"Worker {worker.rank} is at {_line(worker) or 'its end'}" for worker in awaited[:8]]
    if others:
        lines.append(f"{workers_text(others).capitalize()} {'wait' if others[1:] else 'waits'}, too")
    return f"distdl_jax: {'. '.join(lines)}. The job goes on.\n"


def _advice(workers: list[Participant]) -> str:
    """Return the end of a report, with a hint if a worker is in an operation that was never compared."""
    advice = one_program(worker.label for worker in workers)
    uncompared = any(worker.waits and not worker.label and not worker.status.in_call for worker in workers)
    return advice + _COMPARE if uncompared and advice is ONE_PROGRAM else advice


def _watchdog_text(workers: list[Participant]) -> str | None:
    """Return the conclusion that the watchdog of a job of processes would draw; None if there is none."""
    states = {worker.rank: _state(worker, workers) for worker in workers}
    if not any(worker.label for worker in workers):
        # Then the operations tell more, unless the workers have called different functions.
        states = {rank: replace(state, kind="running") for rank, state in states.items()}
    names = {worker.rank: dict(worker.status.calls) for worker in workers}
    if (text := different_functions(names)) is not None:
        return text
    deadlock = find_deadlock(View(states))
    return None if deadlock is None else deadlock.text


def _at(worker: Participant, other: Participant | None = None) -> str:
    """Describe a waiting worker's operation, in contrast to another one's."""
    if worker.label and worker.operation is not None:
        label = shown_label(worker.label, "" if other is None else other.label)
        return f"worker {worker.rank} is about to run {label} ({worker.operation.place.line})"
    return f"worker {worker.rank} is in its operation {worker.done + 1}, {worker.place()}"


def _line(worker: Participant) -> str:
    frame = sys._current_frames().get(worker.thread)
    return "" if frame is None else line_of(frame)


def _state(worker: Participant, workers: list[Participant]) -> State:
    """Return the worker's state as seen by the watchdog of a job of processes.

    In an agreement it waits for the participants among `workers`; as over MPI, the first worker of the team waits for
    the others, and these for the first.
    """
    number, name = worker.status.calls[-1]
    inside, operation = worker.status.in_call, worker.operation
    # A worker in a call, in an operation other than an agreement, has finished its trace.
    passed = number - (inside and (not worker.waits or bool(worker.label)))
    state = State("running", calls=Calls(number, name, (number,), inside, worker.status.tracing, passed=passed))
    if worker.ended:
        return replace(state, kind="left")
    if not worker.waits or operation is None:
        return state
    if not worker.label:
        return replace(state, kind="executing", where=_line(worker))
    first, *others = operation.team
    awaited = {other.rank for other in workers if other is not worker} & {*operation.team}
    awaited.update(others if worker.rank == first else [first])
    where = operation.place.line
    return replace(state, kind="agreeing", label=worker.label, where=where, waits_for=tuple(sorted(awaited)))
