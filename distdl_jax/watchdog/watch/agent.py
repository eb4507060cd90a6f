"""One worker's agent in one world: it passes facts and messages to the core, and carries out its decisions.

It decides nothing itself. The program's thread asks it for failures; the watchdog's thread runs its turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from time import monotonic
from typing import Any, NoReturn

from distdl_jax.errors import PlanError
from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.settings import TimeLimits, current_settings
from distdl_jax.watchdog.programs.ir import Program
from distdl_jax.watchdog.watch.abort import end_the_job, is_ending, mpi_lock, say
from distdl_jax.watchdog.watch.call_log import CallLog
from distdl_jax.watchdog.watch.coordinator import COORDINATOR
from distdl_jax.watchdog.watch.core import Core, Facts
from distdl_jax.watchdog.watch.deadlock import State
from distdl_jax.watchdog.watch.flight_recorder import last_operations
from distdl_jax.watchdog.watch.messages import Answer, CannotAgree, Detail, EndJob, Mailbox, Message, Posts, Say
from distdl_jax.watchdog.watch.status import AgreementChannel, worker_status
from distdl_jax.watchdog.watch.thread_sampler import (
    Sample,
    main_line,
    main_stack,
    stack_text,
    user_frames,
)

TO_REPORT = (1.0, 10.0)
"""Maximum seconds from the order to end the job to its end: worker 0 waits this long for workers that have yet to
report; if it can't end the job, each worker does."""

MOST_ELSEWHERE = 8000
"""The length of a text that another worker writes: short enough to need no request."""

REPORTED_OPERATIONS = 12
"""The number of a worker's last operations in its report."""

REPORTED_EVENTS = 16
"""The number of the coordinator's last transitions in worker 0's report."""


