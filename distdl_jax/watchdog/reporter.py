"""What one worker's reporter does: pure. It is told what can be seen of the worker, and what the coordinator says; it
returns what it knows from then on, the messages to the coordinator, and orders to whoever carries them.

A reporter decides nothing about other workers; that is the coordinator's part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from distdl_jax.watchdog.call_log import Calls
from distdl_jax.watchdog.clock import FIRST_LINE, LAST_QUESTION, LONGEST_PATIENCE, PATIENCE, Wait, seconds_text
from distdl_jax.watchdog.deadlock import Kind, State
from distdl_jax.watchdog.messages import (
    Allowance,
    Answer,
    Detail,
    EndJob,
    Fail,
    Noted,
    Question,
    Replay,
    Say,
    StateChanged,
    StillWaiting,
    ToCoordinator,
    ToReporter,
)

_SILENT = "Worker 0, which knows of all others, was not heard from for as long as it was asked."


@dataclass(frozen=True)
class Agreement:
    """One that the worker is in: its number, for what purpose, from which source line, for whom it still waits, and
    whether it is another world's: then it waits for nobody here, unless all of that world are here.

    `beyond`: for whom it waits, by rank in COMM_WORLD, in one that no world has a clock for but this one.
    """

    number: int
    purpose: str
    where: str
    waits_for: tuple[int, ...]
    elsewhere: bool = False
    beyond: tuple[int, ...] = ()

    @property
    def kind(self) -> Kind:
        """What whoever is in it does."""
        return "elsewhere" if self.elsewhere else "agreeing"


@dataclass(frozen=True)
class Facts:
    """What can be seen of the worker.

    - `calls`: those of checked functions. `agreement`: the one that it is in.
    - `run`: the number of the run of a compiled program that goes on, 0 where there is none; `program`,
      `function`: the call whose program that is, 0 where that is not known, and of which function.
    - `compiles`: whether it compiles now. `where`: its line, if known.
    - `left`: its exit status, once its program has ended; then `where` says how else.
    - `covered`: whether another world has all workers of this one, so that its clock is enough.
    """

    calls: Calls = field(default=Calls())
    agreement: Agreement | None = None
    run: int = 0
    program: int = 0
    function: str = ""
    compiles: bool = False
    where: str = ""
    left: int | None = None
    covered: bool = False

    def state(self) -> State:
        """What the worker is doing."""
        if self.left is not None:
            return State("left", self.where, calls=self.calls, status=self.left)
        if (agreement := self.agreement) is not None:
            told = State(agreement.kind, agreement.where, agreement.purpose, agreement.waits_for, agreement.number)
            return replace(told, calls=self.calls, beyond=agreement.beyond)
        if self.run:
            run, program, function = self.run, self.program, self.function
            return State("executing", self.where, "", (), run, self.calls, program, function)
        if self.compiles:
            return State("compiling", self.where, calls=self.calls)
        return State("running", self.where, calls=self.calls)


@dataclass(frozen=True)
class Orders:
    """What is to be done besides: the end of the job, at once, or after a report; or a line to be printed."""

    finish: str | None = None
    report: bool = False
    say: str | None = None


@dataclass(frozen=True)
class Reporter:
    """What one worker's reporter knows in one world.

    - `told`: the state that it told last, at `told_at`. `waits`: the waits that go on. `longest`: the longest run of a
      program so far. `questions`: those to be answered. `failures`: what all workers raise, by epoch. `replay`: up to
      which call agreements are taken as before. `end`: what the job ends with, and whom it is about.
    """

    rank: int
    limit: float
    told: State = field(default=State("running"))
    told_at: float = 0.0
    waits: tuple[Wait, ...] = ()
    longest: float = 0.0
    questions: tuple[Question, ...] = ()
    failures: tuple[Fail, ...] = ()
    replay: int = 0
    end: EndJob | None = None

    def failure(self, epoch: int) -> Fail | None:
        """What is to be raised in this epoch."""
        return next((fail for fail in self.failures if fail.epoch == epoch), None)

    def wakes_at(self, now: float) -> float:
        """When it will have something to say, if nothing happens before."""
        due = (time for wait in self.waits for time in (wait.began + self._patience(wait.kind), *wait.wakes_at()))
        return min((time for time in due if time > now), default=float("inf"))

    def hear(self, message: ToReporter, now: float) -> tuple[Reporter, Orders]:
        """Take in what the coordinator says."""
        match message:
            case Question():
                return replace(self, questions=(*self.questions, message)), Orders()
            case Fail(epoch):
                known = self if self.failure(epoch) else replace(self, failures=(*self.failures, message))
                return known, Orders()
            case Noted(kind, episode):
                return self._with_wait(kind, episode, lambda wait: wait.noted(now)), Orders()
            case Allowance(kind, episode, seconds, limit):
                return self._with_wait(kind, episode, lambda wait: wait.allow(seconds, limit, now)), Orders()
            case Say(text):
                return self, Orders(say=text)
            case Replay(call):
                return replace(self, replay=max(self.replay, call)), Orders()
            case EndJob():
                return (replace(self, end=message), Orders(report=True)) if self.end is None else (self, Orders())

    def look(
        self, facts: Facts, now: float, detail: Callable[[bool], Detail]
    ) -> tuple[Reporter, list[ToCoordinator], Orders]:
        """Take in what can be seen now. `detail(in_full)` is asked for where the coordinator wants to know more."""
        if self.end is not None:
            return self, [], Orders()
        known = self._with_waits(facts, now)
        posts: list[ToCoordinator] = []
        actual = facts.state()
        state = actual if known._is_worth_telling(actual, now) else replace(State("running"), calls=facts.calls)
        if known._is_news(state, now):
            posts.append(StateChanged(self.rank, state))
            known = replace(known, told=state, told_at=now)
        if known.questions:
            posts += [Answer(self.rank, q.number, actual, detail(q.in_full)) for q in known.questions]
            known = replace(known, questions=(), told=actual, told_at=now)
        return known._ask(posts, facts, now)

    def _with_waits(self, facts: Facts, now: float) -> Reporter:
        """With the waits that go on now; those that are over are forgotten."""
        episodes: list[tuple[Kind, int]] = []
        if facts.agreement is not None and facts.left is None:
            episodes.append((facts.agreement.kind, facts.agreement.number))
        if facts.run and facts.left is None:
            episodes.append(("executing", facts.run))
        if facts.left is not None:
            episodes.append(("left", 0))
        if [(wait.kind, wait.episode) for wait in self.waits] == episodes:
            return self
        before = {(wait.kind, wait.episode): wait for wait in self.waits}
        waits = tuple(before.pop(key) if key in before else self._new_wait(*key, now) for key in episodes)
        over = (wait.seconds(now) for wait in before.values() if wait.kind == "executing")
        return replace(self, waits=waits, longest=max(self.longest, *over, 0.0))

    def _new_wait(self, kind: Kind, episode: int, now: float) -> Wait:
        if kind == "left":  # ends nothing, so it is told whatever the limit is
            return Wait(kind, episode, began=now, limit=min(FIRST_LINE, self.limit or FIRST_LINE), asked=LAST_QUESTION)
        return Wait(kind, episode, began=now, limit=self.limit)

    def _with_wait(self, kind: Kind, episode: int, change: Callable[[Wait], Wait]) -> Reporter:
        waits = (change(w) if (w.kind, w.episode) == (kind, episode) else w for w in self.waits)
        return replace(self, waits=tuple(waits))

    def _patience(self, kind: Kind) -> float:
        # Where steps take seconds, there is no need to tell of each.
        return PATIENCE if kind != "executing" else min(max(PATIENCE, 2 * self.longest), LONGEST_PATIENCE)

    def _is_worth_telling(self, state: State, now: float) -> bool:
        if state.kind == "left" or state.is_as(self.told):
            return True
        return any(w.kind == state.kind and w.seconds(now) >= self._patience(w.kind) for w in self.waits)

    def _is_news(self, state: State, now: float) -> bool:
        before = self.told
        if state.kind == before.kind == "running" or state == before:
            return False
        return state.kind != before.kind or state.episode != before.episode or now - self.told_at >= PATIENCE

    def _ask(
        self, posts: list[ToCoordinator], facts: Facts, now: float
    ) -> tuple[Reporter, list[ToCoordinator], Orders]:
        known, orders = self, Orders()
        for place, wait in enumerate(self.waits):
            # Of some waits another world has the clock.
            agreement = facts.agreement
            is_here = agreement is None or bool(agreement.waits_for or agreement.beyond)
            if facts.covered or (wait.kind == "elsewhere" and not is_here):
                continue
            match wait.look(now):
                case "ask":
                    posts.append(StillWaiting(self.rank, wait.kind, wait.episode, wait.seconds(now)))
                    waits = (*known.waits[:place], wait.after_asking(now), *known.waits[place + 1 :])
                    known = replace(known, waits=waits)
                case "give up" if wait.kind == "left":
                    text = f"distdl_jax: Worker {self.rank} ended {seconds_text(wait.seconds(now))} ago; {_SILENT}\n"
                    waits = (*known.waits[:place], wait.noted(now), *known.waits[place + 1 :])
                    known, orders = replace(known, waits=waits), Orders(say=text)
                case "give up":
                    text = f"Worker {self.rank} has waited for {seconds_text(wait.seconds(now))}. {_SILENT}"
                    return known, posts, Orders(finish=text, report=True)
        return known, posts, orders
