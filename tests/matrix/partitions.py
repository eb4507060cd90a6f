"""Partitions as the matrix writes them down, and the shapes of the blocks on them."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

import distdl_jax as dj

Shape = tuple[int, ...]


class On(NamedTuple):
    """A partition: its shape, and the world ranks of its workers in order."""

    shape: Shape
    ranks: tuple[int, ...]

    @property
    def grid(self) -> np.ndarray:
        return np.reshape(self.ranks, self.shape)

    def partition(self, world: dj.Partition) -> dj.CartesianPartition:
        return world.grid(self.shape, self.ranks)

    def boxes(self, ranges: Sequence[Sequence[tuple[int, int]]]) -> dict[int, tuple[slice, ...]]:
        """Return each worker's part of an array, from the ranges along each dimension."""
        return self.by_worker([[slice(*side) for side in line] for line in ranges])

    def by_worker(self, lines: Sequence[Sequence[Any]]) -> dict[int, tuple[Any, ...]]:
        """Return each worker's entries, from what each index along a dimension has."""
        return {
            worker: tuple(line[i] for line, i in zip(lines, index, strict=True))
            for index, worker in np.ndenumerate(self.grid)
        }

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))}@{','.join(map(str, self.ranks))}"


def on(*shape: int, ranks: Sequence[int] | None = None) -> On:
    """A partition of `shape`; by default of the first workers of the world."""
    return On(shape, tuple(range(prod(shape)) if ranks is None else ranks))


def blocks(P: On, *sizes: int | Sequence[int], world: int = 4, elsewhere: Shape = (0,)) -> tuple[Shape, ...]:
    """The shape of each worker's block: per dimension a length, cut evenly, or the lengths of the blocks."""
    lines = [
        [len(part) for part in np.array_split(np.arange(n), p)] if isinstance(n, int) else list(n)
        for n, p in zip(sizes, P.shape, strict=True)
    ]
    own = P.by_worker(lines)
    return tuple(own.get(worker, elsewhere) for worker in range(world))


def block_shapes(P: On, shapes: Shape | Mapping[int, Shape], world: int) -> tuple[Shape, ...]:
    """The shape of each worker's block, where it is the same for all of P, or given by worker."""
    given = shapes if isinstance(shapes, Mapping) else dict.fromkeys(P.ranks, shapes)
    return tuple(given[worker] if worker in P.ranks else (0,) for worker in range(world))