class Agent:
    """The agent of one worker in one world. `turn` runs in the watchdog's thread, the rest in the program's threads.

    - `members`: the workers of its world, by their ranks in COMM_WORLD.
    - `epoch`: the number of agreements that have failed so far.
    - `calls`: the calls that count in this world. `channel`: the channel of its agreements.
    - `is_covered`: whether another world has all workers of this one, so that its timeout suffices.
    """

    def __init__(self, mailbox: Mailbox, rank: int, members: Workers, limits: TimeLimits) -> None:
        self.members = members
        self.epoch = 0
        self.calls = CallLog()
        self.channel: AgreementChannel | None = None
        self.is_covered = False
        self._mailbox = mailbox
        self._rank = rank
        self._size = len(members)
        self._status = worker_status()
        self._core = Core(rank, members, limits)
        self._done = 0
        self._seen = Facts()
        self._left: int | None = None
        self._has_reported = False
        self._ends_at = 0.0

    # --- in the program's thread ---

    def raise_if_failed(self) -> None:
        """Raise the common error of all workers, if the coordinator has ordered it."""
        if (failure := self._core.reporter.failures.get(self.epoch)) is not None:
            self.epoch += 1
            raise PlanError(failure.text)

    def fail(self, text: str, about: tuple[int, ...] = ()) -> NoReturn:
        """Make all workers raise `text`; the first text from any worker counts."""
        self._post(CannotAgree(self.epoch, text, about), COORDINATOR)
        while True:  # the wait for the agreement continues, and so does its clock
            self.raise_if_failed()
            time.sleep(0.01)

    def remember(self, name: str, programs: Mapping[int, Program]) -> None:
        """Store the workers' programs of the function `name`."""
        if self._core.coordinator is not None:
            self._core.coordinator.remember(name, programs)

    # --- at the end of the program ---

    def leave(self, status: int) -> None:
        """Tell the others that this worker's program has ended, with an exit status if known."""
        self._left = status
        with mpi_lock:
            self._mailbox.begin_barrier()

    def all_have_left(self) -> bool:
        """Return whether the programs of all workers have ended."""
        with mpi_lock:
            return self._mailbox.has_met()

    # --- in any thread ---

    def say_elsewhere(self, text: str) -> None:
        """Have another worker write what this one can't; without effect if MPI is in use for long."""
        if mpi_lock.acquire(timeout=2):
            try:
                self._mailbox.post(Say(text[:MOST_ELSEWHERE]), 1 if self._rank == COORDINATOR else COORDINATOR)
            finally:
                mpi_lock.release()

    # --- in the watchdog's thread ---

    def turn(self, sample: Sample, now: float) -> None:
        """Receive messages, and send changes; `now` in seconds in which the watchdog was awake."""
        if is_ending():  # it has said why: the others need not conclude that it can't continue, and say so, too
            return
        while (received := self._mailbox.next()) is not None:
            self._do(self._core.hear(received[1], now))
        try:
            self._seen = self._facts(sample)
        finally:  # a failed observation of the worker must not stop the clock
            self._do(self._core.turn(self._seen, now))
            end, coordinator = self._core.reporter.end, self._core.coordinator
            have_all_reported = coordinator is not None and coordinator.end is not None and coordinator.end.is_complete
            if end is not None and (monotonic() > self._ends_at or have_all_reported):
                end_the_job(f"distdl_jax ends the job. {end.text}\n")

    def _do(self, posts: Posts) -> None:
        """Carry out the core's decisions: forward messages, and report where the worker is if the job is to end."""
        for worker, message in posts:
            if isinstance(message, Say) and worker == self._rank:
                say(message.text)
            else:
                self._post(message, worker)
        if (end := self._core.reporter.end) is not None and not self._has_reported:
            self._has_reported = True
            self._report(end)
            # Without a question no worker collects the reports of others.
            self._ends_at = monotonic() + (TO_REPORT[self._rank != COORDINATOR] if end.question else 0.0)

    def _post(self, message: Message, to: int) -> None:
        with mpi_lock:
            self._mailbox.post(message, to)

    # --- observations of the worker ---

    def _facts(self, sample: Sample) -> Facts:
        status, channel, run = self._status, self.channel, sample.run
        # A message in transit must count as under way: received ones are counted first, sent ones last.
        received = {} if channel is None else dict(channel.received)
        agreement = self._agreement()
        ended = self.calls.ended()  # before the programs are looked at
        if run is None and not status.tokens_pending():
            self._done = max(self._done, ended)
        program = run.call if run is not None and run.log is self.calls else 0
        questions = self._core.reporter.questions
        calls = self.calls.summary(self._done, any(question.in_full for question in questions))
        calls = replace(calls, passed=max(calls.passed, program), mixed=status.mixed)
        where = "" if run is None else run.where
        if questions and not where:  # a stack is expensive: it is taken for long-running states, and on request
            where = main_line()
        if self._left is not None:
            state = State("left", status=self._left)
        elif agreement is not None:
            state = agreement
        elif run is not None:
            state = State("executing", where, episode=run.number, program=program, function=run.function)
        else:
            state = State("compiling" if sample.compiles else "running", where)
        detail = Detail(sample.compiled, {} if channel is None else dict(channel.sent), received)
        return Facts(replace(state, calls=calls), 0 if run is None else run.number, self.is_covered, detail)

    def _agreement(self) -> State | None:
        """Return the agreement that the worker is in, of this world or another.

        In a world of some of these workers, or one that they open, it waits for workers of this one; for any other,
        nothing is known here.
        """
        if (waiting := self._status.waiting) is None:
            return None
        agent: Any = None if waiting.channel is None else waiting.channel.monitor
        waits_for = waiting.waits_for
        if agent is self:
            return State("agreeing", waiting.where, waiting.label, waits_for, waiting.number)
        awaited = waits_for if agent is None else tuple(agent.members[worker] for worker in waits_for)
        world = awaited if agent is None else agent.members
        here = tuple(map(self.members.index, awaited)) if set(world) <= set(self.members) else ()
        return State("elsewhere", waiting.where, waiting.label, here, waiting.number)

    def watches(self, workers: Workers) -> bool:
        """Return whether this agent's timeout counts for a wait for these workers, by their ranks in COMM_WORLD."""
        goes_on = self._left is None or not self.all_have_left()
        return set(self.members) >= set(workers) and not self.is_covered and goes_on

    # --- the end ---

    def _report(self, end: EndJob) -> None:
        """Write where this worker is; for worker 0 also its coordinator's last inputs."""
        who = f"Worker {self._rank} of {self._size}, process {os.getpid()}"
        state = self._core.reporter.reported
        lines = [f"{who}, {state.describe()}. Its Python stack:", stack_text(user_frames(main_stack())).rstrip("\n")]
        if operations := last_operations():
            lines += ["Its last operations:", *operations[-REPORTED_OPERATIONS:]]
        if (coordinator := self._core.coordinator) is not None:
            lines += [
                "What worker 0 was told last, and did, by its own clock:",
                *coordinator.story()[-REPORTED_EVENTS:],
            ]
            if current_settings().debug:
                lines += ["What worker 0 knows:", coordinator.dump()]
        say("\n".join(lines) + "\n")
        if end.question:
            self._post(Answer(self._rank, state, question=end.question), COORDINATOR)
