"""Plans of few workers that stand for those of many: what happens in the middle of a long row happens in a short one.

Along the batch and the features a worker of a convolution, or of a linear layer, meets its neighbours alone, and the
whole team in collective operations of the parameters. So the plan of three or five workers along each dimension, with
the largest blocks of the many, has the same messages for the worker inside, and teams of known shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distdl_jax.plans.decomposition import index_of, rank_of

Shape = tuple[int, ...]

LEAST_TEAM = 9
"""Teams of fewer workers send messages in place of collective operations."""

WIDE = 4
"""Blocks shorter than this may need more than their next neighbours."""


@dataclass(frozen=True)
class Stretch:
    """Workers on the grid `planned`, whose plan is made, for those on `grid`."""

    planned: Shape
    grid: Shape

    @classmethod
    def of(cls, grid: Shape, x_shape: Shape, feature_axis: int) -> Stretch:
        """Return the fewest workers that stand for those on a grid; all of them, where that is hardly more.

        - `feature_axis`: the dimension of the channels, of which every worker counts.
        """
        most = [p if d == feature_axis % len(grid) else 3 for d, p in enumerate(grid)]
        for d, (n, p) in enumerate(zip(x_shape, grid, strict=True)):
            if d != feature_axis % len(grid):
                most[d] = min(p, 3 if n >= WIDE * p else 5)
        others = [d for d in range(len(grid)) if d != feature_axis % len(grid)]
        while math.prod(most[d] for d in others) < min(LEAST_TEAM, math.prod(grid[d] for d in others)):
            most[max(others, key=lambda d: grid[d] - most[d])] += 1
        return cls(grid if 2 * math.prod(most) > math.prod(grid) else tuple(most), grid)

    def x_shape(self, x_shape: Shape) -> Shape:
        """Return the shape of a tensor on the planned workers with the largest blocks of the many."""
        return tuple(n if r == p else r * -(-n // p) for n, r, p in zip(x_shape, self.planned, self.grid, strict=True))

    def rank(self, rank: int) -> int:
        """Return which of the many a planned worker is: the one with its index, so neighbours are neighbours."""
        if self.planned == self.grid:
            return rank
        return rank_of(index_of(rank, self.planned), self.grid)

    def team(self, team: Sequence[int]) -> np.ndarray:
        """Return the ranks, of the many, of a team: all along the dimensions in which its members differ."""
        if self.planned == self.grid:
            return np.asarray(team)
        indices = np.array([index_of(rank, self.planned) for rank in team])
        along = [
            np.arange(p) if low < high else np.array([low])
            for p, low, high in zip(self.grid, indices.min(0), indices.max(0), strict=True)
        ]
        return np.ravel_multi_index(np.meshgrid(*along, indexing="ij"), self.grid).ravel()
