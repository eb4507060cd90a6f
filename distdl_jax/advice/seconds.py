"""How long the slowest worker takes for a layer, or for a repartition, on a machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distdl_jax.advice.graph import Shape
from distdl_jax.costs.step_program import step_events
from distdl_jax.costs.traffic import repartition_counts
from distdl_jax.machine.machine import Direction, Machine
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.work import Work, optimiser_update
from distdl_jax.plans.worker_ranks import worker_ranks
from distdl_jax.primitives.plan import Action
from distdl_jax.programs.ir import Operation

ALL_COUNT = 16
"""Up to so many workers, all of them are looked at; of more, the first, the last, and one inside."""


@dataclass(frozen=True)
class Stopwatch:
    """The times of a machine, for data of `dtype`."""

    machine: Machine
    dtype: np.dtype
    _known: dict[Any, float] = field(default_factory=dict, compare=False)

    def layer(self, actions: Sequence[Action], grid: Shape, differentiates_x: bool) -> float:
        """Return the seconds of the slowest worker in the actions of one layer on a grid of workers from 0 on.

        - `differentiates_x`: whether the gradient of the layer's input is computed.
        """
        size = math.prod(grid)
        busy = min(size, self.machine.workers_per_host)
        return max(
            sum(
                self._work(event.does, event.direction, busy)
                if isinstance(event.does, Work)
                else self._operation(event.does, worker, size)
                for event in step_events(actions, worker, x_has_gradient=differentiates_x)
            )
            for worker in looked_at(grid)
        )

    def update(self, shape: Shape, copies: int, workers: int) -> float:
        """Return the seconds of the optimiser on a parameter of a shape, of which it stores `copies` arrays like it."""
        work = optimiser_update(shape, self.dtype.itemsize, copies)
        return self._work(work, "forward", min(workers, self.machine.workers_per_host))

    def repartition(self, shape: Shape, grid: Shape, other: Shape) -> float:
        """Return the seconds of the slowest worker in a repartition, or in its adjoint: the same messages in reverse.

        A worker sends and receives at once, messages of its mean size.
        """
        if grid == other:
            return 0.0
        grids = [ProductGrid.balanced(shape, each, worker_ranks(range(math.prod(each)))) for each in (grid, other)]
        level, pairs = self._level_among(max(math.prod(grid), math.prod(other)))
        longest = 0.0
        for one, two in (grids, grids[::-1]):  # what is sent there, and what is received, as if sent back
            messages, elements = repartition_counts(one, two)
            nbytes = elements * self.dtype.itemsize
            seconds = messages * self.machine.message_seconds(nbytes / np.maximum(messages, 1), level, pairs)
            longest = max(longest, float(np.max(seconds + self.machine.copy_seconds(nbytes))))
        return longest

    def collective(self, kind: str, size: int, nbytes: int, hosts: int) -> float:
        """Return the seconds of a collective operation."""
        key = kind, size, nbytes, hosts
        if key not in self._known:
            self._known[key] = float(self.machine.collective_seconds(*key))
        return self._known[key]

    def message(self, nbytes: float, level: str, pairs: int) -> float:
        """Return the seconds of a message."""
        key = nbytes, level, pairs
        if key not in self._known:
            self._known[key] = float(self.machine.message_seconds(*key))
        return self._known[key]

    def _work(self, work: Work, direction: Direction, busy: int) -> float:
        return self.machine.work_seconds(work, direction, self.dtype.name, busy)

    def _operation(self, operation: Operation, worker: int, size: int) -> float:
        if not operation.is_message:
            team = np.asarray(operation.team)
            hosts = len(np.unique(team // self.machine.workers_per_host))
            return self.collective(operation.kind, len(team), operation.bytes_sent, hosts)
        received = operation.received * operation.itemsize if operation.source is not None else 0
        ends = ((operation.dest, operation.bytes_sent), (operation.source, received))
        seconds = [self._message(worker, end, nbytes, size) for end, nbytes in ends if end is not None]
        copied = self.machine.copy_seconds(operation.bytes_sent + received)
        return max(seconds, default=self.machine.operation_seconds) + float(copied)

    def _message(self, worker: int, partner: int, nbytes: int, size: int) -> float:
        """Return the seconds of a message; all workers of a host send as far at once, those near the end to others."""
        level, per_host = self.machine.level_of(worker, partner), self.machine.workers_per_host
        pairs = min(size, per_host, abs(worker - partner) if level == "network" else per_host)
        return self.message(nbytes, level, pairs)

    def _level_among(self, workers: int) -> tuple[str, int]:
        """Return how far apart the first workers are, and how many of a host send at once."""
        per_host = self.machine.workers_per_host
        return ("network" if workers > per_host else "host"), min(workers, per_host)


def looked_at(grid: Shape) -> Iterable[int]:
    """Return the ranks on a grid among which the slowest worker is looked for."""
    size = math.prod(grid)
    if size <= ALL_COUNT:
        return range(size)
    inside = [min(2, p // 2) for p in grid]
    return sorted({0, size - 1, int(np.ravel_multi_index(inside, grid))})
