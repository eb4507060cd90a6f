"""How much each worker stores, computes and sends: the numbers of a layer, or of a network, one entry a worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from distdl_jax.plans.alike import ByClass, OnGrids, parts_of
from distdl_jax.plans.work import Work
from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.primitives.block_checks import is_differentiable
from distdl_jax.primitives.halo_exchange import RangesPlan
from distdl_jax.primitives.plan import PARAMS, Action, Computes, Moves
from distdl_jax.primitives.repartition import RepartitionPlan
from distdl_jax.tools.cost.events import Event, step_events
from distdl_jax.tools.cost.traffic import as_index, traffic

Index = np.ndarray | slice | int
"""Workers, as an index of arrays with an entry for each worker."""


@dataclass
class Amounts:
    """Numbers of one training step: arrays of integers with an entry for each worker, by world rank.

    Bytes:

    - `parameters`, `gradients`, `optimiser`: of the parameters, their gradients, and what the optimiser stores.
    - `bytes_forward`, `bytes_backward`: in messages that the worker sends.
    - `team_bytes_forward`, `team_bytes_backward`: that it hands to collective operations.
    - `memory_traffic`: that arithmetic reads and writes in memory, each array once where it is read or written.

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
    memory_traffic: np.ndarray

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

    def count(self, action: Action, backward: bool) -> None:
        """Add what all workers do in an action, in a step without or with gradients of the parameters."""
        if isinstance(action, Moves) and isinstance(action.movement, RepartitionPlan | RangesPlan):
            movement = action.movement
            self._count_messages("forward", *traffic(movement))
            if backward and action.of & PARAMS and is_differentiable(movement.dtype):
                self._count_messages("backward", *traffic(movement, adjoint=True))
            return
        for worker, workers in _groups_of_action(action, len(self.parameters)):
            for event in step_events((action,), worker, backward=backward):
                self._count_event(event, workers)

    def _count_event(self, event: Event, workers: Index) -> None:
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

    def _count_messages(self, back: str, workers: Index, messages: np.ndarray, nbytes: np.ndarray) -> None:
        """Add messages that each of `workers` sends "forward", or "backward"."""
        getattr(self, f"messages_{back}")[workers] += messages
        getattr(self, f"bytes_{back}")[workers] += nbytes

    def _count_work(self, event: Event, work: Work, workers: Index) -> None:
        self.memory_traffic[workers] += work.read + work.written
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
    def operations(self) -> np.ndarray:
        """All messages sent, and all collective operations."""
        return self.messages + self.collectives_forward + self.collectives_backward

    @property
    def bytes(self) -> np.ndarray:
        """All bytes sent in messages, and handed to collective operations."""
        in_messages = self.bytes_forward + self.bytes_backward
        return in_messages + self.team_bytes_forward + self.team_bytes_backward


def alike(several: Sequence[Amounts]) -> Iterator[np.ndarray]:
    """Yield the workers whose amounts are the same in each of several layers."""
    codes = np.zeros(1, np.uint64)  # workers have the same one if all numbers are the same; others, but once in 2^64
    for array in (getattr(amounts, field.name) for amounts in several for field in fields(amounts)):
        codes = (codes ^ (codes >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + array.astype(np.uint64)
    yield from _same(np.unique(codes, return_inverse=True)[1].reshape(-1))


def groups(values: Mapping[int, Any]) -> Iterator[tuple[int, Index]]:
    """Yield a worker of each class of `values`, and all workers of it."""
    if not isinstance(values, ByClass | OnGrids):
        yield from zip(values, values, strict=True)
        return
    parts = parts_of(values)
    seen = np.zeros(max(values.workers) + 1, bool)
    for part in parts:
        for workers in _classes(part.ranks, part.labels):
            new = workers if part is parts[0] else workers[~seen[workers]]
            if new.size:
                yield int(new[0]), new
        if part is not parts[-1]:
            seen[as_index(part.ranks)] = True


def _groups_of_action(action: Action, size: int) -> Iterable[tuple[int, Index]]:
    """Return a worker of each group of workers that do the same in an action, and the group; else each by itself."""
    if isinstance(action, Moves):
        return ((workers[0], as_index(workers)) for workers in action.movement.alike)
    if isinstance(action, Computes) and action.alike is not None:
        return groups(action.alike)
    return ((worker, worker) for worker in range(size))


@lru_cache(maxsize=64)
def _classes(ranks: Workers, labels: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    """Return the workers of each class, in the order of their first cells."""
    of_cell = np.zeros(1, np.int64)
    for along in labels:
        of_cell = np.add.outer(of_cell * (max(along) + 1), along).ravel()
    cells = sorted(_same(of_cell), key=lambda several: several[0])
    world_ranks = np.asarray(ranks)
    return [world_ranks[several] for several in cells]


def _same(codes: np.ndarray) -> list[np.ndarray]:
    """Return the places of each code."""
    order = np.argsort(codes, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)
