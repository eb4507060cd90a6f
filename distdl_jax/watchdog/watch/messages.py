"""Messages between the workers' reporters and the coordinator of their world: questions, answers, and a few orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from distdl_jax.watchdog.watch.deadlock import Kind, State

# --- to the coordinator ---


class Wait(NamedTuple):
    """A current wait of a worker: its kind, its number among those of the kind, and how long it has lasted."""

    kind: Kind
    episode: int
    seconds: float


@dataclass(frozen=True)
class Detail:
    """Facts that only answers carry.

    - `compiled`: how many seconds ago the worker last compiled; 0 while it does.
    - `sent`, `received`: the numbers of agreement messages to, and from, each other worker.
    """

    compiled: float = float("inf")
    sent: Mapping[int, int] = field(default_factory=dict)
    received: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The state of a worker: the answer to `question`, or (0) an unsolicited change.

    `waits`: the waits that have lasted long enough for the timeout to consider them.
    """

    worker: int
    state: State
    waits: tuple[Wait, ...] = ()
    question: int = 0
    detail: Detail = field(default=Detail())


@dataclass(frozen=True)
class CannotAgree:
    """A worker has found that the programs differ; `epoch` counts the failures before this one."""

    epoch: int
    text: str
    about: tuple[int, ...] = ()


# --- to a worker ---


@dataclass(frozen=True)
class Question:
    """What are you doing now? `in_full`: with all stored calls."""

    number: int
    in_full: bool = False


@dataclass(frozen=True)
class Fail:
    """Raise `text`, in this epoch."""

    epoch: int
    text: str
    about: tuple[int, ...] = ()


@dataclass(frozen=True)
class Say:
    """Print this line. Nothing ends."""

    text: str


@dataclass(frozen=True)
class EndJob:
    """Report where you are, and answer `question`; then the job ends. Without a question it ends immediately."""

    question: int
    text: str
    about: tuple[int, ...] = ()


ToCoordinator = Answer | CannotAgree
ToWorker = Question | Fail | Say | EndJob
Message = ToCoordinator | ToWorker
Posts = list[tuple[int, Message]]
"""Messages, each after its receiver."""


class Mailbox(Protocol):
    """Transport of messages between the workers of one world. Nothing blocks."""

    def post(self, message: Message, to: int) -> None:
        """Send to a worker."""

    def next(self) -> tuple[int, Message] | None:
        """Return an arrived message, after its sender; None if there is none."""

    def begin_barrier(self) -> None:
        """Tell all workers that this one has arrived."""

    def has_met(self) -> bool:
        """Return whether all workers have started the barrier."""
