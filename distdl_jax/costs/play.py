"""A training step in time: what all workers do is played with a clock for each worker, without data.

A message ends at the later of its two workers, plus its own time; a sender doesn't wait for a receiver that takes a
short (eager) one. A collective ends at the latest of its team, plus its own time. Arithmetic is each worker's own. So
a step is played pass after pass, with the skew that one leaves to the next, until all passes take the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distdl_jax.costs.meetings import Meetings

MOST_PASSES = 30
"""How many passes are played at most until they repeat."""

NOISY_PASSES = 16
"""How many passes are played with noise: the step is their mean."""


class Links(Protocol):
    """What a play asks of a machine: the seconds of messages and collectives between world ranks."""

    def message_seconds(self, sender: np.ndarray, receiver: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Return the seconds of messages that are sent at the same time, one an entry."""

    def eager(self, sender: np.ndarray, receiver: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Return which messages are so short that the sender doesn't wait for the receiver."""

    def collective_seconds(self, kind: str, team: np.ndarray, nbytes: int) -> float:
        """Return the seconds of a collective, of so many bytes on each worker."""


@dataclass(frozen=True)
class Own:
    """Seconds that each worker spends by itself, by world rank; `noisy`: whether they vary from pass to pass."""

    row: int
    seconds: np.ndarray
    noisy: bool = True


@dataclass(frozen=True)
class Met:
    """A movement in time: its meetings, with the seconds of each.

    - `row`: of the layer that it belongs to.
    - `messages`: of each wave the seconds of its messages, and which of them are eager.
    - `collectives`: of each wave the seconds of its collectives.
    """

    row: int
    meetings: Meetings
    messages: Sequence[tuple[np.ndarray, np.ndarray]]
    collectives: Sequence[Sequence[float]]

    @classmethod
    def on(cls, links: Links, row: int, meetings: Meetings) -> Met:
        """Return the meetings with their seconds on a machine."""
        workers, messages, collectives = meetings.workers, [], []
        for wave in meetings.waves:
            send, receive, nbytes = wave.messages
            between = workers[send], workers[receive], nbytes
            messages.append((links.message_seconds(*between), links.eager(*between)))
            collectives.append(
                [
                    links.collective_seconds(each.kind, workers[each.operations], each.nbytes)
                    for each in wave.collectives
                ]
            )
        return cls(row, meetings, messages, collectives)


Step = Own | Met


@dataclass
class Spent:
    """The seconds that workers spend in one step: arrays of rows (layers) x workers.

    - `computing`: in arithmetic, and in packing.
    - `communicating`: in messages and collectives, apart from waiting.
    - `waiting`: until partners have come.
    """

    computing: np.ndarray
    communicating: np.ndarray
    waiting: np.ndarray

    @classmethod
    def none(cls, rows: int, workers: int) -> Spent:
        """Return zeros."""
        return cls(*(np.zeros((rows, workers)) for _ in range(3)))

    def add(self, other: Spent, weight: float) -> None:
        """Add what is spent in another step, so many times."""
        for mine, others in zip(self.parts, other.parts, strict=True):
            mine += weight * others

    @property
    def parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The three arrays."""
        return self.computing, self.communicating, self.waiting

    @property
    def total(self) -> np.ndarray:
        """The seconds of all rows together, of each worker."""
        return self.computing.sum(0) + self.communicating.sum(0) + self.waiting.sum(0)


@dataclass(frozen=True)
class Played:
    """What a play found.

    - `spent`: in one step, in the mean over the passes that were played at the end.
    - `passes`: the seconds from the end of each of these passes to that of the next, of the slowest worker.
    - `repeats`: whether all passes without noise took the same time in the end.
    """

    spent: Spent
    passes: np.ndarray
    repeats: bool


def play(steps: Sequence[Step], rows: int, workers: int, *, noise: float = 0.0, seed: int = 0) -> Played:
    """Play the steps of all workers, pass after pass.

    - `rows`: how many layers the steps belong to.
    - `noise`: the relative spread of arithmetic; with one, passes with times drawn for each worker follow.
    """
    clock, spent, repeats = np.zeros(workers), Spent.none(rows, workers), False
    increments: list[np.ndarray] = []
    for _ in range(MOST_PASSES):
        spent = Spent.none(rows, workers)
        before, clock = clock, _pass(steps, clock, spent, None, 0.0)
        increments.append(clock - before)
        if repeats := len(increments) > 1 and np.allclose(increments[-1], increments[-2], rtol=1e-9, atol=1e-12):
            break
    if not noise:
        return Played(spent, np.max(increments[-1], keepdims=True), repeats)
    draw, mean, ends = np.random.default_rng(seed), Spent.none(rows, workers), [float(np.max(clock))]
    for _ in range(NOISY_PASSES):
        spent = Spent.none(rows, workers)
        clock = _pass(steps, clock, spent, draw, noise)
        mean.add(spent, 1 / NOISY_PASSES)
        ends.append(float(np.max(clock)))
    return Played(mean, np.diff(ends), repeats)


def _pass(
    steps: Sequence[Step], clock: np.ndarray, spent: Spent, draw: np.random.Generator | None, noise: float
) -> np.ndarray:
    """Return the workers' clocks after one pass of all steps that begins at `clock`; add to `spent`."""
    for step in steps:
        if isinstance(step, Own):
            seconds = step.seconds
            if draw is not None and step.noisy:
                seconds = seconds * np.maximum(1 + noise * draw.standard_normal(len(clock)), 0)
            spent.computing[step.row] += seconds
            clock = clock + seconds
        else:
            clock = _meet(step, clock, spent)
    return clock


def _meet(step: Met, clock: np.ndarray, spent: Spent) -> np.ndarray:
    """Return the workers' clocks after a movement."""
    workers, before, waves = step.meetings.workers, step.meetings.before, step.meetings.waves
    end, own = np.full(len(workers), -np.inf), np.zeros(len(workers))

    def begin(operations: np.ndarray) -> np.ndarray:
        earlier = before[operations]
        return np.where(earlier < 0, clock[workers[operations]], end[earlier])

    def note(operations: np.ndarray, ends: np.ndarray, seconds: np.ndarray | float) -> None:
        end[operations] = np.maximum(end[operations], ends)
        own[operations] = np.maximum(own[operations], seconds)

    for wave, (seconds, eager), collectives in zip(waves, step.messages, step.collectives, strict=True):
        send, receive, _ = wave.messages
        sender, receiver = begin(send), begin(receive)
        met = np.maximum(sender, receiver) + seconds
        note(send, np.where(eager, sender + seconds, met), seconds)
        note(receive, met, seconds)
        for collective, time in zip(wave.collectives, collectives, strict=True):
            latest = begin(collective.operations).max()
            note(collective.operations, np.full(len(collective.operations), latest + time), time)
    everything = np.arange(len(workers))
    waited = np.maximum(end - begin(everything) - own, 0)
    np.add.at(spent.communicating[step.row], workers, own)
    np.add.at(spent.waiting[step.row], workers, waited)
    clock = clock.copy()
    np.maximum.at(clock, workers, end)
    return clock
