"""What all workers do in an action of a plan, added to their amounts: of workers that do the same, one is asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from distdl_jax.costs.amounts import Amounts
from distdl_jax.costs.step_program import step_events
from distdl_jax.costs.traffic import traffic
from distdl_jax.plans.alike import ByClass
from distdl_jax.plans.worker_ranks import ConsecutiveRanks, Workers
from distdl_jax.primitives.block_checks import is_differentiable
from distdl_jax.primitives.plan import PARAMS, Action, Moves

Group = tuple[int, np.ndarray | int]
"""A worker, and all workers that do the same."""


def count_action(amounts: Amounts, action: Action, backward: bool) -> None:
    """Add what all workers do in an action, in a step without or with gradients of the parameters."""
    if isinstance(action, Moves):
        if (sent := traffic(action.movement)) is not None:
            amounts.count_messages("forward", *sent)
            if backward and action.of & PARAMS and is_differentiable(action.movement.dtype):
                back = traffic(action.movement, adjoint=True)
                amounts.count_messages("backward", *back)
            return
        several: Iterable[Group] = ((workers[0], _array(workers)) for workers in action.movement.alike)
    elif action.alike is not None:
        several = groups(action.alike)
    else:
        several = ((worker, worker) for worker in range(len(amounts.flops_forward)))
    for worker, workers in several:
        for event in step_events((action,), worker, backward=backward):
            amounts.count(event, workers)


def groups(values: Mapping[int, Any]) -> Iterator[Group]:
    """Yield a worker of each class of `values`, and all workers of it."""
    if isinstance(values, ByClass):
        yield from zip(values.representatives, _classes(values.ranks, values.labels), strict=True)
    else:
        yield from zip(values, values, strict=True)


@lru_cache(maxsize=64)
def _classes(ranks: Workers, labels: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    """Return the workers of each class, in the order of their first cells."""
    of_cell = np.zeros(1, np.int64)
    for along in labels:
        of_cell = np.add.outer(of_cell * (max(along) + 1), along).ravel()
    order = np.argsort(of_cell, kind="stable")
    bounds = np.flatnonzero(np.diff(of_cell[order])) + 1
    cells = sorted(np.split(order, bounds), key=lambda several: several[0])
    return [_array(ranks)[several] for several in cells]


def _array(workers: Workers) -> np.ndarray:
    is_range = isinstance(workers, ConsecutiveRanks)
    return np.arange(workers[0], workers[-1] + 1) if is_range else np.array(workers)
