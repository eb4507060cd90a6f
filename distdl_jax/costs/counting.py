"""What all workers do in an action of a plan, added to their amounts: of workers that do the same, one is asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from distdl_jax.costs.amounts import Amounts, Index
from distdl_jax.costs.step_program import step_events
from distdl_jax.costs.traffic import as_index, traffic
from distdl_jax.plans.alike import ByClass, OnGrids, parts_of
from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.primitives.block_checks import is_differentiable
from distdl_jax.primitives.halo_exchange import RangesPlan
from distdl_jax.primitives.plan import PARAMS, Action, Computes, Moves
from distdl_jax.primitives.repartition import RepartitionPlan

Group = tuple[int, Index]
"""A worker, and all workers that do the same."""


def count_action(amounts: Amounts, action: Action, backward: bool) -> None:
    """Add what all workers do in an action, in a step without or with gradients of the parameters."""
    several: Iterable[Group]
    if isinstance(action, Moves):
        movement = action.movement
        if isinstance(movement, RepartitionPlan | RangesPlan):
            amounts.count_messages("forward", *traffic(movement))
            if backward and action.of & PARAMS and is_differentiable(movement.dtype):
                amounts.count_messages("backward", *traffic(movement, adjoint=True))
            return
        several = ((workers[0], as_index(workers)) for workers in movement.alike)
    elif isinstance(action, Computes) and action.alike is not None:
        several = groups(action.alike)
    else:
        several = ((worker, worker) for worker in range(len(amounts.flops_forward)))
    for worker, workers in several:
        for event in step_events((action,), worker, backward=backward):
            amounts.count(event, workers)


def groups(values: Mapping[int, Any]) -> Iterator[Group]:
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


@lru_cache(maxsize=64)
def _classes(ranks: Workers, labels: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    """Return the workers of each class, in the order of their first cells."""
    of_cell = np.zeros(1, np.int64)
    for along in labels:
        of_cell = np.add.outer(of_cell * (max(along) + 1), along).ravel()
    order = np.argsort(of_cell, kind="stable")
    bounds = np.flatnonzero(np.diff(of_cell[order])) + 1
    cells = sorted(np.split(order, bounds), key=lambda several: several[0])
    world_ranks = np.asarray(ranks)
    return [world_ranks[several] for several in cells]
