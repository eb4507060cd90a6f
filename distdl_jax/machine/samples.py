"""What is measured of a machine, and the times of each of these subjects, round by round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np


@dataclass(frozen=True)
class Message:
    """A message of so many bytes in one direction, between two workers so far apart; the others rest."""

    level: str
    bytes: int


@dataclass(frozen=True)
class Exchange:
    """Messages in both directions of each of so many pairs of workers at once, on one host or between two.

    - `senders`: how many workers of a host send at once.
    """

    level: str
    bytes: int
    senders: int


@dataclass(frozen=True)
class Collective:
    """A collective operation, of so many bytes on each worker.

    - `synced`: whether an all-reduce of one number follows, without which the root of a broadcast runs ahead.
    """

    kind: str
    workers: int
    hosts: int
    bytes: int
    synced: bool = False


@dataclass(frozen=True)
class Overlapped:
    """Messages in both directions of one pair, arithmetic, or both at the same time.

    - `does`: "message", "arithmetic" or "both".
    """

    bytes: int
    does: str


@dataclass(frozen=True)
class Arithmetic:
    """An operation of a shape in one direction.

    - `flops`: how many it has.
    - `alone`: whether one worker computes, and the others rest.
    """

    kind: str
    dtype: str
    direction: str
    shape: tuple[int, ...]
    flops: int = field(compare=False)
    alone: bool = False


@dataclass(frozen=True)
class Streamed:
    """An array that is computed from another one, element by element.

    - `bytes`: of both together. - `alone`: whether one worker computes.
    """

    bytes: int
    alone: bool = False


@dataclass(frozen=True)
class Copied:
    """A block of so many bytes that is moved by one column."""

    bytes: int


ARRAYS = 33
"""So many arrays has the call that is timed for what one of them takes."""


@dataclass(frozen=True)
class Overhead:
    """What nothing useful is done in: a "call", one with several "arrays", a "kernel", an "operation" of MPI's."""

    of: str


Subject = Message | Exchange | Collective | Overlapped | Arithmetic | Streamed | Copied | Overhead

Rounds = list[list[float]]
"""One worker's seconds of a subject, several times in each round."""

S = TypeVar("S")

MEETINGS = (Message, Exchange, Collective, Overlapped)
"""Subjects that several workers take part in: they take as long as on the slowest of them."""


@dataclass(frozen=True)
class Samples:
    """Seconds of each subject: several times in each round.

    >>> samples = Samples({Copied(64): ((1.0, 1.2, 1.1), (1.3, 1.3, 1.4))})
    >>> f"{samples.seconds(Copied(64)):.1f} s, {100 * samples.difference(Copied(64)):.0f} %"
    '1.2 s, 8 %'
    """

    rounds: Mapping[Subject, tuple[tuple[float, ...], ...]]

    def of_rounds(self, subject: Subject) -> np.ndarray:
        """Return the subject's seconds in each round: the median."""
        return np.median(np.array(self.rounds[subject]), axis=1)

    def seconds(self, subject: Subject) -> float:
        """Return the subject's seconds: the median of the rounds."""
        return float(np.median(self.of_rounds(subject)))

    def difference(self, subject: Subject) -> float:
        """Return by how much a round differs from the median of the rounds, relative to it, at most."""
        rounds, median = self.of_rounds(subject), self.seconds(subject)
        return float(np.max(np.abs(rounds - median))) / max(abs(median), 1e-12)

    def spread(self, subject: Subject) -> float:
        """Return the spread of the times in a round, relative to their median."""
        times = np.array(self.rounds[subject])
        return float(np.std(times / np.median(times, axis=1, keepdims=True)))

    def all_of(self, kind: type[S]) -> list[S]:
        """Return the subjects of one class."""
        return [subject for subject in self.rounds if isinstance(subject, kind)]


def combined(workers: Iterable[Mapping[Subject, Rounds]]) -> Samples:
    """Return the samples of all workers as one: of meetings the slowest worker's, else the mean over workers."""
    gathered: dict[Subject, list[np.ndarray]] = {}
    for mine in workers:
        for subject, rounds in mine.items():
            gathered.setdefault(subject, []).append(np.array(rounds))
    together: dict[Subject, tuple[tuple[float, ...], ...]] = {}
    for subject, several in gathered.items():
        times = np.max(several, axis=0) if isinstance(subject, MEETINGS) else np.mean(several, axis=0)
        together[subject] = tuple(map(tuple, times.tolist()))
    return Samples(together)
