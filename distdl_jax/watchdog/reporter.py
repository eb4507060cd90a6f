"""The watch: a thread beside the program that tells the other workers when this one stands still, and keeps the clock.

Worker 0's watch is the desk: it hears from the others what they are doing and decides (`plans.standstill`) whether they
can go on. Where they can't, all workers raise the same error, or the job ends with what each of them was doing. What
cannot be decided is left to the clock, `DISTDL_JAX_TIMEOUT`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from time import monotonic
from typing import Any, NoReturn

from mpi4py import MPI

from distdl_jax.errors import PlanError
from distdl_jax.programs.ir import Program
from distdl_jax.programs.matching import find_stops
from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.abort import end_the_job, say, turn_lock
from distdl_jax.watchdog.deadlock import Deadlock, Inquiry, Kind, State, find_deadlock, workers_text
from distdl_jax.watchdog.flight_recorder import last_operations
from distdl_jax.watchdog.main_thread import Sample, main_line, main_stack, stack_text, user_frames
from distdl_jax.watchdog.status import Waiting, worker_status

PATIENCE = 1.0
"""Seconds for which a worker stands still before it says so."""

GRACE = 3.0
"""Seconds that a worker has to raise what its watch was told, before its watch ends the job."""

BETWEEN_QUESTIONS = 10.0
"""Seconds before a worker that was told to wait longer asks again."""

LATE = 60.0
"""Seconds after which a program is taken to wait for a worker that has left."""

REPORTED_OPERATIONS = 12
"""How many of a worker's last operations its report lists."""

DESK = 0
"""The world rank of the worker whose watch decides."""


