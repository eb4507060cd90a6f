"""Worker 0's part: whether the workers can continue, based on all reports, and what to do if not.

A state machine without input and output: messages and times go in, messages come out. Questions and answers have two
users. A confirmation asks the workers of a suspected deadlock before drawing a conclusion from their states
(`deadlock`). The timeout, set by the user, asks all workers when one has waited for long (`timeout`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.programs.ir import Program
from distdl_jax.watchdog.watch.clock import ASKED, COMPILATION, last_line, lines_within, seconds_text
from distdl_jax.watchdog.watch.deadlock import Deadlock, State, View, find_deadlock, workers_text
from distdl_jax.watchdog.watch.dependencies import Dependencies, Plans, dependencies_of_all, in_both
from distdl_jax.watchdog.watch.messages import (
    Answer,
    CannotAgree,
    EndJob,
    Fail,
    Message,
    Posts,
    Question,
    Say,
    ToCoordinator,
    Wait,
)
from distdl_jax.watchdog.watch.timeout import NEVER, UNHEARD, LongWait, OpenQuestion, Situation, Timeout, place_of

COORDINATOR = 0
"""The world rank of the worker that coordinates."""

PAUSES = (1.0, 60.0)
"""Seconds before the workers of a suspicion are asked again: at first, and at most."""

SEEKS_EVERY = 1e-3
"""Seconds, for each worker, between two looks at the states: in a larger world a look costs more."""

SOON = 0.25
"""Minimum seconds until all are asked for a line that is due."""

EVENTS = 256
"""The number of events in the story."""

IDLE = ("running", "compiling")
"""The kinds of states in which a worker waits for no other."""


MOST_DUMPED = 500
"""The number of characters per field in the dump."""


class Event(NamedTuple):
    """A transition: its time, its worker (None: all), and its description."""

    time: float
    worker: int | None
    what: str


@dataclass
class Confirmation:
    """The question to the workers of a suspected deadlock, whether they still wait as in `states`.

    All that confirm it were waiting at one time: when the first of them was asked. After answers that don't confirm it,
    a message may be on its way: the same workers are asked again at `again_at`, each time after a longer `pause`.
    """

    question: OpenQuestion
    states: Mapping[int, State]
    pause: float
    again_at: float = NEVER

    def is_about(self, states: Mapping[int, State]) -> bool:
        """Return whether these workers, in these states, are asked."""
        return self.states.keys() == states.keys() and all(s.is_as(self.states[worker]) for worker, s in states.items())

    def view(self, plans: Plans, failed: Mapping[int, State]) -> View:
        """Return what is certain so far, also of workers that have `failed`; nothing is of those that have moved."""
        answers = self.question.answers
        states = {
            worker: answer.state if answer.state.is_as(self.states[worker]) else replace(answer.state, kind="running")
            for worker, answer in answers.items()
        }

        def coming(sender: int, receiver: int) -> bool:
            a, b = answers.get(sender), answers.get(receiver)
            return a is None or b is None or a.detail.sent.get(receiver, 0) != b.detail.received.get(sender, 0)

        return View({**states, **failed}, plans, coming, in_full=True)


class Coordinator:
    """The coordinator of one world; `members`: its workers, by their ranks in COMM_WORLD.

    - `states`: the last known state of each worker. `plans`, `programs`: the dependencies of each worker's part in a
      function, and its communication in the last plan.
    - `seeks_at`: when it next looks at the states. `rests_until`: when it may.
    - `questions`: the number that it has asked. `confirmation`, `timeout`: the readers of the answers.
    - `concluded`: the waiting workers of the last reported deadlock. `epoch`: the number of failures reported to all.
    - `end`: the last question, which workers answer after their report; then the job ends.
    - `events`: the last transitions.
    """

    def __init__(self, members: Workers, limits: TimeLimits) -> None:
        self.members, self.size, self.limits = members, len(members), limits
        self.states = dict.fromkeys(range(self.size), State("running"))
        self.plans: dict[str, Mapping[int, Dependencies]] = {}
        self.programs: dict[str, Mapping[int, Program]] = {}
        self.seeks_at, self.rests_until = NEVER, 0.0
        self.questions = 0
        self.confirmation: Confirmation | None = None
        self.timeout = Timeout(limits.waiting)
        self.concluded: tuple[tuple[int, str, int], ...] = ()
        self.epoch = 0
        self.end: OpenQuestion | None = None
        self.events: deque[Event] = deque(maxlen=EVENTS)

    def remember(self, name: str, programs: Mapping[int, Program]) -> None:
        """Store a plan of the function `name`, which all workers have agreed on; of several, what holds in all."""
        part = dependencies_of_all(programs, self.size)
        self.plans[name] = in_both(self.plans[name], part) if name in self.plans else part
        self.programs[name] = programs

    def hear(self, message: ToCoordinator, now: float) -> Posts:
        """Process a worker's message."""
        match message:
            case Answer() if self.end is not None:
                self.end.hear(message)
            case CannotAgree(epoch, text, about) if self.end is None and epoch == self.epoch:
                return self._fail(text, about, now)
            case Answer(worker, state):
                if not state.is_as(self.states[worker]):
                    self._note(now, worker, state.describe())
                self.states[worker] = state
                self.seeks_at = self.rests_until
                self.timeout.hear(message)
                return self._confirm(message, now)
        return []

    def tick(self, now: float) -> Posts:
        """Do what is due now: ask workers, have all of them fail, or end the job."""
        posts: Posts = []
        for due_at, step in self._steps():
            if now >= due_at() and self.end is None:
                posts += step(now)
        return posts

    def wakes_at(self) -> float:
        """Return when it will next act if nothing happens before."""
        return min(due_at() for due_at, _ in self._steps())

    def _steps(self) -> list[tuple[Callable[[], float], Callable[[float], Posts]]]:
        """Return its steps, each after its due time."""
        return [
            (self.timeout.speaks_at, self._speak_of_the_silent),
            (self.timeout.closes_at, self._close),
            (self.timeout.asks_at, self._ask_all),
            (lambda: min(self.seeks_at, self.confirmation.again_at if self.confirmation else NEVER), self._seek),
        ]

    # --- what is certain ---

    def _seek(self, now: float) -> Posts:
        """Look for a deadlock, and ask the workers involved."""
        self.seeks_at, self.rests_until = NEVER, now + SEEKS_EVERY * self.size
        found = find_deadlock(View(self.states, self.plans))
        if found is None or set(_key(found, self.states)) <= set(self.concluded):
            self.confirmation = None
            return []
        # Workers that have ended with an error don't answer any more, and need not.
        concerned = sorted({*found.waiting, *found.about} - self._failed().keys())
        states, pause = {worker: self.states[worker] for worker in concerned}, PAUSES[0]
        if self.confirmation is not None and self.confirmation.is_about(states):
            if now < self.confirmation.again_at:
                return []
            pause = self.confirmation.pause
        self.questions += 1
        self.confirmation = Confirmation(OpenQuestion(self.questions, states), states, pause)
        self._note(now, None, f"{workers_text(tuple(states))} asked to confirm: {found.text}")
        return [(worker, Question(self.questions, in_full=True)) for worker in states]

    def _failed(self) -> dict[int, State]:
        return {worker: state for worker, state in self.states.items() if state.kind == "left" and state.status}

    def _confirm(self, answer: Answer, now: float) -> Posts:
        """Process an answer, if it is one to the confirmation's question; after the last one, draw the conclusion."""
        confirmation = self.confirmation
        if confirmation is None or not confirmation.question.hear(answer) or not confirmation.question.is_complete:
            return []
        view = confirmation.view(self.plans, self._failed())
        match find_deadlock(view):
            case None:
                confirmation.again_at = now + confirmation.pause
                confirmation.pause = min(2 * confirmation.pause, PAUSES[1])
                self._note(now, None, "not confirmed")
                return []
            case Deadlock(text, waiting, about) as found:
                # It follows from the states when they answered: some may have been told to continue since.
                self.confirmation, self.concluded = None, _key(found, view.states)
                can_raise = all(view.states[worker].kind == "agreeing" for worker in waiting)
                return self._fail(text, about, now) if can_raise else self._end(text, about, now)

    # --- the timeout ---

    def _ask_all(self, now: float) -> Posts:
        """Ask all workers; once more if some have yet to answer, so that the others hear from the coordinator."""
        number = self.timeout.ask(self.questions + 1, self.size, now)
        self.questions = max(self.questions, number)
        self._note(now, None, "all are asked, for one waits")
        return self._to_all(Question(number))

    def _close(self, now: float) -> Posts:
        """Decide about all waits, once all that can have reported their states."""
        timeout, situation, lines = self.timeout, self._situation(now), lines_within(self.limits.waiting)
        assert timeout.question is not None
        answers = timeout.question.answers
        # A wait counts from when the last worker that compiled was done, unless it is longer than any compilation.
        compiled = min((answer.detail.compiled for answer in answers.values()), default=NEVER)
        least, most = (part * self.limits.waiting or NEVER for part in ASKED)
        lasting, overdue = list[LongWait](), list[LongWait]()
        longest, due_at = (-NEVER, 0, 0.0), NEVER
        for worker, wait in sorted((worker, wait) for worker, answer in answers.items() for wait in answer.waits):
            # An answer may be older than a state: a wait that has ended since is neither told nor overdue.
            limit, is_in = situation.limit_of(worker, wait), _is_in(self.states[worker], wait)
            if is_in and (limit < NEVER or wait.kind == "left"):
                lasting.append(LongWait(wait.seconds, worker, limit))
            limit = limit or NEVER
            counted = wait.seconds if wait.seconds >= COMPILATION * limit else min(wait.seconds, compiled)
            longest = max(longest, (wait.seconds, worker, counted))
            if counted >= limit and is_in:
                overdue.append(LongWait(wait.seconds, worker, limit))
            # Ask again when this wait may be overdue, or its next line is due; not at once, since answers take time.
            next_line = min((line for line in lines if line > wait.seconds), default=NEVER) - wait.seconds
            soon = NEVER if wait.kind == "left" else min(max(limit - counted, least), most)
            due_at = min(due_at, timeout.asked_at + min(soon, max(next_line, SOON)))
        timeout.close(due_at)
        if longest[0] > -NEVER:
            seconds, worker, counted = longest
            self._note(now, worker, f"has waited for {seconds_text(seconds)}, of which {seconds_text(counted)} count")
        if not overdue:
            return self._say_who_waits(lasting, lines, situation)
        worst = max(overdue)
        return self._end(situation.time_is_up(worst), situation.blockers(worst.worker), now)

    def _say_who_waits(self, lasting: list[LongWait], lines: tuple[float, ...], situation: Situation) -> Posts:
        """Print who waits where, for whom, at the times of `lines`: one line for all that wait, once for each place;
        and one for all whose programs have ended."""
        told, states = self.timeout.told, self.states
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
            waiting = [s for s in states.values() if (s.kind == "left") == have_left and s.kind not in IDLE]
            told.update((line, place_of(state)) for line in lines if line <= longest.seconds for state in waiting)
            if not have_left:
                posts.append((COORDINATOR, Say(situation.line_about_a_wait(longest))))
            elif line_of_the_end := situation.line_about_the_end(longest.seconds):
                posts.append((longest.worker, Say(line_of_the_end)))
        return posts

    def _speak_of_the_silent(self, now: float) -> Posts:
        """Print a line that ends nothing, long before the limit."""
        situation, mentioned = self._situation(now), self.timeout.mentioned
        unheard = (worker for worker, seconds in situation.unheard.items() if seconds >= UNHEARD)
        silent = sorted({*unheard} - mentioned)
        mentioned.update(silent)
        self._note(now, None, f"nothing was heard from {workers_text(tuple(silent))}")
        assert self.timeout.waiting is not None
        return [(COORDINATOR, Say(situation.line_about_the_silent(silent, self.timeout.waiting)))]

    def _situation(self, now: float) -> Situation:
        unheard = {worker: now - since for worker, since in self.timeout.missing.items()}
        return Situation(self.states, self.plans, self.programs, self.limits, unheard)

    # --- the end ---

    def _to_all(self, message: Message) -> Posts:
        return [(worker, message) for worker in range(self.size)]

    def _fail(self, text: str, about: Workers, now: float) -> Posts:
        self._note(now, None, f"all fail: {text}")
        self.epoch += 1
        return self._to_all(Fail(self.epoch - 1, text, self._global(about)))

    def _end(self, text: str, about: Workers, now: float) -> Posts:
        self._note(now, None, f"the job ends, because of {workers_text(about)}")
        self.questions += 1
        self.end = OpenQuestion(self.questions, range(self.size))
        return self._to_all(EndJob(self.questions, text, self._global(about)))

    def _global(self, workers: Workers) -> Workers:
        return tuple(self.members[worker] for worker in workers)

    # --- its story ---

    def _note(self, now: float, worker: int | None, what: str) -> None:
        self.events.append(Event(now, worker, what))

    def story(self) -> list[str]:
        """Return a line for each of the last transitions, the last one last."""
        return [
            f"{event.time:10.1f} s: {'' if event.worker is None else f'worker {event.worker} '}{event.what}"
            for event in self.events
        ]

    def dump(self) -> str:
        """Return its whole state as text, one line per field, without the story and the plans."""
        left_out = ("events", "plans", "programs")
        lines = [f"{name}: {value!r}" for name, value in vars(self).items() if name not in left_out]
        return "\n".join(line[:MOST_DUMPED] for line in [*lines, f"plans of: {', '.join(list(self.plans))}"])


def _key(found: Deadlock, states: Mapping[int, State]) -> tuple[tuple[int, str, int], ...]:
    return tuple((worker, states[worker].kind, states[worker].episode) for worker in found.waiting)


def _is_in(state: State, wait: Wait) -> bool:
    """Return whether a worker is still in the wait. In an agreement it may be in a program, too."""
    if state.kind == wait.kind:
        return state.episode == wait.episode
    return state.kind in ("agreeing", "elsewhere") and wait.kind == "executing"
