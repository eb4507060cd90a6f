"""How much each worker stores, computes and sends: the numbers of a layer, or of a network, one entry a worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from distdl_jax.costs.step_program import Event
from distdl_jax.plans.work import Work

Index = np.ndarray | slice | int
"""Workers, as an index of arrays with an entry for each worker."""


@dataclass
class Amounts:
    """Numbers of one training step: arrays of integers with an entry for each worker, by world rank.

    Bytes:

    - `parameters`, `gradients`, `optimiser`: of the parameters, their gradients, and what the optimiser stores.
    - `bytes_forward`, `bytes_backward`: in messages that the worker sends.
    - `team_bytes_forward`, `team_bytes_backward`: that it hands to collective operations.

    Counts:

    - `flops_forward`, `flops_input`, `flops_parameters`: of the forward pass, and of the two kinds of gradients.
    - `messages_forward`, `messages_backward`: messages that the worker sends.
    - `collectives_forward`, `collectives_backward`: collective operations that it takes part in.
    """

    parameters: np.ndarray
    gradients: np.ndarray
    optimiser: np.ndarray
    flops_forward: np.ndarray
    flops_input: np.ndarray
    flops_parameters: np.ndarray
    messages_forward: np.ndarray
    messages_backward: np.ndarray
    bytes_forward: np.ndarray
    bytes_backward: np.ndarray
    collectives_forward: np.ndarray
    collectives_backward: np.ndarray
    team_bytes_forward: np.ndarray
    team_bytes_backward: np.ndarray

    @classmethod
    def none(cls, workers: int) -> Amounts:
        """Return zeros for so many workers."""
        return cls(*(np.zeros(workers, np.int64) for _ in fields(cls)))

    @classmethod
    def sum(cls, several: Iterable[Amounts], workers: int) -> Amounts:
        """Return the sums over layers, or zeros for so many workers."""
        total = cls.none(workers)
        for amounts in several:
            for field in fields(cls):
                getattr(total, field.name)[...] += getattr(amounts, field.name)
        return total

    def count(self, event: Event, workers: Index) -> None:
        """Add what `workers` do in an event of a step, the same on each."""
        back = "forward" if event.direction == "forward" else "backward"
        if isinstance(event.does, Work):
            self._count_work(event, event.does, workers)
        elif event.does.is_message:
            if event.does.dest is not None:
                getattr(self, f"messages_{back}")[workers] += 1
                getattr(self, f"bytes_{back}")[workers] += event.does.bytes_sent
        else:
            getattr(self, f"collectives_{back}")[workers] += 1
            getattr(self, f"team_bytes_{back}")[workers] += event.does.bytes_sent

    def count_messages(self, back: str, workers: Index, messages: np.ndarray, nbytes: np.ndarray) -> None:
        """Add messages that each of `workers` sends "forward", or "backward"."""
        getattr(self, f"messages_{back}")[workers] += messages
        getattr(self, f"bytes_{back}")[workers] += nbytes

    def _count_work(self, event: Event, work: Work, workers: Index) -> None:
        match event.direction:
            case "forward":
                self.flops_forward[workers] += work.flops
            case "input gradient":
                self.flops_input[workers] += work.flops_x
            case "parameter gradient":
                self.flops_parameters[workers] += work.flops_params

    @property
    def flops(self) -> np.ndarray:
        """All multiplications and additions."""
        return self.flops_forward + self.flops_input + self.flops_parameters

    @property
    def messages(self) -> np.ndarray:
        """All messages sent."""
        return self.messages_forward + self.messages_backward

    @property
    def bytes(self) -> np.ndarray:
        """All bytes sent in messages, and handed to collective operations."""
        in_messages = self.bytes_forward + self.bytes_backward
        return in_messages + self.team_bytes_forward + self.team_bytes_backward


def alike(several: Sequence[Amounts]) -> Iterator[np.ndarray]:
    """Yield the workers whose amounts are the same in each of several layers."""
    codes = np.zeros(len(several[0].parameters) if several else 0, np.uint64)
    for amounts in several:
        for field in fields(amounts):  # mixed as in a hash function
            codes = (codes ^ (codes >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
            codes += getattr(amounts, field.name).astype(np.uint64)
    number_of = np.unique(codes, return_inverse=True)[1].reshape(-1)
    order = np.argsort(number_of, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(number_of[order])) + 1)
