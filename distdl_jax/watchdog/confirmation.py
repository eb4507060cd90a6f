"""What the coordinator asks those whom a deadlock is about before it concludes anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from distdl_jax.watchdog.deadlock import State, View
from distdl_jax.watchdog.dependencies import Plans
from distdl_jax.watchdog.messages import Answer


@dataclass(frozen=True)
class Inquiry:
    """The question to those whom a deadlock is about, whether they still wait as they had said.

    All who say that they do were waiting at one time: when the first of them was asked.
    """

    number: int
    said: Mapping[int, State]
    answers: Mapping[int, Answer]

    @property
    def is_complete(self) -> bool:
        """Whether all have answered."""
        return len(self.answers) == len(self.said)

    def is_about(self, said: Mapping[int, State]) -> bool:
        """Whether these workers, as they are, are asked."""
        return self.said.keys() == said.keys() and all(s.is_as(self.said[worker]) for worker, s in said.items())

    def view(self, plans: Plans) -> View:
        """What is certain by now: of those who have moved, nothing."""
        states = {
            worker: answer.state if answer.state.is_as(self.said[worker]) else replace(answer.state, kind="running")
            for worker, answer in self.answers.items()
        }

        def coming(sender: int, receiver: int) -> bool:
            a, b = self.answers.get(sender), self.answers.get(receiver)
            return a is None or b is None or a.detail.sent.get(receiver, 0) != b.detail.received.get(sender, 0)

        return View(states, plans, {worker: a.detail.window for worker, a in self.answers.items()}, coming)
