"""The watch of one worker in one world. Pure: facts and messages go in, messages come out.

Every worker has a reporter, which decides nothing about other workers; worker 0 has the coordinator, too, which does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.programs.ir import Program
from distdl_jax.watchdog.watch.call_log import Calls
from distdl_jax.watchdog.watch.clock import (
    ANNOUNCED,
    FIRST_LINE,
    GIVEN_UP,
    LONGEST_PATIENCE,
    PATIENCE,
    seconds_text,
)
from distdl_jax.watchdog.watch.coordinator import COORDINATOR, Coordinator
from distdl_jax.watchdog.watch.deadlock import Kind, State
from distdl_jax.watchdog.watch.messages import (
    Answer,
    CannotAgree,
    Detail,
    EndJob,
    Fail,
    Message,
    Question,
    Say,
    Wait,
)

SPEAKS = 1
"""The worker that says, for all, that the coordinator is silent."""

_SILENT = "Worker 0, which knows of all others, was not heard from for as long as it was asked."


@dataclass(frozen=True)
class Facts:
    """Facts that can be seen of the worker.

    - `calls`: those of checked functions.
    - `agreement`: the state, without calls, of a worker in an agreement: "agreeing", or "elsewhere" in one of another
      world. There it waits for nobody here, unless all of that world are here.
    - `run`: the number of the run of a compiled program that goes on, 0 where there is none. `program`, `function`: the
      call whose program that is, 0 where that is not known, and of which function.
    - `compiles`: whether it compiles now. `where`: its line, if known.
    - `left`: its exit status, once its program has ended.
    - `covered`: whether another world has all workers of this one, so that its timeout is enough.
    - `detail`: what only answers carry.
    """

    calls: Calls = field(default=Calls())
    agreement: State | None = None
    run: int = 0
    program: int = 0
    function: str = ""
    compiles: bool = False
    where: str = ""
    left: int | None = None
    covered: bool = False
    detail: Detail = field(default=Detail())

    def state(self) -> State:
        """Return the state that they are."""
        if self.left is not None:
            return State("left", self.where, calls=self.calls, status=self.left)
        if self.agreement is not None:
            return replace(self.agreement, calls=self.calls)
        if self.run:
            return State("executing", self.where, "", (), self.run, self.calls, self.program, self.function)
        return State("compiling" if self.compiles else "running", self.where, calls=self.calls)

    def episodes(self) -> list[tuple[Kind, int]]:
        """Return the waits that go on, by kind and number."""
        if self.left is not None:
            return [("left", 0)]
        agreement: list[tuple[Kind, int]] = (
            [] if self.agreement is None else [(self.agreement.kind, self.agreement.episode)]
        )
        return [*agreement, ("executing", self.run)] if self.run else agreement


class OpenWait(NamedTuple):
    """A wait that goes on: its kind and number, when it began, whether it was announced, for the timeout to look at,
    and whether it was said that the coordinator is silent meanwhile."""

    kind: Kind
    episode: int
    began: float
    announced: bool = False
    told: bool = False


@dataclass(frozen=True)
class Reporter:
    """The knowledge of one worker's reporter in one world.

    - `reported`: the state that it told last, at `reported_at`. `waits`: the waits that go on. `longest`: the longest
      run of a program so far.
    - `questions`: those to be answered. `asked_at`: when the last one came.
    - `failures`: what all workers raise, by epoch. `end`: how the job ends.
    """

    rank: int
    limit: float
    reported: State = field(default=State("running"))
    reported_at: float = 0.0
    waits: tuple[OpenWait, ...] = ()
    longest: float = 0.0
    questions: tuple[Question, ...] = ()
    asked_at: float = 0.0
    failures: tuple[Fail, ...] = ()
    end: EndJob | None = None

    def failure(self, epoch: int) -> Fail | None:
        """Return what is to be raised in this epoch."""
        return next((fail for fail in self.failures if fail.epoch == epoch), None)

    def wakes_at(self, now: float) -> float:
        """Return when it will have something to say, if nothing happens before."""
        due = (
            time
            for wait in self.waits
            for time in (
                *(wait.began + self._patience(wait.kind), self._announced_at(wait), self._given_up_at(wait)),
                self._announced_at(wait) + FIRST_LINE,
            )
        )
        return min((time for time in due if time > now), default=float("inf"))

    def hear(self, message: Question | Fail | EndJob, now: float) -> Reporter:
        """Take in what the coordinator says."""
        match message:
            case Question():
                return replace(self, questions=(*self.questions, message), asked_at=now)
            case Fail(epoch):
                return self if self.failure(epoch) else replace(self, failures=(*self.failures, message))
            case EndJob():
                return self if self.end is not None else replace(self, end=message)

    def look(self, facts: Facts, now: float) -> tuple[Reporter, list[Answer | Say | EndJob]]:
        """Take in what can be seen now. Answers are the coordinator's; the other messages are the worker's own."""
        if self.end is not None:
            return self, []
        known = self._with_waits(facts, now)
        long = known._long_waits(facts, now)
        waits = tuple(Wait(wait.kind, wait.episode, now - wait.began) for wait in long)
        is_new = not all(wait.announced for wait in long)
        state = facts.state()
        posts: list[Answer | Say | EndJob] = [
            Answer(self.rank, state, waits, question.number, facts.detail) for question in known.questions
        ]
        if not posts:
            if not (is_new or known._is_worth_telling(state, now)):
                state = replace(State("running"), calls=facts.calls)
            if is_new or known._is_news(state, now):
                posts = [Answer(self.rank, state, waits if is_new else ())]
        known = replace(known, waits=tuple(wait._replace(announced=wait in long) for wait in known.waits))
        if posts:
            known = replace(known, reported=state, reported_at=now, questions=())
        if (given_up := known._given_up(now)) is not None:
            return replace(known, asked_at=now), [*posts, given_up]
        if (unheard := known._unheard(now)) is not None:
            told = tuple(wait._replace(told=wait.told or wait is unheard) for wait in known.waits)
            text = (
                f"Worker {self.rank} has waited for {seconds_text(now - unheard.began)}: it {known.reported.describe()}"
            )
            posts.append(Say(f"distdl_jax: {text}. {_SILENT} The job goes on.\n"))
            return replace(known, waits=told), posts
        return known, posts

    def _with_waits(self, facts: Facts, now: float) -> Reporter:
        """Begin and end waits as the facts are now."""
        episodes = facts.episodes()
        if [(wait.kind, wait.episode) for wait in self.waits] == episodes:
            return self
        before = {(wait.kind, wait.episode): wait for wait in self.waits}
        waits = tuple(before.pop(key, OpenWait(*key, now)) for key in episodes)
        over = (now - wait.began for wait in before.values() if wait.kind == "executing")
        return replace(self, waits=waits, longest=max(self.longest, *over, 0.0))

    def _long_waits(self, facts: Facts, now: float) -> list[OpenWait]:
        """Return the waits that the timeout of this world looks at; some are another world's."""
        if facts.covered:
            return []
        elsewhere = facts.agreement is not None and not facts.agreement.waits_for
        long = (wait for wait in self.waits if now >= self._announced_at(wait))
        return [wait for wait in long if not (wait.kind == "elsewhere" and elsewhere)]

    def _announced_at(self, wait: OpenWait) -> float:
        """Return when it is announced."""
        return wait.began + min(FIRST_LINE, ANNOUNCED * self.limit or FIRST_LINE)

    def _given_up_at(self, wait: OpenWait) -> float:
        """Return when the coordinator has been silent for too long."""
        since = max(self.asked_at, self._announced_at(wait))
        pause = self.limit or float("inf")
        if wait.kind == "left":
            pause = max(self.limit, FIRST_LINE, since - wait.began)
        return since + GIVEN_UP * pause

    def _patience(self, kind: Kind) -> float:
        # Where steps take seconds, there is no need to tell of each.
        return PATIENCE if kind != "executing" else min(max(PATIENCE, 2 * self.longest), LONGEST_PATIENCE)

    def _is_worth_telling(self, state: State, now: float) -> bool:
        if state.kind == "left" or state.is_as(self.reported):
            return True
        return any(wait.kind == state.kind and now - wait.began >= self._patience(wait.kind) for wait in self.waits)

    def _is_news(self, state: State, now: float) -> bool:
        before = self.reported
        if state.calls.failed != before.calls.failed:
            return True
        if state.kind == before.kind == "running" or state == before:
            return False
        return state.kind != before.kind or state.episode != before.episode or now - self.reported_at >= PATIENCE

    def _unheard(self, now: float) -> OpenWait | None:
        """Return a wait of which the coordinator, which says who waits, has not asked: one worker says that."""
        new = (wait for wait in self.waits if wait.announced and not wait.told)
        unheard = (wait for wait in new if self.asked_at < self._announced_at(wait) <= now - FIRST_LINE)
        return next(unheard, None) if self.rank == SPEAKS and not 0 < self.limit <= 2 * FIRST_LINE else None

    def _given_up(self, now: float) -> Say | EndJob | None:
        """Return the end of the job, or a line after the end of the program, where the coordinator is silent."""
        for wait in self.waits:
            if not wait.announced or now < self._given_up_at(wait):
                continue
            seconds = seconds_text(now - wait.began)
            if wait.kind == "left":
                return Say(f"distdl_jax: Worker {self.rank} ended {seconds} ago; {_SILENT}\n")
            return EndJob(0, f"Worker {self.rank} has waited for {seconds}. {_SILENT}")
        return None


