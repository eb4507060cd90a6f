"""Fourier transforms along a dimension that two workers share, by one butterfly between them: no pencils.

XLA transforms along trailing dimensions, and transposes for others. So pencils along a dimension that is not the last
are transposed twice, which takes longer than their transform. Here every dimension stays where it is.

- Forward, by decimation in time: one worker gets the even elements and the other one the odd ones; each transforms its
  own, E and O, along all dimensions at once; then, with w = exp(-2 pi i / n), the frequencies k of the first half are
  E_k + w^k O_k, and those of the second half are E_k - w^k O_k.
- Backward, by decimation in frequency, the same in reverse: the even elements come of X_0 + X_1, where X_0 and X_1 are
  the halves of the frequencies, and the odd ones of (X_0 - X_1) w^-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.plans.decomposition import ProductGrid, Range, box_shape
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.plan import Plan, ShapeDtypes
from distdl_jax.primitives.repartition import RepartitionPlan
from distdl_jax.spectral.local_fft import AT_ONCE, as_complex, as_real, real_part
from distdl_jax.world import Workers, World

Kind = Literal["fft", "ifft", "rfft", "irfft"]


@dataclass(frozen=True)
class DecimationPlan(Plan):
    """The plan of a transform along `axes`, of which `axis` is split in two.

    - `second`: the workers that hold the second half, and between the movements the odd elements.
    - `sizes`: how long a worker's block is along `axes` where it holds data, not frequencies.
    - `sorting`: the movement between halves, and even and odd elements. Its tensors have two dimensions for `axis`: the
      pairs, and which of a pair.
    - `other`: the movement of each worker's frequencies to the one that shares `axis` with it.
    """

    kind: Kind
    axes: tuple[int, ...]
    axis: int
    norm: str | None
    second: frozenset[int]
    sizes: tuple[int, ...]
    sorting: RepartitionPlan
    other: RepartitionPlan
    held: ShapeDtypes = field(hash=False)

    @cached_property
    def workers(self) -> Workers:
        return tuple(sorted(self.held))

    def output(self, worker: int) -> ShapeDtype:
        return self.held[worker]

    def run(self, world: World, x: Array) -> Array:
        """What this worker, which holds `x`, holds afterwards."""
        second, dtype = world.rank in self.second, self.held[world.rank].dtype
        if self.kind in ("fft", "rfft"):
            x = self._sorted(world, x)
            x = x.astype(as_real(np.dtype(x.dtype)))
            x = getattr(jnp.fft, self.kind + "n")(x, axes=self.axes, norm=self.norm)
            theirs, roots = self.other.run(world, x), self._roots(x)
            return self._scaled(theirs - x * roots if second else x + theirs * roots).astype(dtype)
        theirs = self.other.run(world, x)
        x, theirs = (half.astype(as_complex(np.dtype(half.dtype))) for half in (x, theirs))
        x = self._scaled((theirs - x) * self._roots(x) if second else x + theirs)
        x = getattr(jnp.fft, self.kind + "n")(x, self.sizes, self.axes, self.norm)
        return self._sorted(world, x).astype(dtype)

    def _sorted(self, world: World, x: Array) -> Array:
        there, back = self.sorting.inputs[world.rank].shape, x.shape
        return self.sorting.run(world, x.reshape(there)).reshape(back)

    def _roots(self, x: Array) -> np.ndarray:
        """w^k for the frequencies k of `x`, a half, along `axis`; backward w^-k."""
        half = x.shape[self.axis]
        turns = np.arange(half) / (2 * half)
        roots = np.exp((-2j if self.kind in ("fft", "rfft") else 2j) * np.pi * turns).astype(x.dtype)
        return roots.reshape(-1, *(1,) * (x.ndim - self.axis - 1))

    def _scaled(self, x: Array) -> Array:
        """The local transform is one of half the length."""
        if self.norm == "ortho":
            return x * np.asarray(np.sqrt(0.5), x.real.dtype)
        halved = (self.norm == "forward") == (self.kind in ("fft", "rfft"))
        return x * np.asarray(0.5, x.real.dtype) if halved else x


def plan_decimation(
    kind: Kind,
    grid: ProductGrid,
    dtype: np.dtype,
    axes: Sequence[int],
    last: int | None,
    norm: str | None,
) -> DecimationPlan | None:
    """The plan for data of `dtype` on `grid`; None where this is not the faster way, or none at all.

    It moves half as much again as pencils do. It pays where `axes`, ascending, are the last dimensions, so that nothing
    has to be transposed, and one of them, not the last, is split in two halves of an even length. `last` is how long
    the last dimension is afterwards.
    """
    dims = len(grid.shape)
    split = [a for a in axes if grid.shape[a] > 1]
    if (
        last is None
        or len(split) != 1
        or not 2 <= len(axes) <= AT_ONCE
        or list(axes) != list(range(dims - len(axes), dims))
    ):
        return None
    axis, n = split[0], grid.extent[split[0]]
    halves = ((0, n // 2), (n // 2, n))
    if axis == dims - 1 or n % 4 or grid.ranges[axis] != halves:
        return None
    if any(start == stop for ranges in grid.ranges for start, stop in ranges):
        return None
    result = ProductGrid(grid.ranks, (*grid.ranges[:-1], ((0, last),)))
    forward, found = kind in ("fft", "rfft"), real_part(dtype) if kind == "irfft" else as_complex(dtype)
    ranks = np.reshape(grid.ranks, grid.shape)
    exchanged = ProductGrid(tuple(np.flip(ranks, axis).ravel().tolist()), (result if forward else grid).ranges)
    frequencies = ProductGrid(grid.ranks, exchanged.ranges)
    data, of_data = (grid, dtype) if forward else (result, found)
    in_order = _in_pairs(data, axis, ((0, n // 4), (n // 4, n // 2)), ((0, 2),))
    even_and_odd = _in_pairs(data, axis, ((0, n // 2),), ((0, 1), (1, 2)))
    sorting = (in_order, even_and_odd) if forward else (even_and_odd, in_order)
    lengths = _held(data, of_data)[grid.ranks[0]].shape
    return DecimationPlan(
        kind,
        tuple(axes),
        axis,
        norm,
        frozenset(np.take(ranks, 1, axis).ravel().tolist()),
        tuple(lengths[a] for a in axes),
        _movement(sorting[0], sorting[1], of_data),
        _movement(frequencies, exchanged, found if forward else dtype),
        _held(result, found),
    )


def _in_pairs(grid: ProductGrid, axis: int, pairs: tuple[Range, ...], which: tuple[Range, ...]) -> ProductGrid:
    """The blocks with `axis` in two dimensions."""
    return ProductGrid(grid.ranks, (*grid.ranges[:axis], pairs, which, *grid.ranges[axis + 1 :]))


def _held(grid: ProductGrid, dtype: np.dtype) -> dict[int, ShapeDtype]:
    """What the workers of a grid hold of a tensor of `dtype`."""
    return {worker: ShapeDtype(box_shape(grid.box(cell)), dtype) for worker, cell in grid.cell_of.items()}


def _movement(owned: ProductGrid, needed: ProductGrid, dtype: np.dtype) -> RepartitionPlan:
    return RepartitionPlan("repartition", _held(owned, dtype), dtype, Exchange(owned, needed), True)