class Watch:
    """One worker's watch over one world. `turn` runs in the watch's thread, the rest in the main thread."""

    def __init__(self, comm: MPI.Intracomm, rank: int, size: int, limits: TimeLimits) -> None:
        self.epoch = 0
        self._rank = rank
        self._size = size
        self._comm = comm
        self._limit, self._limit_of_programs = limits
        self._sent: list[MPI.Request] = []
        self._told = State("running")
        self._told_at = 0.0
        self._left: int | None = None
        self._failure: tuple[int, str, float] | None = None
        self._asked_at: float | None = None
        self._not_before = 0.0
        self._ends = False
        self._end: tuple[str, float] | None = None
        self._states: dict[int, State] = {}
        self._inquiry: Inquiry | None = None
        self._questions: list[int] = []
        self._inquiries = 0
        self._since: dict[int, float] = {}
        self.programs: dict[str, Mapping[int, Program]] = {}

    # --- the main thread ---

    def raise_if_failed(self) -> None:
        """Raise what all workers raise, where the desk has said so."""
        if self._failure is not None and self._failure[0] == self.epoch:
            self.epoch += 1
            text, self._failure = self._failure[1], None
            raise PlanError(text)

    def fail(self, text: str) -> NoReturn:
        """Make all workers raise `text`; the first that any worker says is the one that counts."""
        self._post(DESK, ("fail", self.epoch, text))
        deadline = monotonic() + 2 * GRACE
        while monotonic() < deadline:
            self.raise_if_failed()
            time.sleep(0.01)
        raise PlanError(text)

    def leave(self, status: int) -> None:
        """Tell the others that this worker's program has ended, and wait until theirs have."""
        self._left = status
        everyone = self._comm.Ibarrier()
        while not everyone.Test():
            time.sleep(0.005)

    # --- the watch's thread ---

    def turn(self, sample: Sample) -> None:
        """Hear the others, tell them what changed, look at the clock."""
        while self._comm.iprobe(source=MPI.ANY_SOURCE):
            self._hear(self._comm.recv(source=MPI.ANY_SOURCE))
        self._tell(sample)
        if self._rank == DESK:
            self._decide()
        self._look_at_the_clock(sample)
        if self._failure is not None and monotonic() > self._failure[2] + GRACE and sample.executing_for > GRACE:
            # The main thread waits for a message that will not come, so it can't raise.
            self._finish(self._failure[1])
        if self._end is not None and monotonic() > self._end[1]:
            self._finish(self._end[0])

    def _post(self, to: int, message: tuple[Any, ...]) -> None:
        with turn_lock:
            self._sent = [request for request in self._sent if not request.Test()]
            self._sent.append(self._comm.isend(message, to))

    def _end_all(self, text: str) -> None:
        self._ends = True
        self._to_all(("end", text))

    def _to_all(self, message: tuple[Any, ...]) -> None:
        for worker in range(self._size):
            self._post(worker, message)

    def _hear(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("state", int(worker), State() as state):
                if self._states.get(worker, State("running")).kind != state.kind:
                    self._since[worker] = monotonic()
                self._states[worker] = state
            case ("ask", int(number)):
                self._questions.append(number)
            case ("answer", int(worker), int(number)):  # to the desk, after its state
                if self._inquiry is not None and self._inquiry.number == number:
                    self._inquiry.answered.add(worker)
            case ("fail", int(epoch), str(text)):  # to the desk
                self._to_all(("failed", epoch, text))
            case ("failed", int(epoch), str(text)):
                if self._failure is None and epoch == self.epoch:
                    self._failure = (epoch, text, monotonic())
            case ("late", int(worker), float(waited)):  # to the desk
                self._end_for_lateness(worker, waited)
            case ("wait",):
                self._asked_at, self._not_before = None, monotonic() + BETWEEN_QUESTIONS
            case ("end", str(text)):
                self._report()
                # The desk ends the job when all have had time to report; if it can't, each does.
                self._end = (text, monotonic() + (1.0 if self._rank == DESK else 10.0))

    def _state(self, sample: Sample) -> State:
        calls = tuple(worker_status.calls)
        said = State("running", calls=calls[-1][0], names=tuple(name for number, name in calls if number))
        said = replace(said, in_call=worker_status.in_call, tracing=worker_status.tracing)
        waiting = worker_status.waiting
        if self._left is not None:
            return replace(said, kind="left", status=self._left)
        if waiting is not None and self._stands_still(waiting):
            said = replace(said, purpose=waiting.purpose, waits_for=waiting.waits_for, since=waiting.since)
            return replace(said, kind="agreeing", where=waiting.where)
        stands: tuple[tuple[Kind, float], ...]
        stands = (("compiling", sample.compiling_for), ("executing", sample.executing_for))
        for kind, seconds in stands:
            if seconds > PATIENCE:
                # Where it was when it said so first: it has not moved since.
                where = self._told.where if self._told.kind == kind else main_line()
                return replace(said, kind=kind, where=where)
        return said

    def _stands_still(self, waiting: Waiting) -> bool:
        """Whether the worker has been waiting in this world for some time, with no message to look at."""
        channel = waiting.channel
        if channel is None or channel.monitor is not self or monotonic() - waiting.since <= PATIENCE:
            return False
        return not channel.has_mail()

    def _tell(self, sample: Sample) -> None:
        state = self._state(sample)
        # Of a worker that moves, only the number of its calls is of interest, now and then.
        moves = state.kind == self._told.kind == "running"
        pause = max(PATIENCE, self._size / 256) if moves else 0.0
        if state != self._told and (monotonic() - self._told_at > pause or self._questions):
            self._told, self._told_at = state, monotonic()
            self._post(DESK, ("state", self._rank, state))
        while self._questions:
            self._post(DESK, ("answer", self._rank, self._questions.pop()))

    def _decide(self) -> None:
        found = find_deadlock(self._states) or self._waits_for_the_gone()
        inquiry = self._inquiry
        if found is None:
            self._inquiry = None
        elif inquiry is None or not inquiry.still_holds(found, self._states):
            self._inquire(found)
        # What is on its way may change it: decided is what still holds some turns later.
        elif inquiry.complete and monotonic() - inquiry.began > PATIENCE / 2 and not (inquiry.decided or self._ends):
            inquiry.decided = True
            if any(state.kind == "agreeing" for state in self._states.values()):
                self._to_all(("failed", self.epoch, found.text))
            else:
                self._end_all(found.text)

    def _inquire(self, found: Deadlock) -> None:
        self._inquiries += 1
        said = {worker: self._states[worker] for worker in found.waiting}
        self._inquiry = Inquiry(found, self._inquiries, monotonic(), said)
        for worker in found.waiting:
            self._post(worker, ("ask", self._inquiries))

    def _waits_for_the_gone(self) -> Deadlock | None:
        gone = tuple(sorted(worker for worker, state in self._states.items() if state.kind == "left"))
        if not gone:
            return None
        for worker, state in sorted(self._states.items()):
            if state.kind == "executing" and monotonic() - max(self._since[w] for w in (worker, *gone)) > LATE:
                text = f"{workers_text(gone).capitalize()} ended long ago, but worker {worker} {state.describe()}."
                return Deadlock(text, (worker,))
        return None

    def _look_at_the_clock(self, sample: Sample) -> None:
        waiting = worker_status.waiting
        waited = max(sample.executing_for, 0.0 if waiting is None else monotonic() - waiting.since)
        if not self._limit or self._left is not None or self._end is not None or waited < self._limit:
            return
        if self._asked_at is None and monotonic() > self._not_before:
            self._asked_at = monotonic()
            self._post(DESK, ("late", self._rank, float(waited)))
        elif self._asked_at is not None and monotonic() - self._asked_at > 2 * BETWEEN_QUESTIONS:
            self._report()
            self._finish(f"Worker {self._rank} has waited for {waited:.0f} s, and worker {DESK} is silent.")

    def _end_for_lateness(self, worker: int, waited: float) -> None:
        if self._ends:
            return
        kinds = {self._states.get(w, State("running")).kind for w in range(self._size)}
        # A program in which all workers are may simply be long, a scan over a whole training, say.
        is_long = kinds == {"executing"} and waited < self._limit_of_programs
        if "compiling" in kinds or is_long:
            self._to_all(("wait",))
            return
        text = (
            f"Worker {worker} has waited for {waited:.0f} s; the limit is {self._limit:.0f} s (DISTDL_JAX_TIMEOUT, in "
            "seconds; 0 turns it off)."
        )
        self._end_all("\n".join([text, *self._where_all_stand()]))

    def _where_all_stand(self) -> list[str]:
        """What each worker does, and where in the plan those must be that wait, given who is not in the call."""
        lines = [
            f"Worker {worker} {self._states.get(worker, State('running')).describe()}."
            for worker in range(min(self._size, 64))
        ]
        busy = {worker: state for worker, state in self._states.items() if state.kind == "executing" and state.calls}
        if not busy:
            return lines
        call, name = max((state.calls, state.name_of(state.calls)) for state in busy.values())
        programs = self.programs.get(name or "")
        absent = frozenset(w for w in range(self._size) if self._states.get(w, State("running")).calls < call)
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

    # --- the end ---

    def _report(self) -> None:
        state = self._told
        since = f", for {monotonic() - self._told_at + PATIENCE:.0f} s" if state.kind != "running" else ""
        who = f"Worker {self._rank} of {self._size}, process {os.getpid()}"
        lines = [f"{who}, {state.describe()}{since}. Its Python stack:\n"]
        lines.append(stack_text(user_frames(main_stack())))
        if operations := last_operations():
            lines.append("Its last operations:\n")
            lines += [f"{line}\n" for line in operations[-REPORTED_OPERATIONS:]]
        say("".join(lines))

    def _finish(self, text: str) -> None:
        end_the_job(f"distdl_jax ends the job. {text}\n")
