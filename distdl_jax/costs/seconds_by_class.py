"""The steps of a play for very many workers: of workers that do the same, one is asked how long it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from distdl_jax.costs.amounts import mixed
from distdl_jax.costs.copies import bytes_copied
from distdl_jax.costs.counting import Group, groups_of_action
from distdl_jax.costs.links import MachineLinks
from distdl_jax.costs.play import Met, Own, Step, Together
from distdl_jax.costs.step_program import backward_events, forward_events
from distdl_jax.costs.traffic import traffic
from distdl_jax.plans.work import Work
from distdl_jax.primitives.halo_exchange import RangesPlan
from distdl_jax.primitives.plan import Action, Moves
from distdl_jax.primitives.repartition import RepartitionPlan


def steps_by_class(links: MachineLinks, action: Action, row: int, backward: bool) -> Iterator[Step]:
    """Yield what all workers do in one direction of an action: their arithmetic and copies, and then their messages."""
    computing, moving = np.zeros(links.workers), np.zeros(links.workers)
    busy = min(links.workers, links.machine.workers_per_host)
    for worker, workers in _groups(action, links.workers, backward):
        operations = []
        for event in backward_events(action, worker) if backward else forward_events(action, worker):
            if isinstance(event.does, Work):
                computing[workers] += links.one_work_seconds(event.does, event.direction, busy)
            else:
                operations.append(event.does)
                moving[workers] += links.operation_seconds(worker, event.does)
        copied = np.array([bytes_copied(action, worker, operations, backward)])
        computing[workers] += links.copy_seconds(copied)[0]
    if computing.any():
        yield Own(row, computing)
    if moving.any():
        yield Together(row, moving)


def alike_in(steps: Sequence[Step]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first worker of each class that takes the same time in all steps, and the number of each worker's."""
    codes = mixed(step.seconds.view(np.uint64) for step in steps if not isinstance(step, Met))
    _, first, number_of = np.unique(codes, return_index=True, return_inverse=True)
    return first, number_of.reshape(-1)


def on_classes(steps: Sequence[Step], first: np.ndarray, slower: float) -> list[Step]:
    """Return the steps of the workers `first` alone, with arithmetic so many times slower."""
    found: list[Step] = []
    for step in steps:
        assert not isinstance(step, Met)  # movements of very many workers are of the other kind
        factor = slower if isinstance(step, Own) and step.noisy else 1.0
        found.append(replace(step, seconds=factor * step.seconds[first]))
    return found


def _groups(action: Action, size: int, backward: bool) -> Iterator[Group]:
    """Yield a worker of each group that does the same in an action, and the group."""
    if not isinstance(action, Moves) or not isinstance(action.movement, RepartitionPlan | RangesPlan):
        yield from groups_of_action(action, size)
        return
    workers, messages, nbytes = traffic(action.movement, adjoint=backward)
    ranks = np.arange(size)[workers]
    _, number_of = np.unique(np.stack([messages, nbytes]), axis=1, return_inverse=True)
    order = np.argsort(number_of.reshape(-1), kind="stable")
    for several in np.split(order, np.flatnonzero(np.diff(number_of.reshape(-1)[order])) + 1):
        # One from the middle: the first is at an edge of the grid.
        yield int(ranks[several[len(several) // 2]]), ranks[several]
