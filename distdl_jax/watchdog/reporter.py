"""What one worker tells: what its program does, once it waits; and what it does when it is told to fail or to end.

A reporter decides nothing about other workers; that is the coordinator's part, which worker 0's reporter has beside it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from time import monotonic
from typing import NoReturn

from distdl_jax.errors import PlanError
from distdl_jax.programs.ir import Program
from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.abort import end_the_job, mpi_lock, say
from distdl_jax.watchdog.clock import PATIENCE, Clock
from distdl_jax.watchdog.coordinator import COORDINATOR, Coordinator
from distdl_jax.watchdog.deadlock import Kind, State
from distdl_jax.watchdog.flight_recorder import last_operations
from distdl_jax.watchdog.main_thread import Sample, main_line, main_stack, stack_text, user_frames
from distdl_jax.watchdog.messages import (
    Answer,
    CannotAgree,
    EndJob,
    Fail,
    Mailbox,
    Message,
    Question,
    StateChanged,
    WaitedTooLong,
    WaitLonger,
)
from distdl_jax.watchdog.status import Waiting, worker_status

GRACE = 3.0
"""Seconds that a worker has to raise what its reporter was told, before its reporter ends the job."""

REPORTED_OPERATIONS = 12
"""How many of a worker's last operations its report lists."""


class Reporter:
    """One worker's reporter in one world. `turn` runs in the watchdog's thread, the rest in the program's.

    - `epoch`: how many agreements have failed so far.
    """

    def __init__(self, mailbox: Mailbox, rank: int, size: int, limits: TimeLimits) -> None:
        self.epoch = 0
        self._mailbox = mailbox
        self._rank = rank
        self._size = size
        self._status = worker_status()
        self._clock = Clock(limits.waiting)
        self._coordinator = Coordinator(size, limits) if rank == COORDINATOR else None
        self._told = State("running")
        self._told_at = 0.0
        self._questions: list[int] = []
        self._left: int | None = None
        self._failure: tuple[int, str, float] | None = None
        self._end: tuple[str, float] | None = None

    # --- in the program's thread ---

    def raise_if_failed(self) -> None:
        """Raise what all workers raise, where the coordinator has said so."""
        if self._failure is not None and self._failure[0] == self.epoch:
            self.epoch += 1
            text, self._failure = self._failure[1], None
            raise PlanError(text)

    def fail(self, text: str) -> NoReturn:
        """Make all workers raise `text`; the first that any worker says is the one that counts."""
        self._post(CannotAgree(self.epoch, text), COORDINATOR)
        deadline = monotonic() + 2 * GRACE
        while monotonic() < deadline:
            self.raise_if_failed()
            time.sleep(0.01)
        raise PlanError(text)

    def remember(self, name: str, programs: Mapping[int, Program]) -> None:
        """Keep the workers' programs of the function `name` for reports."""
        if self._coordinator is not None:
            self._coordinator.programs[name] = programs

    def leave(self, status: int) -> None:
        """Tell the others that this worker's program has ended, and wait until theirs have."""
        self._left = status
        self._mailbox.barrier()

    # --- in the watchdog's thread ---

    def turn(self, sample: Sample) -> None:
        """Hear the others, tell them what changed, look at the clock."""
        while (received := self._mailbox.next()) is not None:
            self._hear(received[1])
        self._tell(sample)
        if self._coordinator is not None:
            for worker, message in self._coordinator.decide(self.epoch, monotonic()):
                self._post(message, worker)
        self._look_at_the_clock(sample)
        if self._failure is not None and monotonic() > self._failure[2] + GRACE and sample.executing_for > GRACE:
            # The program waits for a message that will not come, so it can't raise.
            self._finish(self._failure[1])
        if self._end is not None and monotonic() > self._end[1]:
            self._finish(self._end[0])

    def _post(self, message: Message, to: int) -> None:
        with mpi_lock:
            self._mailbox.post(message, to)

    def _hear(self, message: Message) -> None:
        match message:
            case Question(number):
                self._questions.append(number)
            case Fail(epoch, text):
                if self._failure is None and epoch == self.epoch:
                    self._failure = (epoch, text, monotonic())
            case WaitLonger():
                self._clock.wait_longer(monotonic())
            case EndJob(text):
                self._report()
                # Worker 0 ends the job when all have had time to report; if it can't, each does.
                self._end = (text, monotonic() + (1.0 if self._rank == COORDINATOR else 10.0))
            case _:
                assert self._coordinator is not None, message
                for worker, reply in self._coordinator.hear(message, monotonic()):
                    self._post(reply, worker)

    def _state(self, sample: Sample) -> State:
        calls = tuple(self._status.calls)
        said = State("running", calls=calls[-1][0], names=tuple(name for number, name in calls if number))
        said = replace(said, in_call=self._status.in_call, tracing=self._status.tracing)
        waiting = self._status.waiting
        if self._left is not None:
            return replace(said, kind="left", status=self._left)
        if waiting is not None and self._is_stuck_in(waiting):
            said = replace(said, purpose=waiting.purpose, waits_for=waiting.waits_for, since=waiting.since)
            return replace(said, kind="agreeing", where=waiting.where)
        spans: tuple[tuple[Kind, float], ...]
        spans = (("compiling", sample.compiling_for), ("executing", sample.executing_for))
        for kind, seconds in spans:
            if seconds > PATIENCE:
                # Where it was when it said so first: it has not moved since.
                where = self._told.where if self._told.kind == kind else main_line()
                return replace(said, kind=kind, where=where)
        return said

    def _is_stuck_in(self, waiting: Waiting) -> bool:
        """Whether the worker has been waiting in this world for some time, with no message to look at."""
        channel = waiting.channel
        if channel is None or channel.monitor is not self or monotonic() - waiting.since <= PATIENCE:
            return False
        return not channel.has_message()

    def _tell(self, sample: Sample) -> None:
        state = self._state(sample)
        # Of a worker that moves, only the number of its calls is of interest, now and then.
        moves = state.kind == self._told.kind == "running"
        pause = max(PATIENCE, self._size / 256) if moves else 0.0
        if state != self._told and (monotonic() - self._told_at > pause or self._questions):
            self._told, self._told_at = state, monotonic()
            self._post(StateChanged(self._rank, state), COORDINATOR)
        while self._questions:
            self._post(Answer(self._rank, self._questions.pop()), COORDINATOR)

    def _look_at_the_clock(self, sample: Sample) -> None:
        waiting, now = self._status.waiting, monotonic()
        if self._left is not None or self._end is not None:
            return
        waited = max(sample.executing_for, 0.0 if waiting is None else now - waiting.since)
        match self._clock.look(waited, now):
            case "ask":
                self._post(WaitedTooLong(self._rank, float(waited)), COORDINATOR)
            case "give up":
                self._report()
                self._finish(f"Worker {self._rank} has waited for {waited:.0f} s, and worker {COORDINATOR} is silent.")

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
