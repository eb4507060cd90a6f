"""What carries messages between one worker's reporter, worker 0's coordinator, and the mailbox of their world.

It decides nothing: `turn`, in the watchdog's thread, hands what is seen and heard to the two, and does as they say.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import NoReturn

from distdl_jax.errors import PlanError
from distdl_jax.plans.decomposition import Workers
from distdl_jax.programs.ir import Program
from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.abort import end_the_job, mpi_lock, say
from distdl_jax.watchdog.agreed import OthersArePast
from distdl_jax.watchdog.call_log import CallLog
from distdl_jax.watchdog.clock import PATIENCE
from distdl_jax.watchdog.coordinator import COORDINATOR, Coordinator
from distdl_jax.watchdog.flight_recorder import last_operations
from distdl_jax.watchdog.main_thread import Sample, main_line, main_stack, runs_its_call, stack_text, user_frames
from distdl_jax.watchdog.messages import (
    Allowance,
    CannotAgree,
    Detail,
    EndJob,
    Fail,
    HasReported,
    Mailbox,
    Message,
    Noted,
    Posts,
    Question,
    Replay,
    Say,
    SurveyAnswer,
    SurveyAsked,
    SurveyQuestion,
    SurveyResult,
    ToCoordinator,
)
from distdl_jax.watchdog.reporter import Agreement, Facts, Orders, Reporter
from distdl_jax.watchdog.status import Channel, worker_status
from distdl_jax.watchdog.survey import Compiled, Doing, Known, Relay, Survey, merged

TO_REPORT = (1.0, 10.0)
"""Seconds from the order to end the job to the end, at most: so long worker 0 waits for those who have yet to say where
they are; if it can't end the job, each does."""

MOST_ELSEWHERE = 8000
"""Of how many characters a text is that another worker writes: so few that it need not be fetched."""

REPORTED_OPERATIONS = 12
"""How many of a worker's last operations its report lists."""


@dataclass(frozen=True)
class Run:
    """The run of a program: its number, where it is, the function whose program it is, and the call, where known."""

    number: int = 0
    where: str = ""
    function: str = ""
    program: int = 0


