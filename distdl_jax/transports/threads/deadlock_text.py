"""The sentences that say why workers of one process can never go on, or what two of them don't mean alike.

They are made while the workers concerned wait, so their threads stand still.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from distdl_jax.errors import ONE_PROGRAM, one_program, shown_label
from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.transports.threads.participant import AGREEMENT, Participant
from distdl_jax.watchdog.programs.diagnosis import describe, tags_text
from distdl_jax.watchdog.programs.ir import Operation
from distdl_jax.watchdog.programs.matching import Stop
from distdl_jax.watchdog.source_lines import line_of
from distdl_jax.watchdog.watch.call_log import Calls
from distdl_jax.watchdog.watch.clock import seconds_text
from distdl_jax.watchdog.watch.deadlock import State, View, different_functions, find_deadlock, workers_text

_COMPARE = (
    " Or an output is not used, or not differentiated, on one of them, and an operation of the backward pass is "
    "missing there: dj.grad and dj.value_and_grad, in place of JAX's, see to that, jitted or not."
)


def deadlock_text(chain: list[Participant]) -> str:
    """Why the workers of `chain` can't go on: each waits for the next, the last for the first, or it has ended."""
    if (text := _as_the_watchdog_says(chain)) is not None:
        return text
    first, last = chain[0], chain[-1]
    if last.ended:
        what = f"{_at(first)}, but worker {last.rank} has ended its program, after {_operations(last.done)}"
    elif len(chain) == 1:
        what = f"{_at(first)}, and waits for itself"
    elif len(chain) == 2:
        what = f"{_at(first)}, but {_at(last)}: neither can go on{tags_text(_stop(first), _stop(last))}"
    else:
        what = f"{'; '.join(map(_at, chain))}: each waits for the next"
    advice = one_program(map(_label, chain))
    if advice is ONE_PROGRAM:
        advice += _about_adjoints(*chain)
    return f"The workers wait for each other for ever: {what}. {advice}"


def _about_adjoints(*workers: Participant) -> str:
    """Return a hint where a worker is in an operation that nobody has compared."""
    uncompared = any(worker.waits and not _agrees(worker) and not worker.status.in_call for worker in workers)
    return _COMPARE if uncompared else ""


def amounts_text(first: Participant, second: Participant) -> str:
    """Say that two workers' operations belong together but differ in length or dtype."""
    first, second = sorted((first, second), key=lambda worker: worker.rank)
    if not (_agrees(first) and _agrees(second)) and (text := _as_the_watchdog_says([first, second])) is not None:
        return text
    if _agrees(first) or _agrees(second):
        advice = one_program(map(_label, (first, second)))
        return (
            f"The workers' programs differ: {_at(first, second)}, but {_at(second, first)}. {advice}"
            f"{_about_adjoints(first, second)}"
        )
    return (
        f"The workers' programs differ: {_at(first)}, but {_at(second)}: the two belong together, and must mean the "
        "same data. Look for a shape, dtype or argument that differs between these workers."
    )


def place_of(worker: Participant) -> str:
    """Return where a worker waits: the same in each step of a loop."""
    return _operation(worker)


def wait_text(first: Participant, seconds: float, awaited: list[Participant], others: Workers) -> str:
    """Say that a worker has waited so long for `awaited`, which run, as a fact; `others` wait, too."""
    doing = _at(first).removeprefix(f"worker {first.rank} ")
    lines = [f"Worker {first.rank} has waited for {seconds_text(seconds)}: it {doing}"]
    lines += [f"Worker {worker.rank} is at {_line(worker) or 'its end'}" for worker in awaited[:8]]
    if others:
        lines.append(f"{workers_text(others).capitalize()} {'wait' if others[1:] else 'waits'}, too")
    return f"distdl_jax: {'. '.join(lines)}. The job goes on.\n"


def _as_the_watchdog_says(workers: list[Participant]) -> str | None:
    """Return what the watchdog of a job of processes would conclude; None where that is nothing."""
    states = {worker.rank: _state(worker, workers) for worker in workers}
    if not any(_agrees(worker) for worker in workers):
        # Then the operations tell more, unless the workers have called different functions.
        states = {rank: replace(state, kind="running") for rank, state in states.items()}
    names = {worker.rank: dict(worker.status.calls) for worker in workers}
    if (text := different_functions(names)) is not None:
        return text
    deadlock = find_deadlock(View(states))
    return None if deadlock is None else deadlock.text


def _agrees(worker: Participant) -> bool:
    return worker.operation is not None and worker.operation.kind == AGREEMENT and not worker.ended


def _label(worker: Participant) -> str:
    """Return the label of the agreement that a worker is in, if any."""
    return worker.operation.op if worker.operation is not None and _agrees(worker) else ""


def _at(worker: Participant, other: Participant | None = None) -> str:
    """Describe what a waiting worker is doing, beside another one."""
    if _agrees(worker):
        assert worker.operation is not None
        label = shown_label(worker.operation.op, "" if other is None else _label(other))
        return f"worker {worker.rank} is about to run {label} ({worker.operation.place.line})"
    return f"worker {worker.rank} is in its operation {worker.done + 1}, {_operation(worker)}"


def _operation(worker: Participant) -> str:
    """Describe the operation, its layer, and the user's line that the thread is at."""
    operation = worker.operation
    assert operation is not None
    return describe(replace(operation, place=replace(operation.place, line=_line(worker))))


def _line(worker: Participant) -> str:
    frame = sys._current_frames().get(worker.thread)
    return "" if frame is None else line_of(frame)


def _operations(count: int) -> str:
    return "1 operation" if count == 1 else f"{count} operations"


def _stop(worker: Participant) -> Stop:
    return Stop(worker.rank, worker.operation, worker.done + 1, 0)


def _state(worker: Participant, workers: list[Participant]) -> State:
    """Return the worker's state as the watchdog of a job of processes has it.

    In an agreement it waits for those of `workers` that take part in it, too.
    """
    number, name = worker.status.calls[-1]
    inside = worker.status.in_call
    # Whoever is in a call, in an operation that is no agreement, has passed its trace.
    passed = number - (inside and (not worker.waits or _agrees(worker)))
    calls = Calls(number, name, (number,), inside, worker.status.tracing, passed=passed)
    state = State("running", calls=calls)
    if worker.ended:
        return replace(state, kind="left")
    if not worker.waits:
        return state
    if _agrees(worker):
        assert worker.operation is not None
        label, where = worker.operation.op, worker.operation.place.line
        here = {other.rank for other in workers if other is not worker} & {*worker.operation.team}
        waits_for = tuple(sorted(here.union(_others(worker.operation, worker))))
        return replace(state, kind="agreeing", label=label, where=where, waits_for=waits_for)
    return replace(state, kind="executing", where=_line(worker))


def _others(operation: Operation, worker: Participant) -> tuple[int, ...]:
    """Return whom a worker of an agreement waits for, as over MPI: the first for the others, these for the first."""
    first, *others = operation.team
    return tuple(others) if worker.rank == first else (first,)
