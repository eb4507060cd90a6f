"""Seconds of a training step: of a layer on each worker, and of the whole step as an interval."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """The seconds of a step, of the slowest worker.

    - `low`, `mean`, `high`: between which bounds they are expected, and in the mean.
    - `reasons`: why not known better, in words.

    >>> print(Interval(0.0031, 0.0034, 0.0042, ()))
    3.4 ms (3.1 to 4.2)
    """

    low: float
    mean: float
    high: float
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        low, mean, high = (f"{1e3 * seconds:.3g}" for seconds in self[:3])
        return f"{mean} ms ({low} to {high})"


@dataclass
class Times:
    """Seconds of one training step: arrays of numbers with an entry for each worker, by world rank.

    - `forward`, `backward`, `update`: of arithmetic and of copies for messages: in the forward pass, in the backward
      pass, and in the optimiser.
    - `transfer`: of messages and collective operations, apart from waiting.
    - `waiting`: until partners have come.
    - `hideable`: so much of `transfer` would be hidden, were the layer's messages sent while it computes.
    """

    forward: np.ndarray
    backward: np.ndarray
    update: np.ndarray
    transfer: np.ndarray
    waiting: np.ndarray
    hideable: np.ndarray

    @classmethod
    def sum(cls, several: Iterable[Times], workers: int) -> Times:
        """Return the sums over layers, or zeros for so many workers."""
        total = cls(*(np.zeros(workers) for _ in fields(cls)))
        for times in several:
            for field in fields(cls):
                getattr(total, field.name)[...] += getattr(times, field.name)
        return total

    @property
    def computing(self) -> np.ndarray:
        """The seconds of all arithmetic and copies."""
        return self.forward + self.backward + self.update

    @property
    def exposed(self) -> np.ndarray:
        """The seconds of communication in which a worker does not compute."""
        return self.transfer + self.waiting

    @property
    def total(self) -> np.ndarray:
        """All seconds."""
        return self.computing + self.exposed
