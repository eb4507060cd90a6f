"""Fourier transforms along a dimension that two workers share, by one butterfly between them: no pencils.

XLA transforms along trailing dimensions, and transposes for others. So pencils along a dimension that is not the last
are transposed twice, which takes longer than their transform. Decimation in frequency leaves every dimension where it
is: with x_0 and x_1 the halves of n elements and w = exp(-2 pi i / n), the even frequencies are the transform of
x_0 + x_1 and the odd ones that of (x_0 - x_1) w^j. Each worker gets the other's half, has one local transform along all
dimensions at once, and gives half of its frequencies away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.backends.base import Workers, World
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.plan import Plan, ShapeDtypes
from distdl_jax.primitives.repartition import RepartitionPlan
from distdl_jax.spectral.lines import AT_ONCE, as_complex, as_real


@dataclass(frozen=True)
class DecimationPlan(Plan):
    """The plan of a transform along `axes`, of which `axis` is split in two.

    - `grid`: the blocks of x, and of the result.
    - `other`: the movement of each half to the worker that has the other one.
    - `sorting`: that of the frequencies, which are every other one before: its tensors have `axis` in two dimensions,
      of pairs and of which of a pair.
    """

    grid: ProductGrid
    axes: tuple[int, ...]
    axis: int
    inverse: bool
    norm: str | None
    other: RepartitionPlan
    sorting: RepartitionPlan
    held: ShapeDtypes = field(hash=False)

    @cached_property
    def workers(self) -> Workers:
        return tuple(sorted(self.held))

    def output(self, worker: int) -> ShapeDtype:
        return self.held[worker]

    def run(self, world: World, x: Array) -> Array:
        """This worker's block of the frequencies, of which `x` is its block of the data."""
        mine = self.held[world.rank]
        theirs = self.other.run(world, x)
        x, theirs = (half.astype(as_real(np.dtype(half.dtype))) for half in (x, theirs))
        odd = self.grid.index(self.grid.cell_of[world.rank])[self.axis]
        x = (theirs - x) * self._roots(mine) if odd else x + theirs
        transform = jnp.fft.ifftn if self.inverse else jnp.fft.fftn
        x = transform(x, axes=self.axes, norm=self.norm)
        every_other = x.reshape(*mine.shape[: self.axis + 1], 1, *mine.shape[self.axis + 1 :])
        return self.sorting.run(world, self._scaled(every_other)).reshape(mine.shape).astype(mine.dtype)

    def _roots(self, mine: ShapeDtype) -> np.ndarray:
        """w^j for the elements j of a half, along `axis`."""
        half = mine.shape[self.axis]
        turns = np.arange(half) / (2 * half)
        roots = np.exp((2j if self.inverse else -2j) * np.pi * turns).astype(mine.dtype)
        return roots.reshape(-1, *(1,) * (len(mine.shape) - self.axis - 1))

    def _scaled(self, x: Array) -> Array:
        """The local transform is one of half the length."""
        if self.norm == "ortho":
            return x * np.asarray(np.sqrt(0.5), x.real.dtype)
        return x * np.asarray(0.5, x.real.dtype) if self.inverse != (self.norm == "forward") else x


def plan_decimation(
    held: ShapeDtypes, grid: ProductGrid, dtype: np.dtype, axes: Sequence[int], *, inverse: bool, norm: str | None
) -> DecimationPlan | None:
    """The plan for data of `dtype` on `grid`; None where this is not the faster way, or none at all.

    It moves half as much again as pencils do. It pays where `axes`, ascending, are the last dimensions, so that nothing
    has to be transposed, and one of them, not the last, is split in two halves of an even length.
    """
    dims = len(grid.shape)
    split = [a for a in axes if grid.shape[a] > 1]
    if len(split) != 1 or not 2 <= len(axes) <= AT_ONCE or list(axes) != list(range(dims - len(axes), dims)):
        return None
    axis = split[0]
    n, blocks = grid.extent[axis], grid.ranges[axis]
    halves = ((0, n // 2), (n // 2, n))
    if axis == dims - 1 or n % 4 or blocks != halves or 0 in grid.extent or not _is_full(grid):
        return None
    exchanged = ProductGrid(tuple(np.flip(np.reshape(grid.ranks, grid.shape), axis).ravel().tolist()), grid.ranges)
    other = RepartitionPlan("repartition", held, dtype, Exchange(grid, exchanged), True)
    found = as_complex(dtype)
    every_other = {w: ShapeDtype((*its.shape[: axis + 1], 1, *its.shape[axis + 1 :]), found) for w, its in held.items()}
    before, after = grid.ranges[:axis], grid.ranges[axis + 1 :]
    pairs, quarter = (0, n // 2), n // 4
    odd_or_even = ProductGrid(grid.ranks, (*before, (pairs,), ((0, 1), (1, 2)), *after))
    in_order = ProductGrid(grid.ranks, (*before, ((0, quarter), (quarter, n // 2)), ((0, 2),), *after))
    sorting = RepartitionPlan("repartition", every_other, found, Exchange(odd_or_even, in_order), True)
    results = {worker: ShapeDtype(its.shape, found) for worker, its in held.items()}
    return DecimationPlan(grid, tuple(axes), axis, inverse, norm, other, sorting, results)


def _is_full(grid: ProductGrid) -> bool:
    """Whether every worker has elements."""
    return all(start < stop for ranges in grid.ranges for start, stop in ranges)
