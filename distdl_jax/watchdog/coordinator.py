"""Worker 0's part: from what all workers have told, whether they can go on, and what they are to do if not.

Pure: a state and an event go in, a state and messages come out. What is certain from the workers' states (`deadlock`)
is concluded at once, after those concerned have confirmed it. The rest is the clock's, whose time the user sets: a
worker that has waited so long asks, and the coordinator calls the roll.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distdl_jax.plans.decomposition import Workers
from distdl_jax.programs.ir import Program
from distdl_jax.settings import TimeLimits
from distdl_jax.watchdog.confirmation import Inquiry
from distdl_jax.watchdog.deadlock import Deadlock, State, View, find_deadlock
from distdl_jax.watchdog.dependencies import Dependencies, Plans, dependencies_of_all, equal_plans
from distdl_jax.watchdog.messages import (
    Allowance,
    Answer,
    CannotAgree,
    EndJob,
    Fail,
    HasReported,
    Noted,
    Posts,
    Question,
    Replay,
    Say,
    StateChanged,
    StillWaiting,
    SurveyAnswer,
    SurveyAsked,
    SurveyQuestion,
    SurveyResult,
    ToCoordinator,
    ToWorker,
)
from distdl_jax.watchdog.survey import Poll, Survey, again, at_fault, lines_of, merged
from distdl_jax.watchdog.timeout import (
    LISTED,
    RUNNING,
    Limits,
    Roll,
    known_here,
    line_about_the_end,
    time_is_up,
    was_not_heard_from,
)

COORDINATOR = 0
"""The world rank of the worker that coordinates."""

PAUSES = (1.0, 60.0)
"""Seconds before those whom a suspicion is about are asked again: at first, and at most."""

LINES_AT_THE_END = (60.0, 3600.0)
"""Seconds after which those who have ended say who is waited for: at first, and at most after each line."""

VERSIONS = 16
"""How many plans of one function are kept: one for each way in which it was traced."""

SEEKS_EVERY = 1e-3
"""Seconds, for each worker, from one look at what they do to the next: the larger the world, the more a look costs."""

ROLLS_EVERY = 4e-3
"""The same from one roll call to the next: who asks meanwhile is in the next one."""


@dataclass(frozen=True)
class Coordinator:
    """What decides for one world of workers; `members`: their ranks in COMM_WORLD.

    - `states`: what each worker has told. `is_news`: whether nobody has looked at it since.
    - `plans`, `programs`: what each worker's part in a function needs, and what it communicates, for reports.
    - `epoch`: how many failures all workers were told of. `ends`: whether the job was ended. `reported`: who has said
      where it was then.
    - `polls`: its part in the last survey of each world, its own included.
    """

    members: Workers
    limits: TimeLimits
    states: Mapping[int, State] = field(default_factory=dict)
    is_news: bool = False
    plans: Plans = field(default_factory=dict)
    programs: Mapping[str, Mapping[int, Program]] = field(default_factory=dict)
    epoch: int = 0
    ends: bool = False
    reported: frozenset[int] = frozenset()
    questions: int = 0
    inquiry: Inquiry | None = None
    look_at: float = float("inf")
    seeks_from: float = 0.0
    pause: float = PAUSES[0]
    concluded: tuple[tuple[int, str, int], ...] = ()
    roll: Roll = field(default=Roll())
    versions: Mapping[str, tuple[Mapping[int, Program], ...]] = field(default_factory=dict)
    polls: Mapping[Workers, Poll] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.members)

    @property
    def all_have_reported(self) -> bool:
        """Whether the job has been told to end, and every worker has said where it is."""
        return len(self.reported) == self.size

    def remember(self, name: str, programs: Mapping[int, Program]) -> Coordinator:
        """Keep a plan of the function `name`, which all workers have agreed on."""
        known = self.versions.get(name, ())
        if any(equal_plans(programs, earlier) for earlier in known):
            return replace(self, programs={**self.programs, name: programs})
        known = (*known, programs)
        # Of too many, nothing is certain but whom they talk to.
        part = dependencies_of_all(known, self.size)
        if len(known) > VERSIONS:
            nothing = Dependencies(fixed=False)
            part = {worker: replace(nothing, partners=needs.partners) for worker, needs in part.items()}
            known = known[1:]
        return replace(
            self,
            plans={**self.plans, name: part},
            programs={**self.programs, name: programs},
            versions={**self.versions, name: known},
        )

    def hear(self, message: ToCoordinator, now: float) -> tuple[Coordinator, Posts]:
        """Take in what a worker tells."""
        if isinstance(message, HasReported):
            return replace(self, reported=self.reported | {message.worker}), []
        if self.ends:
            return self, []
        match message:
            case StateChanged(worker, state):
                return replace(self, states={**self.states, worker: state}, is_news=True), []
            case Answer(worker, question, state):
                heard = replace(self, states={**self.states, worker: state}, is_news=True)
                return heard._take_answer(message, question, now)
            case CannotAgree(epoch, text, about):
                return self._fail(text, about) if epoch == self.epoch else (self, [])
            case SurveyAsked(worker, survey):
                return self._take_part(worker, survey, now)
            case SurveyAnswer(worker, survey, state):
                heard = replace(self, states={**self.states, worker: state}, is_news=True)
                return heard._take_survey_answer(message)
            case StillWaiting(worker, kind, episode):
                if kind == "left" and worker != self._first_that_left():
                    return self, [(worker, Allowance(kind, episode, message.seconds, 0.0))]  # one line is enough
                return replace(self, roll=self.roll.with_asker(message)), [(worker, Noted(kind, episode))]

    def tick(self, now: float) -> tuple[Coordinator, Posts]:
        """What follows by now: workers are asked again, or all fail, or the job ends."""
        if self.ends:
            return self, []
        known = self
        posts: Posts = []
        if now >= self.roll.speaks_at:
            known, posts = known._speak_of_the_silent(now)
        if now >= self.roll.is_due_at:
            known, more = known._call_the_roll(now)
            posts = posts + more
        elif now >= self._roll_ends_at():
            known, more = known._end_roll(now)
            posts = posts + more
        if not known.ends and now >= known._overdue_at():
            known, more = known._tell_beforehand(now)
            posts = posts + more
        if not known.ends and now >= known._seeks_at():
            known, more = known._seek(now)
            posts = posts + more
        return known, posts

    def wakes_at(self) -> float:
        """When it will have something to say, if nothing happens before."""
        return min(self._seeks_at(), self._roll_ends_at(), self.roll.is_due_at, self.roll.speaks_at, self._overdue_at())

    def _seeks_at(self) -> float:
        return min(self.look_at, self.seeks_from if self.is_news else float("inf"))

    def _roll_ends_at(self) -> float:
        """When it ends, if nobody answers any more: whoever is silent for longer than the limit can't be waited for."""
        limit = self.limits.waiting or float("inf")
        if (poll := self._own_poll()) is not None:
            return poll.began_at + limit if poll.awaited else -float("inf")
        return self.roll.owed_since + limit

    # --- what is certain ---

    def _seek(self, now: float) -> tuple[Coordinator, Posts]:
        """Ask those whom a suspicion is about."""
        known = replace(self, is_news=False, look_at=float("inf"), seeks_from=now + SEEKS_EVERY * self.size)
        found = find_deadlock(View(self.states, self.plans))
        if found is None:
            return replace(known, inquiry=None, pause=PAUSES[0]), []
        if set(_key(found, self.states)) <= set(self.concluded):
            return replace(known, inquiry=None), []
        said = {worker: self.states.get(worker, RUNNING) for worker in known._concerned(found)}
        asked = self.inquiry
        if asked is not None and not asked.is_complete and asked.is_about(said):
            return known, []  # the answers are on their way
        if asked is not None and asked.is_complete and now < self.look_at < float("inf"):
            return replace(known, look_at=self.look_at), []
        number = self.questions + 1
        posts: Posts = [(worker, Question(number)) for worker in sorted(said)]
        return replace(known, questions=number, inquiry=Inquiry(number, said, {})), posts

    def _concerned(self, found: Deadlock) -> list[int]:
        """Who has to confirm it: those that wait, and those they wait for, but who has ended with an error."""
        failed = {worker for worker, state in self.states.items() if state.kind == "left" and state.status}
        return sorted({*found.waiting, *found.about} - failed)

    def _take_answer(self, answer: Answer, question: int, now: float) -> tuple[Coordinator, Posts]:
        known = replace(self, roll=self.roll.with_answer(answer))
        inquiry = known.inquiry
        if inquiry is None or inquiry.number != question:
            return known, []
        inquiry = replace(inquiry, answers={**inquiry.answers, answer.worker: answer})
        known = replace(known, inquiry=inquiry)
        if not inquiry.is_complete:
            return known, []
        view = inquiry.view(known.plans)
        failed = {worker: s for worker, s in known.states.items() if s.kind == "left" and s.status}
        view = replace(view, states={**view.states, **failed})
        found = find_deadlock(view)
        if found is None:
            pause = min(2 * known.pause, PAUSES[1])
            return replace(known, look_at=now + known.pause, pause=pause), []
        known = replace(known, inquiry=None, pause=PAUSES[0], concluded=_key(found, view.states))
        return known._conclude(found, view.states)

    def _conclude(self, found: Deadlock, states: Mapping[int, State]) -> tuple[Coordinator, Posts]:
        """What follows from what they were doing when they answered: since then some may have been told to go on."""
        if found.call and all(states[worker].calls.agreed_before for worker in found.waiting):
            return self, self._to_all(Replay(found.call))
        if all(states[worker].kind == "agreeing" for worker in found.waiting):
            return self._fail(found.text, found.about)
        return self._end(found.text, tuple(self.members[worker] for worker in found.about))

    # --- the clock ---

    def _call_the_roll(self, now: float) -> tuple[Coordinator, Posts]:
        number = self.questions + 1
        known = replace(self, questions=number, roll=self.roll.called(number, self.size, now))
        return known, self._to_all(Question(number, in_full=False))

    def _speak_of_the_silent(self, now: float) -> tuple[Coordinator, Posts]:
        """A line that ends nothing, long before the limit."""
        silent = self.roll.silent(now)
        waiting, _ = next(iter(self.roll.askers))
        what = "; ".join(was_not_heard_from(worker, self.roll.owed, now) for worker in silent[:8])
        text = (
            f"distdl_jax: {what}: gone, stopped, cut off, or in code that does not let Python run. Worker {waiting} "
            f"{self.states.get(waiting, RUNNING).describe()}. The clock (DISTDL_JAX_TIMEOUT) decides.\n"
        )
        roll = replace(self.roll, mentioned=self.roll.mentioned.union(silent))
        return replace(self, roll=roll), [(COORDINATOR, Say(text))]

    def _end_roll(self, now: float) -> tuple[Coordinator, Posts]:
        """What follows when all have said what they do, who can; and those beyond this world, before the job ends."""
        limits = Limits(self.states, self.plans, self.limits)
        poll = self._own_poll()
        beyond = {} if poll is None else poll.known
        roll, allowed = self.roll.closed(now + ROLLS_EVERY * self.size, self.members, beyond)
        known = replace(self, roll=roll)
        posts: Posts = []
        for asker in self.roll.askers.values():
            state = self.states.get(asker.worker, RUNNING)
            is_over = asker.worker in self.roll.answers and not _is_in(state, asker)
            if is_over:
                continue
            seconds = allowed[asker.worker, asker.kind]
            limit = limits.of(asker)
            if asker.kind == "left":
                posts += [(asker.worker, Say(text)) for text in line_about_the_end(asker, self.states, self.roll, now)]
                seconds, limit = asker.seconds, min(max(LINES_AT_THE_END[0], asker.seconds), LINES_AT_THE_END[1])
            elif limit is None:
                seconds, limit = asker.seconds, self.limits.waiting
            if asker.seconds - seconds >= limit:
                if poll is None and (asked := self._beyond()):
                    return self._begin_survey(asked)
                unheard = self.roll.unheard(now)
                text = time_is_up(asker, limit, self.states, self.programs, unheard, self.size)
                doings = merged(beyond, known_here(self.members, self.states, self.plans, unheard))
                about = at_fault(self.members[asker.worker], doings, poll is None or not poll.awaited)
                if not set(about) <= set(self.members):
                    text += f"\nOf MPI.COMM_WORLD, {'; '.join(lines_of(about[:LISTED], doings))}."
                return known._end(text, about)
            posts.append((asker.worker, Allowance(asker.kind, asker.episode, seconds, limit)))
        return known, posts

    # --- beyond this world ---

    def _beyond(self) -> frozenset[int]:
        """Who is to be asked what goes on elsewhere: nobody where somebody has been silent for the limit."""
        beyond = frozenset(worker for worker, answer in self.roll.answers.items() if answer.detail.beyond)
        return beyond if len(self.roll.answers) == self.size else frozenset()

    def _own_poll(self) -> Poll | None:
        """That of the roll call that goes on."""
        poll = self.polls.get(self.members)
        return poll if poll is not None and poll.survey.number == self.roll.number else None

    def _begin_survey(self, asked: frozenset[int]) -> tuple[Coordinator, Posts]:
        survey, before = Survey(self.members, self.roll.number), self.polls.get(self.members)
        poll = again(before, survey, asked, self.roll.began_at, self.limits.waiting)
        known = replace(self, polls={**self.polls, self.members: poll})
        posts: Posts = [(asker.worker, Noted(asker.kind, asker.episode)) for asker in self.roll.askers.values()]
        return known, posts + [(worker, SurveyQuestion(survey)) for worker in sorted(asked)]

    def _take_part(self, worker: int, survey: Survey, now: float) -> tuple[Coordinator, Posts]:
        """In a survey that another world has begun."""
        before = self.polls.get(survey.world)
        if survey.world == self.members or (before is not None and before.survey.number >= survey.number):
            return self, [(worker, SurveyResult(survey, {}))]
        poll = Poll(survey, worker, now, frozenset(range(self.size)))
        return replace(self, polls={**self.polls, survey.world: poll}), self._to_all(SurveyQuestion(survey))

    def _take_survey_answer(self, answer: SurveyAnswer) -> tuple[Coordinator, Posts]:
        poll = self.polls.get(answer.survey.world)
        if poll is None or poll.survey != answer.survey or answer.worker not in poll.awaited:
            return self, []
        poll = poll.with_answer(answer.worker, answer.known, answer.is_last)
        known = replace(self, polls={**self.polls, answer.survey.world: poll})
        if poll.asker is None or (poll.awaited and answer.is_last and not poll.is_overdue):
            return known, []
        return known._tell(poll)

    def _tell(self, poll: Poll) -> tuple[Coordinator, Posts]:
        """To who has asked in this world: what is known by now."""
        here = known_here(self.members, self.states, self.plans, poll.awaited - poll.heard)
        result = SurveyResult(poll.survey, merged(poll.known, here), not poll.awaited)
        known = poll if poll.awaited else replace(poll, known={})
        posts: Posts = [] if poll.asker is None else [(poll.asker, result)]
        return replace(self, polls={**self.polls, poll.survey.world: known}), posts

    def _overdue_at(self) -> float:
        return min((poll.overdue_at(self.limits.waiting) for poll in self.polls.values()), default=float("inf"))

    def _tell_beforehand(self, now: float) -> tuple[Coordinator, Posts]:
        known: Coordinator = self
        posts: Posts = []
        for poll in self.polls.values():
            if now >= poll.overdue_at(self.limits.waiting):
                known, more = known._tell(replace(poll, is_overdue=True))
                posts = posts + more
        return known, posts

    def _first_that_left(self) -> int | None:
        return min((worker for worker, state in self.states.items() if state.kind == "left"), default=None)

    # --- the end ---

    def _to_all(self, message: ToWorker) -> Posts:
        return [(worker, message) for worker in range(self.size)]

    def _fail(self, text: str, about: tuple[int, ...]) -> tuple[Coordinator, Posts]:
        fail = Fail(self.epoch, text, tuple(self.members[worker] for worker in about))
        return replace(self, epoch=self.epoch + 1), self._to_all(fail)

    def _end(self, text: str, about: tuple[int, ...]) -> tuple[Coordinator, Posts]:
        """`about`: by rank in COMM_WORLD."""
        return replace(self, ends=True), self._to_all(EndJob(text, about))


def _key(found: Deadlock, states: Mapping[int, State]) -> tuple[tuple[int, str, int], ...]:
    waiting = ((worker, states.get(worker, RUNNING)) for worker in found.waiting)
    return tuple((worker, state.kind, state.episode) for worker, state in waiting)


def _is_in(state: State, asker: StillWaiting) -> bool:
    """Whether the worker is in the episode still. In an agreement it may be in a program, too, of which it asks."""
    if state.kind == asker.kind:
        return state.episode == asker.episode
    return state.kind in ("agreeing", "elsewhere") and asker.kind == "executing"
