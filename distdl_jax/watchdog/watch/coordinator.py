"""Worker 0's part: from what all workers tell, whether they can go on, and what they are to do if not.

Pure: a state and an event go in, a state and messages come out. One question, one answer, and two readers of answers. A
confirmation asks the workers that a deadlock is about, before anything is concluded from their states (`deadlock`). The
timeout, whose time the user sets, asks all where one has waited for long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.programs.ir import Program
from distdl_jax.watchdog.watch.clock import ASKED, last_line, lines_within, seconds_text
from distdl_jax.watchdog.watch.deadlock import Deadlock, State, View, find_deadlock, workers_text
from distdl_jax.watchdog.watch.dependencies import Plans, dependencies_of_all, in_both
from distdl_jax.watchdog.watch.messages import (
    Answer,
    CannotAgree,
    EndJob,
    Fail,
    OpenQuestion,
    Posts,
    Question,
    Say,
    ToCoordinator,
    ToWorker,
    Wait,
)
from distdl_jax.watchdog.watch.timeout import NEVER, UNHEARD, Place, Timeout, WaitLimits, blockers, place_of
from distdl_jax.watchdog.watch.timeout_report import LongWait, Situation

COORDINATOR = 0
"""The world rank of the worker that coordinates."""

PAUSES = (1.0, 60.0)
"""Seconds before those whom a suspicion is about are asked again: at first, and at most."""

SEEKS_EVERY = 1e-3
"""Seconds, for each worker, from one look at the states to the next: the larger the world, the more a look costs."""

SOON = 0.25
"""Seconds, at least, until all are asked for a line that is due."""

EVENTS = 256
"""How many events the story has."""

IDLE = ("running", "compiling")
"""The kinds of states in which a worker waits for nobody."""

MOST_DUMPED = 500
"""How many characters the dump has of each field."""


class Event(NamedTuple):
    """A transition: when, of which worker (None: of all), and what happened."""

    time: float
    worker: int | None
    what: str


@dataclass(frozen=True)
class Confirmation:
    """The question to the workers that a deadlock is about, whether they still wait as in `states`.

    All who say so were waiting at one time: when the first of them was asked. After answers that confirm nothing, a
    message may be on its way: the same workers are asked again at `again_at`, each time after a longer `pause`.
    """

    question: OpenQuestion
    states: Mapping[int, State]
    pause: float
    again_at: float = float("inf")

    def is_about(self, states: Mapping[int, State]) -> bool:
        """Return whether these workers, as they are, are asked."""
        return self.states.keys() == states.keys() and all(s.is_as(self.states[worker]) for worker, s in states.items())

    def view(self, plans: Plans) -> View:
        """Return what is certain by now; nothing is of workers that have moved."""
        answers = self.question.answers
        states = {
            worker: answer.state if answer.state.is_as(self.states[worker]) else replace(answer.state, kind="running")
            for worker, answer in answers.items()
        }

        def coming(sender: int, receiver: int) -> bool:
            a, b = answers.get(sender), answers.get(receiver)
            return a is None or b is None or a.detail.sent.get(receiver, 0) != b.detail.received.get(sender, 0)

        return View(states, plans, coming, in_full=True)


@dataclass(frozen=True)
class Coordinator:
    """The coordinator of one world; `members`: its workers, by their ranks in COMM_WORLD.

    - `states`: the last known state of each worker. `plans`, `programs`: the dependencies of each worker's part in a
      function, and what it communicated in the last plan.
    - `seeks_at`: when it looks at the states next. `rests_until`: when it may.
    - `questions`: how many it has asked. `confirmation`, `timeout`: the readers of the answers.
    - `concluded`: the waiting workers of the last deadlock that was told. `epoch`: how many failures all were told of.
    - `end`: the last question, to which workers answer that they have reported; then the job ends.
    - `events`: the last transitions.
    """

    members: Workers
    limits: TimeLimits
    states: Mapping[int, State]
    plans: Plans = field(default_factory=dict)
    programs: Mapping[str, Mapping[int, Program]] = field(default_factory=dict)
    seeks_at: float = NEVER
    rests_until: float = 0.0
    questions: int = 0
    confirmation: Confirmation | None = None
    timeout: Timeout = field(default=Timeout())
    concluded: tuple[tuple[int, str, int], ...] = ()
    epoch: int = 0
    end: OpenQuestion = field(default=OpenQuestion())
    events: tuple[Event, ...] = ()

    @classmethod
    def new(cls, members: Workers, limits: TimeLimits) -> Coordinator:
        """Begin with workers that all run."""
        return cls(members, limits, dict.fromkeys(range(len(members)), State("running")))

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.members)

    def remember(self, name: str, programs: Mapping[int, Program]) -> Coordinator:
        """Keep a plan of the function `name`, which all workers have agreed on; of several, what holds in all."""
        part = dependencies_of_all(programs, self.size)
        part = in_both(self.plans[name], part) if name in self.plans else part
        return replace(self, plans={**self.plans, name: part}, programs={**self.programs, name: programs})

    def hear(self, message: ToCoordinator, now: float) -> tuple[Coordinator, Posts]:
        """Take in what a worker tells."""
        if self.end.number:
            return (replace(self, end=self.end.with_answer(message)), []) if isinstance(message, Answer) else (self, [])
        match message:
            case CannotAgree(epoch, text, about):
                return self._fail(text, about, now) if epoch == self.epoch else (self, [])
            case Answer(worker, state):
                known = self if state.is_as(self.states[worker]) else self._with_event(now, worker, state.describe())
                states, timeout = {**known.states, worker: state}, known.timeout.hear(message)
                known = replace(known, states=states, timeout=timeout, seeks_at=self.rests_until)
                return known._confirm(message, now)

    def tick(self, now: float) -> tuple[Coordinator, Posts]:
        """Do what is due now: ask workers, have all of them fail, or end the job."""
        known, posts = self, list[tuple[int, ToWorker]]()
        for place in range(len(self._steps())):
            due_at, step = known._steps()[place]
            if now >= due_at and not known.end.number:
                known, more = step(now)
                posts = posts + more
        return known, posts

    def wakes_at(self) -> float:
        """Return when it will have something to say, if nothing happens before."""
        return min(due_at for due_at, _ in self._steps())

    def _steps(self) -> list[tuple[float, Callable[[float], tuple[Coordinator, Posts]]]]:
        """Return the steps that it takes, each after the time when it is due."""
        timeout, seeks_at = self.timeout, self.seeks_at if self.confirmation is None else self.confirmation.again_at
        return [
            (timeout.speaks_at, self._speak_of_the_silent),
            (timeout.closes_at(self.limits.waiting), self._close),
            (timeout.asks_at(self.limits.waiting), self._ask_all),
            (min(self.seeks_at, seeks_at), self._seek),
        ]

    # --- what is certain ---

    def _seek(self, now: float) -> tuple[Coordinator, Posts]:
        """Look for a deadlock, and ask the workers that it is about."""
        known = replace(self, seeks_at=NEVER, rests_until=now + SEEKS_EVERY * self.size)
        found = find_deadlock(View(self.states, self.plans))
        if found is None or set(_key(found, self.states)) <= set(self.concluded):
            return replace(known, confirmation=None), []
        # Who has ended with an error answers nothing any more, and need not.
        concerned = {*found.waiting, *found.about} - self._failed().keys()
        asked, pause = {worker: self.states[worker] for worker in sorted(concerned)}, PAUSES[0]
        if (before := self.confirmation) is not None and before.is_about(asked):
            if now < before.again_at:
                return known, []
            pause = before.pause
        number = self.questions + 1
        known = replace(known, questions=number, confirmation=Confirmation(OpenQuestion(number, asked), asked, pause))
        known = known._with_event(now, None, f"{workers_text(tuple(asked))} asked to confirm: {found.text}")
        return known, [(worker, Question(number, in_full=True)) for worker in asked]

    def _failed(self) -> dict[int, State]:
        return {worker: state for worker, state in self.states.items() if state.kind == "left" and state.status}

    def _confirm(self, answer: Answer, now: float) -> tuple[Coordinator, Posts]:
        """Take in an answer to the confirmation's question, if it is one; with the last one, draw the conclusion."""
        if (confirmation := self.confirmation) is None:
            return self, []
        question = confirmation.question.with_answer(answer)
        if question is confirmation.question:
            return self, []
        confirmation = replace(confirmation, question=question)
        if not question.is_complete:
            return replace(self, confirmation=confirmation), []
        view = confirmation.view(self.plans)
        view = replace(view, states={**view.states, **self._failed()})
        if (found := find_deadlock(view)) is None:
            pause = confirmation.pause
            confirmation = replace(confirmation, again_at=now + pause, pause=min(2 * pause, PAUSES[1]))
            return replace(self, confirmation=confirmation)._with_event(now, None, "not confirmed"), []
        known = replace(self, confirmation=None, concluded=_key(found, view.states))
        # What follows does so from the states when they answered: since then some may have been told to go on.
        waiting = [view.states[worker] for worker in found.waiting]
        if all(state.kind == "agreeing" for state in waiting):
            return known._fail(found.text, found.about, now)
        return known._end(found.text, found.about, now)

    # --- the timeout ---

    def _ask_all(self, now: float) -> tuple[Coordinator, Posts]:
        """Ask all workers; once more where some have yet to answer, so that the others hear of the coordinator."""
        timeout = self.timeout.asked(self.questions + 1, self.size, now, self.limits.waiting)
        number = timeout.question.number
        known = replace(self, questions=max(self.questions, number), timeout=timeout)
        return known._with_event(now, None, "all are asked, for one waits"), self._to_all(Question(number))

    def _close(self, now: float) -> tuple[Coordinator, Posts]:
        """Decide about all waits, once all have said what they do, who can."""
        timeout, answered = self.timeout.closed(), self.timeout
        limits = WaitLimits(self.states, self.plans, self.limits)
        least, most = (part * self.limits.waiting or NEVER for part in ASKED)
        lines, lasting, overdue = lines_within(self.limits.waiting), list[LongWait](), list[LongWait]()
        longest: tuple[float, int, float] | None = None
        for worker, wait in answered.waits():
            limit, is_in = limits.of(worker, wait), _is_in(self.states[worker], wait)
            if is_in and (limit < NEVER or wait.kind == "left"):
                lasting.append(LongWait(wait.seconds, worker, limit))
            limit = limit or NEVER
            seconds = answered.counted(wait, limit)
            longest = max(longest or (0.0, worker, 0.0), (wait.seconds, worker, seconds))
            if seconds >= limit and is_in:
                overdue.append(LongWait(wait.seconds, worker, limit))
            next_line = min((line for line in lines if line > wait.seconds), default=NEVER) - wait.seconds
            soon = NEVER if wait.kind == "left" else min(max(limit - seconds, least), most)
            due_at = timeout.asked_at + min(soon, max(next_line, SOON))
            timeout = replace(timeout, due_at=min(timeout.due_at, due_at))
        known = replace(self, timeout=timeout)
        if longest is not None:
            what = f"has waited for {seconds_text(longest[0])}, of which {seconds_text(longest[2])} count"
            known = known._with_event(now, longest[1], what)
        if not overdue:
            told, posts = self._say_who_waits(lasting, lines, now)
            return replace(known, timeout=replace(timeout, told=told)), posts
        worst = max(overdue)
        text = self._situation(now).time_is_up(worst)
        return known._end(text, blockers(worst.worker, self.states, self.plans, self.timeout.missing), now)

    def _say_who_waits(
        self, lasting: Iterable[LongWait], lines: tuple[float, ...], now: float
    ) -> tuple[frozenset[tuple[float, Place]], Posts]:
        """Say who waits where, for whom, at the times of `lines`: one line for all who wait, once for each place; and
        one for all whose programs have ended."""
        told, states, situation = self.timeout.told, self.states, self._situation(now)
        posts: Posts = []
        for have_left in (True, False):
            new = [
                wait
                for wait in lasting
                if (states[wait.worker].kind == "left") == have_left
                and (line := last_line(lines, wait.seconds))
                and (line, place_of(states[wait.worker])) not in told
            ]
            if not new:
                continue
            longest = max(new)
            alike = [s for s in states.values() if (s.kind == "left") == have_left and s.kind not in IDLE]
            told = told.union((line, place_of(s)) for line in lines if line <= longest.seconds for s in alike)
            if not have_left:
                awaited = blockers(longest.worker, states, self.plans, self.timeout.missing)
                posts.append((COORDINATOR, Say(situation.line_about_a_wait(longest, awaited))))
            elif line_of_the_end := situation.line_about_the_end(longest.seconds):
                posts.append((longest.worker, Say(line_of_the_end)))
        return told, posts

    def _speak_of_the_silent(self, now: float) -> tuple[Coordinator, Posts]:
        """Say a line that ends nothing, long before the limit."""
        waiting, situation = self.timeout.waiting, self._situation(now)
        assert waiting is not None
        unheard = (worker for worker, seconds in situation.unheard.items() if seconds >= UNHEARD)
        silent = sorted({*unheard} - self.timeout.mentioned)
        known = replace(self, timeout=replace(self.timeout, mentioned=self.timeout.mentioned.union(silent)))
        known = known._with_event(now, None, f"nothing was heard from {workers_text(tuple(silent))}")
        return known, [(COORDINATOR, Say(situation.line_about_the_silent(silent, waiting)))]

    def _situation(self, now: float) -> Situation:
        unheard = {worker: now - since for worker, since in self.timeout.missing.items()}
        return Situation(self.states, self.programs, unheard)

    # --- the end ---

    def _to_all(self, message: ToWorker) -> Posts:
        return [(worker, message) for worker in range(self.size)]

    def _fail(self, text: str, about: Workers, now: float) -> tuple[Coordinator, Posts]:
        fail = Fail(self.epoch, text, self._global(about))
        return replace(self, epoch=self.epoch + 1)._with_event(now, None, f"all fail: {text}"), self._to_all(fail)

    def _end(self, text: str, about: Workers, now: float) -> tuple[Coordinator, Posts]:
        number = self.questions + 1
        known = replace(self, questions=number, end=OpenQuestion(number, range(self.size)))
        known = known._with_event(now, None, f"the job ends, because of {workers_text(about)}")
        return known, self._to_all(EndJob(number, text, self._global(about)))

    def _global(self, workers: Workers) -> Workers:
        return tuple(self.members[worker] for worker in workers)

    # --- its story ---

    def _with_event(self, now: float, worker: int | None, what: str) -> Coordinator:
        return replace(self, events=(*self.events[1 - EVENTS :], Event(now, worker, what)))

    def story(self) -> list[str]:
        """Return a line for each of the last transitions, the last one last."""
        return [
            f"{event.time:10.1f} s: {'' if event.worker is None else f'worker {event.worker} '}{event.what}"
            for event in self.events
        ]

    def dump(self) -> str:
        """Return its whole state as text, one line for a field, without the story and the plans."""
        names = [one.name for one in fields(self) if one.name not in ("events", "plans", "programs")]
        lines = [f"{name}: {getattr(self, name)!r}" for name in names]
        return "\n".join(line[:MOST_DUMPED] for line in [*lines, f"plans of: {', '.join(self.plans)}"])


def _key(found: Deadlock, states: Mapping[int, State]) -> tuple[tuple[int, str, int], ...]:
    return tuple((worker, states[worker].kind, states[worker].episode) for worker in found.waiting)


def _is_in(state: State, wait: Wait) -> bool:
    """Return whether a worker is in the wait still. In an agreement it may be in a program, too."""
    if state.kind == wait.kind:
        return state.episode == wait.episode
    return state.kind in ("agreeing", "elsewhere") and wait.kind == "executing"
