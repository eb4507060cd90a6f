"""What reporters and the coordinator tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from distdl_jax.watchdog.deadlock import State

# --- to the coordinator ---


@dataclass(frozen=True)
class StateChanged:
    """What the worker does now."""

    worker: int
    state: State


@dataclass(frozen=True)
class Answer:
    """The worker has got the question, and has told its state before."""

    worker: int
    question: int


@dataclass(frozen=True)
class CannotAgree:
    """A worker has found that the programs differ; `epoch` counts the failures before this one."""

    epoch: int
    text: str


@dataclass(frozen=True)
class WaitedTooLong:
    """The worker's clock has run out."""

    worker: int
    seconds: float


# --- to a reporter ---


@dataclass(frozen=True)
class Question:
    """What are you doing now?"""

    number: int


@dataclass(frozen=True)
class Fail:
    """Raise `text`, unless this failure was raised already."""

    epoch: int
    text: str


@dataclass(frozen=True)
class WaitLonger:
    """The job is not ended yet."""


@dataclass(frozen=True)
class EndJob:
    """Say where you are; then the job ends."""

    text: str


ToCoordinator = StateChanged | Answer | CannotAgree | WaitedTooLong
ToReporter = Question | Fail | WaitLonger | EndJob
Message = ToCoordinator | ToReporter


class Mailbox(Protocol):
    """How messages travel between the reporters of one world. Nothing blocks but the barrier."""

    def post(self, message: Message, to: int) -> None:
        """Send to a worker."""

    def next(self) -> tuple[int, Message] | None:
        """A message that has arrived, and who sent it; None where there is none."""

    def barrier(self) -> None:
        """Wait until all workers are here; other threads go on."""
