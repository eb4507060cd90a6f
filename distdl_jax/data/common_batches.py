"""What the workers that read batches have in common: the order of the samples, and the sizes of the batches.

A batch of another size, such as the last one of an epoch, changes the blocks of some workers only if its samples are
split: of 3 samples in place of 4, two workers hold 2 + 1 in place of 2 + 2. JAX would trace a function again on the
second worker alone, which would wait for the first. So the size is part of the key of JAX's caches, on all workers: for
functions of `dj.jit` that are called with such a batch, whenever that is; and for all functions, which may be called
with what was made of it, while it is an iterator's current one. These are then traced and compiled once more.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from jax import Array

from distdl_jax.errors import PlanError
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.planning import is_for_planning
from distdl_jax.tracing.cache_keys import batch_sizes, note_size
from distdl_jax.transports.world import World
from distdl_jax.validation import difference
from distdl_jax.watchdog.watch.status import WorkerStatus, worker_status


class Samples(NamedTuple):
    """The samples of one tensor of a batch: their number, and the number of workers among which they are split."""

    number: int
    workers: int


def agree_on_order(partitions: Iterable[Partition], terms: Mapping[str, Hashable]) -> None:
    """Raise `PlanError` on all workers of the partitions if one of them reads other batches; `terms` say which.

    Collective in all workers of `partitions`; without effect on others.
    """
    teams: dict[World, set[int]] = {}
    for P in partitions:
        teams.setdefault(P.world, set()).update(P.ranks)

    def decide(terms_of: dict[int, Mapping[str, Hashable]]) -> str | None:
        for name in terms:
            text = difference(f"{name} of dj.data.batches", {worker: its[name] for worker, its in terms_of.items()})
            if text is not None:
                return f"{text} Else they would join blocks of different samples."
        return None

    for world, team in teams.items():
        if world.rank not in team or len(team) == 1 or is_for_planning(world):
            continue
        problem = world.agree(tuple(sorted(team)), "the first batch of dj.data.batches", terms, decide)
        if problem is not None:
            raise PlanError(problem)


class CurrentSizes:
    """The sizes of one worker's current batches, and of earlier ones.

    The sizes a and b of batches that are split among p workers differ on all workers if they differ by p or more, and
    otherwise are equal on one: then the later one becomes part of the key.
    """

    def __init__(self) -> None:
        self._told_apart: dict[int, set[int]] = {}  # by the number of workers
        self._in_key: dict[ref[Any], tuple[int, ...]] = {}  # by iterator, also of ones that no longer exist

    def begin(self, usual: Iterable[Samples]) -> None:
        """Prepare for the first batch of an iterator, whose batches usually have these samples; forget ended ones."""
        self._distinguish(usual)
        if self._in_key:
            gc.collect()  # an abandoned iterator in a cycle of references would stay for longer on some workers
            self._in_key = {its: sizes for its, sizes in self._in_key.items() if its() is not None}
        self._set_key(None)

    def change(self, iterator: Any, batch: Collection[Samples] | None, arrays: Iterable[Array] = ()) -> None:
        """Record that an iterator's current batch has these samples, of these arrays; None at its end."""
        before, sizes = self._in_key.pop(ref(iterator), ()), self._distinguish(batch or ())
        for array, (number, workers) in zip(arrays, batch or (), strict=False):
            if workers > 1:
                note_size(array, number if number in sizes else None)
        if sizes:
            self._in_key[ref(iterator)] = sizes
        if before or self._in_key:
            self._set_key(batch)

    def _set_key(self, last: Collection[Samples] | None) -> None:
        """Put the sizes into the key, in this thread until they are set again.

        With them goes the batch that came last: a function may be called with those of several iterators.
        """
        sizes = tuple(sorted(self._in_key.values()))
        batch_sizes((sizes, last and tuple(sorted(set(last)))) if sizes else None).__enter__()

    def _distinguish(self, batch: Iterable[Samples]) -> tuple[int, ...]:
        """Return the sizes of a batch that have to be in the key."""
        sizes = []
        for number, workers in sorted({samples for samples in batch if samples.workers > 1}):
            known = self._told_apart.setdefault(workers, set())
            if all(abs(number - other) >= workers for other in known):
                known.add(number)
            elif number not in known:
                sizes.append(number)
        return tuple(sizes)


_sizes: WeakKeyDictionary[WorkerStatus, CurrentSizes] = WeakKeyDictionary()


def current_sizes() -> CurrentSizes:
    """Return those of the worker for which this thread acts."""
    return _sizes.setdefault(worker_status(), CurrentSizes())
