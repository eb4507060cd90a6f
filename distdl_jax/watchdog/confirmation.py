"""Questions to several workers at once, and what their answers confirm."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from distdl_jax.watchdog.deadlock import State, View
from distdl_jax.watchdog.dependencies import Plans
from distdl_jax.watchdog.messages import Answer


@dataclass(frozen=True)
class OpenQuestion:
    """A question to some workers, by its number, and the answers so far. Without a number nobody is asked."""

    number: int = 0
    workers: Collection[int] = ()
    answers: Mapping[int, Answer] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        """The workers that have not answered."""
        return tuple(worker for worker in self.workers if worker not in self.answers)

    @property
    def is_complete(self) -> bool:
        """Whether a question was asked, and all have answered it."""
        return self.number > 0 and len(self.answers) == len(self.workers)

    def with_answer(self, answer: Answer) -> OpenQuestion:
        """Take in an answer, if it is one to this question."""
        if not self.number or answer.question != self.number:
            return self
        return replace(self, answers={**self.answers, answer.worker: answer})


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
