"""The watch of one worker in one world: a state machine without input and output. Facts, messages and times go in,
messages come out.

Every worker has a reporter, which decides nothing about other workers; worker 0 also has the coordinator, which does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.settings import TimeLimits
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
    Posts,
    Question,
    Say,
    Wait,
)

SPEAKS = 1
"""The worker that reports, for all, that the coordinator is silent."""

_SILENT = "Worker 0, which knows of all others, was not heard from for as long as it was asked."


@dataclass(frozen=True)
class Facts:
    """Observable facts about the worker.

    - `state`: its state: "left", "agreeing" or "elsewhere", "executing", or another; the first that applies. In an
      agreement "elsewhere", of another world, it waits for no worker of this one, unless all of that world are here.
    - `run`: the number of the current run of a compiled program, in an agreement, too; 0 if there is none.
    - `covered`: whether another world has all workers of this one, so that its timeout suffices.
    - `detail`: included only in answers.
    """

    state: State = field(default=State("running"))
    run: int = 0
    covered: bool = False
    detail: Detail = field(default=Detail())

    def episodes(self) -> list[tuple[Kind, int]]:
        """Return the current waits, by kind and number."""
        if self.state.kind == "left":
            return [("left", 0)]
        agrees = self.state.kind in ("agreeing", "elsewhere")
        agreement: list[tuple[Kind, int]] = [(self.state.kind, self.state.episode)] if agrees else []
        return [*agreement, ("executing", self.run)] if self.run else agreement


@dataclass(eq=False)
class OpenWait:
    """A current wait: its kind and number, its start, whether it was announced, for the timeout to consider, and
    whether it was reported that the coordinator is silent meanwhile."""

    kind: Kind
    episode: int
    began: float
    announced: bool = False
    told: bool = False


class Reporter:
    """The knowledge of one worker's reporter in one world.

    - `reported`: the state that it reported last, at `reported_at`. `waits`: the current waits. `longest`: the longest
      run of a program so far.
    - `questions`: the questions to answer. `asked_at`: when the last one arrived.
    - `failures`: the errors that all workers raise, by epoch. `end`: how the job ends.
    """

    def __init__(self, rank: int, limit: float) -> None:
        self.rank, self.limit = rank, limit
        self.reported, self.reported_at = State("running"), 0.0
        self.waits: list[OpenWait] = []
        self.longest = 0.0
        self.questions: list[Question] = []
        self.asked_at = 0.0
        self.failures: dict[int, Fail] = {}
        self.end: EndJob | None = None

    def wakes_at(self, now: float) -> float:
        """Return when it will next act if nothing happens before."""
        due = (
            time
            for wait in self.waits
            for time in (
                *(wait.began + self._patience(wait.kind), self._announced_at(wait), self._given_up_at(wait)),
                self._announced_at(wait) + FIRST_LINE,
            )
        )
        return min((time for time in due if time > now), default=float("inf"))

    def hear(self, message: Question | Fail | EndJob, now: float) -> None:
        """Process the coordinator's message."""
        match message:
            case Question():
                self.questions.append(message)
                self.asked_at = now
            case Fail(epoch):
                self.failures.setdefault(epoch, message)
            case EndJob():
                self.end = self.end or message

    def look(self, facts: Facts, now: float) -> list[Answer | Say | EndJob]:
        """Process the current facts. Answers are for the coordinator; the other messages are the worker's own."""
        if self.end is not None:
            return []
        self._update_waits(facts, now)
        long = self._long_waits(facts, now)
        is_new = not all(wait.announced for wait in long)
        for wait in self.waits:
            wait.announced = wait in long
        waits = tuple(Wait(wait.kind, wait.episode, now - wait.began) for wait in long)
        state = facts.state
        answers = [Answer(self.rank, state, waits, question.number, facts.detail) for question in self.questions]
        if not answers:
            if not (is_new or self._is_worth_telling(state, now)):
                state = State("running", calls=state.calls)
            if is_new or self._is_news(state, now):
                answers = [Answer(self.rank, state, waits if is_new else ())]
        if answers:
            self.reported, self.reported_at, self.questions = state, now, []
        return [*answers, *self._about_a_silent_coordinator(now)]

    def _update_waits(self, facts: Facts, now: float) -> None:
        """Start and end waits according to the current facts."""
        before = {(wait.kind, wait.episode): wait for wait in self.waits}
        self.waits = [before.pop(key) if key in before else OpenWait(*key, now) for key in facts.episodes()]
        over = (now - wait.began for wait in before.values() if wait.kind == "executing")
        self.longest = max(self.longest, *over, 0.0)

    def _long_waits(self, facts: Facts, now: float) -> list[OpenWait]:
        """Return the waits that the timeout of this world considers; some are another world's."""
        if facts.covered:
            return []
        long = (wait for wait in self.waits if now >= self._announced_at(wait))
        return [wait for wait in long if wait.kind != "elsewhere" or facts.state.waits_for]

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
        # If steps take seconds, there is no need to report each.
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
        return not state.is_as(before) or now - self.reported_at >= PATIENCE

    def _about_a_silent_coordinator(self, now: float) -> list[Say | EndJob]:
        """Return the end of the job, or a line after the end of the program, if the coordinator is silent for too long;
        and before that, from one worker, a line about the first wait about which the coordinator has not asked."""
        for wait in self.waits:
            if wait.announced and now >= self._given_up_at(wait):
                seconds, self.asked_at = seconds_text(now - wait.began), now
                if wait.kind == "left":
                    line = Say(f"distdl_jax: Worker {self.rank} ended {seconds} ago; {_SILENT}\n")
                    return [line] if self.rank == SPEAKS else []
                return [EndJob(0, f"Worker {self.rank} has waited for {seconds}. {_SILENT}")]
        if self.rank != SPEAKS or 0 < self.limit <= 2 * FIRST_LINE:
            return []
        for wait in self.waits:
            if wait.announced and not wait.told and self.asked_at < self._announced_at(wait) <= now - FIRST_LINE:
                wait.told = True
                waited = f"has waited for {seconds_text(now - wait.began)}: it {self.reported.describe()}"
                return [Say(f"distdl_jax: Worker {self.rank} {waited}. {_SILENT} The job goes on.\n")]
        return []


class Core:
    """The reporter of a worker, and on worker 0 the coordinator; `members`: the workers, by ranks in COMM_WORLD."""

    def __init__(self, rank: int, members: Workers, limits: TimeLimits) -> None:
        self.reporter = Reporter(rank, limits.waiting)
        self.coordinator = Coordinator(members, limits) if rank == COORDINATOR else None

    def hear(self, message: Message, now: float) -> Posts:
        """Process another worker's message, or one to all; return the resulting messages, by receiver."""
        match message:
            case Answer() | CannotAgree():
                return [] if self.coordinator is None else self.coordinator.hear(message, now)
            case Say():
                return [(self.reporter.rank, message)]
            case _:
                self.reporter.hear(message, now)
                return []

    def turn(self, facts: Facts, now: float) -> Posts:
        """Process the current facts, and do what is due."""
        posts: Posts = []
        for message in self.reporter.look(facts, now):
            if isinstance(message, EndJob):  # the coordinator is silent
                self.reporter.hear(message, now)
            else:
                posts.append((COORDINATOR if isinstance(message, Answer) else self.reporter.rank, message))
        return posts if self.coordinator is None else [*posts, *self.coordinator.tick(now)]

    def wakes_at(self, now: float) -> float:
        """Return when it will next act if nothing happens before."""
        at = self.reporter.wakes_at(now)
        return at if self.coordinator is None else min(at, self.coordinator.wakes_at())