@dataclass(frozen=True)
class Core:
    """The reporter of a worker, and on worker 0 the coordinator."""

    reporter: Reporter
    coordinator: Coordinator | None = None

    @classmethod
    def new(cls, rank: int, members: Workers, limits: TimeLimits) -> Core:
        """Begin with workers that all run; `members` by their ranks in COMM_WORLD."""
        return cls(Reporter(rank, limits.waiting), Coordinator.new(members, limits) if rank == COORDINATOR else None)

    def remember(self, name: str, programs: Mapping[int, Program]) -> Core:
        """Keep the workers' programs of the function `name`, on worker 0."""
        return (
            self if self.coordinator is None else replace(self, coordinator=self.coordinator.remember(name, programs))
        )

    def hear(self, message: Message, now: float) -> tuple[Core, list[tuple[int, Message]]]:
        """Take in what another worker says, or what is said to all; return what follows, by the worker that gets it."""
        match message:
            case Answer() | CannotAgree():
                if self.coordinator is None:
                    return self, []
                coordinator, posts = self.coordinator.hear(message, now)
                return replace(self, coordinator=coordinator), [*posts]
            case Say():
                return self, [(self.reporter.rank, message)]
        return replace(self, reporter=self.reporter.hear(message, now)), []

    def turn(self, facts: Facts, now: float) -> tuple[Core, list[tuple[int, Message]]]:
        """Take in what can be seen now, and do what is due."""
        reporter, messages = self.reporter.look(facts, now)
        posts: list[tuple[int, Message]] = []
        for message in messages:
            if isinstance(message, EndJob):  # the coordinator is silent
                reporter = reporter.hear(message, now)
            else:
                posts.append((COORDINATOR if isinstance(message, Answer) else reporter.rank, message))
        if self.coordinator is None:
            return Core(reporter), posts
        coordinator, more = self.coordinator.tick(now)
        return Core(reporter, coordinator), [*posts, *more]

    def wakes_at(self, now: float) -> float:
        """Return when it will have something to say, if nothing happens before."""
        at = self.reporter.wakes_at(now)
        return at if self.coordinator is None else min(at, self.coordinator.wakes_at())
