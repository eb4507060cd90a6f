"""What reporters and the coordinator tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from distdl_jax.watchdog.call_log import CallWindow
from distdl_jax.watchdog.deadlock import Kind, State
from distdl_jax.watchdog.survey import Known, Survey

# --- to the coordinator ---


@dataclass(frozen=True)
class StateChanged:
    """What the worker does now."""

    worker: int
    state: State


@dataclass(frozen=True)
class Detail:
    """What a worker tells when it is asked.

    - `window`: its last calls.
    - `sent`, `received`: how many messages of agreements it has sent to, and got from, each other worker.
    - `compiled`: for how many seconds it has compiled so far. `awake`: for how many its watch has been awake.
    - `beyond`: whether it has other worlds, with workers that are not of this one.
    """

    window: CallWindow = field(default=CallWindow())
    sent: Mapping[int, int] = field(default_factory=dict)
    received: Mapping[int, int] = field(default_factory=dict)
    compiled: float = 0.0
    awake: float = 0.0
    beyond: bool = False


@dataclass(frozen=True)
class Answer:
    """The answer to a question: what the worker does, and more."""

    worker: int
    question: int
    state: State
    detail: Detail


@dataclass(frozen=True)
class CannotAgree:
    """A worker has found that the programs differ; `epoch` counts the failures before this one."""

    epoch: int
    text: str
    about: tuple[int, ...] = ()


@dataclass(frozen=True)
class StillWaiting:
    """The worker has waited for `seconds` in one `episode` of this kind: may it?"""

    worker: int
    kind: Kind
    episode: int
    seconds: float


@dataclass(frozen=True)
class SurveyAsked:
    """The worker asks, for a survey that has reached it in another world, what is known in this one."""

    worker: int
    survey: Survey


@dataclass(frozen=True)
class SurveyAnswer:
    """What the worker does, and what it was told in its other worlds; `is_last`: that is all it will be told."""

    worker: int
    survey: Survey
    state: State
    known: Known
    is_last: bool = True


@dataclass(frozen=True)
class HasReported:
    """The worker has said where it is, before the job ends."""

    worker: int


# --- to a worker ---


@dataclass(frozen=True)
class Question:
    """What are you doing now? `in_full`: and what have you called, and said to whom?"""

    number: int
    in_full: bool = True


@dataclass(frozen=True)
class SurveyQuestion:
    """What are you doing now, and what is known in your other worlds?"""

    survey: Survey


@dataclass(frozen=True)
class SurveyResult:
    """What is known in this world, for the worker that asked; `is_last`: nobody is asked there any more."""

    survey: Survey
    known: Known
    is_last: bool = True


@dataclass(frozen=True)
class Fail:
    """Raise `text`, in this epoch."""

    epoch: int
    text: str
    about: tuple[int, ...] = ()


@dataclass(frozen=True)
class Noted:
    """The coordinator has heard that the worker waits, and looks into it."""

    kind: Kind
    episode: int


@dataclass(frozen=True)
class Allowance:
    """In this episode `seconds` do not count as waiting, and the limit is `limit`."""

    kind: Kind
    episode: int
    seconds: float
    limit: float


@dataclass(frozen=True)
class Say:
    """Print this: nothing is wrong, but it may interest who looks."""

    text: str


@dataclass(frozen=True)
class Replay:
    """Who traces anew, in this call, what was agreed on before takes it as it was: others are past the call."""

    call: int


@dataclass(frozen=True)
class EndJob:
    """Say where you are; then the job ends."""

    text: str
    about: tuple[int, ...] = ()


ToCoordinator = StateChanged | Answer | CannotAgree | StillWaiting | SurveyAsked | SurveyAnswer | HasReported
ToReporter = Question | Fail | Noted | Allowance | Say | Replay | EndJob
ToWorker = ToReporter | SurveyQuestion | SurveyResult
Message = ToCoordinator | ToWorker
Posts = list[tuple[int, ToWorker]]
"""Messages, each after the worker that is to get it."""


class Mailbox(Protocol):
    """How messages travel between the reporters of one world. Nothing blocks."""

    def post(self, message: Message, to: int) -> None:
        """Send to a worker."""

    def next(self) -> tuple[int, Message] | None:
        """A message that has arrived, and who sent it; None where there is none."""

    def begin_barrier(self) -> None:
        """Tell all workers that this one is here."""

    def has_met(self) -> bool:
        """Whether all workers have begun the barrier."""