class Agent:
    """One worker's in one world. `turn` runs in the watchdog's thread, the rest in the program's.

    - `members`: the workers of its world, by their ranks in COMM_WORLD.
    - `epoch`: how many agreements have failed so far.
    - `calls`: those that count in this world. `channel`: that of its agreements.
    """

    def __init__(self, mailbox: Mailbox, rank: int, members: Workers, limits: TimeLimits) -> None:
        size = len(members)
        self.members = members
        self.epoch = 0
        self.calls = CallLog()
        self.channel: Channel | None = None
        self._mailbox = mailbox
        self._rank = rank
        self._size = size
        self._status = worker_status()
        self._reporter = Reporter(rank, limits.waiting)
        self._coordinator = Coordinator(members, limits) if rank == COORDINATOR else None
        self._coordinating = threading.Lock()
        self._done = 0
        self._run = Run()
        self._compiled = self._awake = 0.0
        self._left: int | None = None
        self._end: tuple[str, float] | None = None
        self._worlds = Worlds()
        self._agents, self._covered = 0, False

    # --- in the program's thread ---

    def raise_if_failed(self) -> None:
        """Raise what all workers raise, where the coordinator has said so."""
        if (failure := self._reporter.failure(self.epoch)) is not None:
            self.epoch += 1
            raise PlanError(failure.text)

    def fail(self, text: str, about: tuple[int, ...] = ()) -> NoReturn:
        """Make all workers raise `text`; the first that any worker says is the one that counts."""
        self._post(CannotAgree(self.epoch, text, about), COORDINATOR)
        while True:  # the wait for the agreement goes on; so does its clock
            self.raise_if_failed()
            time.sleep(0.01)

    def raise_if_past(self) -> None:
        """Leave the wait for an agreement that this worker alone makes again: the coordinator has found that the others
        are past the call."""
        calls = self.calls
        alone = calls.inside and calls.tracing and calls.agreed_before and calls.passed < calls.number
        if alone and self._reporter.replay >= calls.number:
            raise OthersArePast

    def remember(self, name: str, programs: Mapping[int, Program]) -> None:
        """Keep the workers' programs of the function `name`."""
        if self._coordinator is not None:
            with self._coordinating:
                self._coordinator = self._coordinator.remember(name, programs)

    # --- at the end of the program ---

    def leave(self, status: int) -> None:
        """Tell the others that this worker's program has ended, with an exit status where that is known."""
        self._left = status
        with mpi_lock:
            self._mailbox.begin_barrier()

    def all_have_left(self) -> bool:
        """Whether the programs of all workers have ended."""
        with mpi_lock:
            return self._mailbox.has_met()

    # --- in any thread ---

    def say_elsewhere(self, text: str) -> None:
        """Have another worker write what this one can't; nothing is done where MPI is in use for long."""
        if mpi_lock.acquire(timeout=2):
            try:
                self._mailbox.post(Say(text[:MOST_ELSEWHERE]), 1 if self._rank == COORDINATOR else COORDINATOR)
            finally:
                mpi_lock.release()

    # --- in the watchdog's thread ---

    def turn(self, sample: Sample, now: float, worlds: Worlds) -> None:
        """Hear the others, tell them what changed; `now` in seconds in which the watch was awake."""
        self._awake, self._worlds = now, worlds
        if len(worlds.agents) != self._agents:
            self._agents, self._covered = len(worlds.agents), self._is_covered(worlds.agents)
        while (received := self._mailbox.next()) is not None:
            self._hear(received[1], now)
        told = self._survey_answers()
        facts = self._facts(sample, bool(told or self._reporter.questions))
        self._reporter, posts, orders = self._reporter.look(facts, now, self._detail)
        for message in posts:
            self._post(message, COORDINATOR)
        mine = {self.members[self._rank]: Doing(Compiled(self._compiled, now))}
        for survey, known, is_last in told:
            self._post(SurveyAnswer(self._rank, survey, facts.state(), merged(known, mine), is_last), COORDINATOR)
        self._obey(orders)
        if self._coordinator is not None:
            with self._coordinating:
                self._coordinator, answers = self._coordinator.tick(now)
            self._post_all(answers)
        if self._end is not None and (monotonic() > self._end[1] or self._all_have_reported()):
            self._finish(self._end[0])

    def _all_have_reported(self) -> bool:
        return self._coordinator is not None and self._coordinator.all_have_reported

    def _post(self, message: Message, to: int) -> None:
        with mpi_lock:
            self._mailbox.post(message, to)

    def _post_all(self, posts: Posts) -> None:
        for worker, message in posts:
            self._post(message, worker)

    def _hear(self, message: Message, now: float) -> None:
        match message:
            case Question() | Fail() | Noted() | Allowance() | Say() | Replay() | EndJob():
                self._reporter, orders = self._reporter.hear(message, now)
                self._obey(orders)
            case SurveyQuestion(survey):
                others = {agent.members: agent for agent in self._beyond()}
                self._worlds.relay, asked = self._worlds.relay.asked(survey, self.members, others)
                for world in asked:
                    others[world]._post(SurveyAsked(others[world]._rank, survey), COORDINATOR)
            case SurveyResult(survey, known, is_last):
                self._worlds.relay = self._worlds.relay.told(survey, self.members, known, is_last)
            case _:
                self._hear_as_coordinator(message, now)

    def _hear_as_coordinator(self, message: ToCoordinator, now: float) -> None:
        assert self._coordinator is not None, message
        with self._coordinating:
            self._coordinator, posts = self._coordinator.hear(message, now)
        self._post_all(posts)

    @property
    def _goes_on(self) -> bool:
        """Whether some worker of this world has not left; this one, if no other."""
        return self._left is None or not self.all_have_left()

    def _beyond(self) -> list[Agent]:
        """The other worlds of the worker, but for those of which all workers belong to a larger one."""
        return [other for other in self._worlds.agents if other is not self and not other._covered and other._goes_on]

    def _survey_answers(self) -> list[tuple[Survey, Known, bool]]:
        """Those that are due in this world: of worlds with the same workers, in the first."""
        worlds = self._worlds
        if next(agent for agent in worlds.agents if agent.members == self.members) is not self:
            return []
        going_on = {agent.members for agent in worlds.agents if agent._goes_on}
        worlds.relay, answers = worlds.relay.answers(self.members, going_on)
        return answers

    def _facts(self, sample: Sample, asked: bool) -> Facts:
        status = self._status
        self._compiled = sample.compiled
        agreement = self._agreement()
        passed = self.calls.passed  # before the programs are looked at
        if not sample.run and not status.tokens_pending():
            self._done = max(self._done, passed)
        run = self._look_into(sample) if sample.run else Run()
        calls = self.calls.summary(self._done)
        calls = replace(calls, passed=max(calls.passed, run.program), mixed=status.mixed)
        # Where it is costs a stack; so it is looked up for what runs long, and for those who ask.
        where = main_line() if asked and not run.where else run.where
        where = where if self._left is None else ""
        compiles, covered = sample.compiles, self._covered
        return Facts(calls, agreement, sample.run, run.program, run.function, compiles, where, self._left, covered)

    def _agreement(self) -> Agreement | None:
        """That which the worker is in, of this world or another."""
        waiting = self._status.waiting
        if waiting is None:
            return None
        channel, waits_for, elsewhere = waiting.channel, waiting.waits_for, True
        beyond: Workers = ()
        if channel is None:  # they open a world
            beyond = waits_for if self is self._worlds.clock_for(waits_for) and not self.has_all(waits_for) else ()
            waits_for = tuple(map(self.members.index, waits_for)) if self.has_all(waits_for) else ()
        elif not isinstance(theirs := channel.monitor, Agent):
            return None
        elif elsewhere := theirs is not self:
            waited_for = tuple(theirs.members[worker] for worker in waits_for)
            waits_for = tuple(map(self.members.index, waited_for)) if self.has_all(theirs.members) else ()
        return Agreement(waiting.number, waiting.purpose, waiting.where, waits_for, elsewhere, beyond)

    def has_all(self, workers: Workers) -> bool:
        """Whether these, by their ranks in COMM_WORLD, are all of this world."""
        return set(self.members) >= set(workers)

    def _is_covered(self, agents: Sequence[Agent]) -> bool:
        """Whether another world has all workers of this one; of equal ones the first covers the others."""
        place, mine = agents.index(self), set(self.members)
        return any(
            mine < set(other.members) or (mine == set(other.members) and before < place)
            for before, other in enumerate(agents)
        )

    def _look_into(self, sample: Sample) -> Run:
        """A run of a program, looked into when it has lasted for a while."""
        if self._run.number == sample.run or sample.seconds < PATIENCE:
            return self._run if self._run.number == sample.run else Run()
        status = self._status
        call, number = status.call_of(status.shown), self.calls.number
        stack = main_stack()
        lines = user_frames(stack)
        run = Run(sample.run, str(lines[0]) if lines else "")
        if sample.token is not None:
            if (of := status.run_of(sample.token)) is not None:
                run = replace(run, function=of.name, program=of.number if of.log is self.calls else 0)
        elif call is not None and runs_its_call(stack):
            is_counted = call.log is self.calls and self.calls.inside and number == self.calls.number
            run = replace(run, function=call.name, program=number if is_counted else 0)
        self._run = run
        return run

    def _detail(self, in_full: bool) -> Detail:
        if not in_full:
            return Detail(compiled=self._compiled, awake=self._awake, beyond=bool(self._beyond()))
        sent, received = ({}, {}) if self.channel is None else (dict(self.channel.sent), dict(self.channel.received))
        return Detail(self.calls.window(), sent, received, self._compiled, self._awake)

    # --- the end ---

    def _obey(self, orders: Orders) -> None:
        if orders.say is not None:
            say(orders.say)
        if orders.report:
            self._report()
        if orders.finish is not None:
            self._finish(orders.finish)
        if self._end is None and self._reporter.end is not None:
            self._end = (self._reporter.end.text, monotonic() + TO_REPORT[self._rank != COORDINATOR])

    def _report(self) -> None:
        who = f"Worker {self._rank} of {self._size}, process {os.getpid()}"
        lines = [f"{who}, {self._reporter.told.describe()}. Its Python stack:\n"]
        lines.append(stack_text(user_frames(main_stack())))
        if operations := last_operations():
            lines.append("Its last operations:\n")
            lines += [f"{line}\n" for line in operations[-REPORTED_OPERATIONS:]]
        say("".join(lines))
        self._post(HasReported(self._rank), COORDINATOR)

    def _finish(self, text: str) -> None:
        end_the_job(f"distdl_jax ends the job. {text}\n")


@dataclass
class Worlds:
    """Those of one worker: their agents, in the order in which they were opened, and its part in surveys."""

    agents: list[Agent] = field(default_factory=list)
    relay: Relay = field(default_factory=Relay)

    def clock_for(self, workers: Workers) -> Agent | None:
        """The agent in whose world it is asked how long the worker may wait for these, by their ranks in COMM_WORLD:
        one that has them all, or the first from which others are reached; None where there is none."""
        agents = [agent for agent in self.agents if not agent._covered and agent._goes_on]
        having_all = (agent for agent in agents if agent.has_all(workers))
        return next(having_all, next(iter(agents), None))
