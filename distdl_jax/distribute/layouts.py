"""Layouts: which axes of the mesh cut which dimensions of a value, and the mesh, a common refinement of all grids.

A *cut* has, for each dimension of a value, the axes of the mesh that cut it into balanced blocks, the slowest first. An
axis cuts at most one dimension. Along axes that cut none, workers hold copies, or the terms of a *pending* sum. A
layout holds no ranges: blocks are balanced again after each operation, so that all workers know all layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from distdl_jax.errors import PlanError
from distdl_jax.partitions.partition import CartesianPartition, Partition
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.decomposition import Box, ProductGrid, box_shape
from distdl_jax.transports.world import Workers

Axes = tuple[int, ...]
Cut = tuple[Axes, ...]


def uncut(shape: Sequence[int]) -> Cut:
    """Return the cut of a whole value."""
    return ((),) * len(shape)


def trimmed(cut: Iterable[Sequence[int]], shape: Sequence[int]) -> Cut:
    """Return a cut without axes along dimensions of length 1, which are never cut."""
    return tuple(tuple(axes) if n != 1 else () for axes, n in zip(cut, shape, strict=True))


def axes_in(cut: Iterable[Sequence[int]]) -> set[int]:
    """Return the axes that cut a dimension."""
    return {axis for axes in cut for axis in axes}


class Layout(NamedTuple):
    """How a body of a loop or branch takes, or returns, a value; see `Tensor` for its fields."""

    cut: Cut
    pending: frozenset[int] = frozenset()
    is_exact: bool = False


def grown(shape: Sequence[int], cut: Cut, more: Cut) -> Cut:
    """Return `cut` with those cuts of `more` for which both the dimension and the axes are free."""
    used, result = axes_in(cut), list(cut)
    for d, axes in enumerate(more):
        if axes and not result[d] and not used & set(axes):
            result[d] = axes
            used |= set(axes)
    return trimmed(result, shape)


class Mesh:
    """The workers of all specs on one grid, whose axes are a common refinement of the specs' grids.

    - `shape`: the number of workers along each axis; axes of one worker are left out.
    - `ranks`: the world ranks, in an array of that shape.
    - `index`: this worker's place; None outside. `partitions`: the specs' ones.
    """

    def __init__(self, partitions: Sequence[Partition]) -> None:
        first = partitions[0]
        self.P, self.world = first, first.world
        for P in partitions:
            if P.world is not self.world or set(P.ranks) != set(first.ranks):
                raise PlanError(
                    f"All specs of a distributed function must have the same workers, but {first.describe()} and "
                    f"{P.describe()} have not."
                )
        lengths = {1, first.size}
        for P in partitions:
            if tuple(P.ranks) == tuple(first.ranks):
                lengths.update(np.cumprod(P.shape).tolist())
        ordered = sorted(lengths)
        if any(after % before for before, after in pairwise(ordered)):
            self._refuse(partitions)
        self.shape: tuple[int, ...] = tuple(after // before for before, after in pairwise(ordered))
        # Both are row-major: the first axis of the mesh is the slowest.
        self.ranks = np.reshape(np.asarray(first.ranks), self.shape)
        found = np.argwhere(self.ranks == self.world.rank)
        self.index = tuple(map(int, found[0])) if len(found) else None
        self.partitions = tuple(dict.fromkeys(partitions))
        self._axes_of = {P: self._along(P, partitions) for P in self.partitions}
        self._grids: dict[tuple[Cut, tuple[int, ...]], ProductGrid] = {}

    def _refuse(self, partitions: Sequence[Partition]) -> None:
        described = dict.fromkeys(P.describe() for P in partitions)
        raise PlanError(
            f"The grids {' and '.join(described)} have no common refinement, so one distributed function can't use "
            "them all. Grids of 2 x 2 and of 4 workers have one, 2 x 3 and 3 x 2 have not."
        )

    def _along(self, P: Partition, partitions: Sequence[Partition]) -> tuple[Axes, ...]:
        """Return the axes of the mesh along each dimension of a grid: its index is their mixed-radix number."""
        places = np.empty(max(P.ranks) + 1, int)
        places[np.asarray(P.ranks)] = np.arange(P.size)
        indices = np.unravel_index(places[self.ranks], P.shape)
        result = []
        for index in indices:
            steps = [int(np.diff(index, axis=a).ravel()[0]) for a in range(len(self.shape))]
            axes = tuple(sorted((a for a, step in enumerate(steps) if step), key=lambda a: -steps[a]))
            number = np.zeros((), int)
            for a in axes:
                along = np.arange(self.shape[a]).reshape([-1 if a == b else 1 for b in range(len(self.shape))])
                number = number * self.shape[a] + along
            if not np.array_equal(np.broadcast_to(number, self.shape), index):
                self._refuse(partitions)
            result.append(axes)
        return tuple(result)

    @cached_property
    def axes(self) -> frozenset[int]:
        """All axes."""
        return frozenset(range(len(self.shape)))

    def size(self, axes: Iterable[int]) -> int:
        """Return the number of blocks into which `axes` cut a dimension."""
        return math.prod(self.shape[a] for a in axes)

    def raw_cut_of(self, spec: TensorSpec) -> Cut:
        """Return the cut that a spec describes, dimensions of length 1 included."""
        P = spec.partition
        if len(spec.replicated) == P.dim:
            return uncut(spec.global_shape)
        return tuple(axes for d, axes in enumerate(self._axes_of[P]) if d not in spec.replicated)

    def spec_of(self, shape: Sequence[int], cut: Cut) -> TensorSpec:
        """Return the spec of a value, on the mesh with its axes in another order: any cut is one."""
        rest = sorted(self.axes - axes_in(cut))
        order = [*(a for axes in cut for a in axes), *rest]
        grid = [*(self.size(axes) for axes in cut), *(self.shape[a] for a in rest)] or [1]
        ranks = np.transpose(self.ranks, order).ravel().tolist()
        return TensorSpec(shape, self.P.grid(grid, self._places(ranks)), replicated=tuple(range(len(cut), len(grid))))

    def _places(self, ranks: Sequence[int]) -> list[int]:
        place_of = {rank: place for place, rank in enumerate(self.P.ranks)}
        return [place_of[rank] for rank in ranks]

    # --- the workers that share a value with this one -----------------------------------------------------------------

    def _line(self, axes: Sequence[int]) -> list[int]:
        """Return the workers that differ from this one along `axes` only, row-major with these in their order."""
        assert self.index is not None
        own = self.ranks[tuple(slice(None) if a in axes else i for a, i in enumerate(self.index))]
        return [int(rank) for rank in np.transpose(own, [sorted(axes).index(a) for a in axes]).ravel()]

    def team(self, axes: Iterable[int]) -> Workers:
        """Return the workers that differ from this one along `axes` only, sorted."""
        return tuple(sorted(self._line(tuple(axes))))

    def grid(self, cut: Cut, shape: Sequence[int]) -> ProductGrid:
        """Return the blocks of a value on the workers that share it with this one."""
        key = cut, tuple(shape)
        if key not in self._grids:
            ranks = self._line([a for axes in cut for a in axes])
            self._grids[key] = ProductGrid.balanced(shape, [self.size(axes) for axes in cut], ranks)
        return self._grids[key]

    def partition(self, cut: Cut) -> CartesianPartition:
        """Return the workers of `grid` as a partition."""
        ranks = self._line([a for axes in cut for a in axes])
        return self.P.grid([self.size(axes) for axes in cut], self._places(ranks))

    def place(self, cut: Cut, shape: Sequence[int], d: int) -> int:
        """Return the number of this worker's block along dimension `d`."""
        grid = self.grid(cut, shape)
        return grid.index(grid.cell_of[self.world.rank])[d]

    def box(self, cut: Cut, shape: Sequence[int]) -> Box:
        """Return the ranges of this worker's block."""
        if not any(cut):
            return tuple((0, n) for n in shape)
        grid = self.grid(cut, shape)
        return grid.box(grid.cell_of[self.world.rank])

    def block_shape(self, cut: Cut, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this worker's block."""
        return box_shape(self.box(cut, shape))

    def is_first(self, axes: Iterable[int]) -> bool:
        """Say whether this worker is the first along `axes`: of copies, its own counts in a sum."""
        assert self.index is not None
        return not any(self.index[a] for a in axes)
