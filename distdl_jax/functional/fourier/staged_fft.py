"""Fourier transforms on several grids in sequence, with a movement between consecutive ones.

On each grid a worker transforms its block along dimensions that are whole on it: `Forward`, `Inverse`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.functional.box_exchange import joined_slices
from distdl_jax.functional.plan import BlocksPlan, ShapeDtypes
from distdl_jax.functional.repartition import RepartitionPlan
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.decomposition import ProductGrid, balanced_ranges, box_shape
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import World

AT_ONCE = 3
"""The number of dimensions that jax.numpy transforms in one call."""


def as_real(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which data of `dtype` is transformed: inexact, and single precision or more."""
    wide = accumulation_dtype(dtype)
    return wide if jnp.issubdtype(wide, jnp.inexact) else np.dtype(jnp.promote_types(wide, np.float32))


def as_complex(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the frequencies of data of `dtype`."""
    return np.dtype(jnp.promote_types(as_real(dtype), np.complex64))


def real_part(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the real parts of numbers of `dtype`, in which they are transformed."""
    return np.zeros(0, as_complex(dtype)).real.dtype


@dataclass(frozen=True)
class Transform(ABC):
    """The transform of each worker's block along some dimensions.

    - `sizes`: pairs of a dimension, and its length afterwards.
    - `halved`: the dimension, on this grid or another, with only the non-negative frequencies, of real data.
    - `before`: pairs of a dimension, and the length to which it is truncated, or zero-padded, at the end, before the
      transform: jnp's `n` and `s`.
    """

    sizes: tuple[tuple[int, int], ...]
    halved: int | None = None
    norm: str | None = None
    before: tuple[tuple[int, int], ...] = ()

    def lengths(self) -> dict[int, int]:
        """Return the lengths, afterwards, of the transformed dimensions, which are whole on each worker."""
        return dict(self.sizes)

    @abstractmethod
    def dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype of the result, for a block of `dtype`."""

    @abstractmethod
    def __call__(self, x: Array) -> Array:
        """Return the result, for a nonempty block."""

    def _resized(self, x: Array) -> Array:
        for axis, n in self.before:
            x = lax.slice_in_dim(x, 0, min(n, x.shape[axis]), axis=axis)
            x = jnp.pad(x, [(0, n - m if a == axis else 0) for a, m in enumerate(x.shape)])
        return x


@dataclass(frozen=True)
class Forward(Transform):
    """Frequencies along dimensions, of which the lowest are kept: 0, 1, ..., -2, -1."""

    def dtype(self, dtype: np.dtype) -> np.dtype:
        return as_complex(dtype)

    def __call__(self, x: Array) -> Array:
        x = self._resized(x).astype(as_real(np.dtype(x.dtype)))
        sizes = dict(self.sizes)
        axes = [a for a in sizes if a != self.halved]
        if self.halved in sizes and not jnp.iscomplexobj(x):
            others, axes = axes[: AT_ONCE - 1], axes[AT_ONCE - 1 :]
            x = jnp.fft.rfftn(x, axes=(*others, self.halved), norm=self.norm)
        elif self.halved in sizes:
            axes.append(self.halved)
        x = _at_once(jnp.fft.fftn, x, axes, self.norm)
        for a, n in self.sizes:
            x = lowest(x, a, n, from_0=a == self.halved)
        return x


@dataclass(frozen=True)
class Inverse(Transform):
    """The inverse from frequencies along dimensions, with zeros for those that were not kept.

    With `halved` the result is real; its length may use fewer frequencies than there are.

    - `last`: whether all other dimensions have been transformed before these.
    """

    last: bool = True

    def dtype(self, dtype: np.dtype) -> np.dtype:
        return real_part(dtype) if self.last and self.halved is not None else as_complex(dtype)

    def __call__(self, x: Array) -> Array:
        x = self._resized(x).astype(as_complex(np.dtype(x.dtype)))
        sizes = dict(self.sizes)
        axes = [a for a in sizes if a != self.halved]
        for a in axes:
            x = with_zeros(x, a, sizes[a])
        if self.halved in sizes and self.last:
            others, last = axes[AT_ONCE - 1 :], (*axes[: AT_ONCE - 1], self.halved)
            x = _at_once(jnp.fft.ifftn, x, others, self.norm)
            real: Array = jnp.fft.irfftn(x, [sizes[a] for a in last], last, self.norm)
            return real
        if self.halved in sizes:
            # Re(sum over all frequencies) = Re(f_0 + 2 f_1 + 2 f_2 + ...), f_{n/2} once, whatever else is transformed.
            n = sizes[self.halved]
            x = lowest(x, self.halved, min(x.shape[self.halved], n // 2 + 1), from_0=True)
            present = x.shape[self.halved]
            times = np.full(present, 2, x.real.dtype)
            times[0] = 1
            if n % 2 == 0 and present == n // 2 + 1:
                times[-1] = 1
            x = x * times.reshape(-1, *(1,) * (x.ndim - self.halved - 1))
            widths = [(0, n - present if a == self.halved else 0) for a in range(x.ndim)]
            x, axes = jnp.pad(x, widths), [*axes, self.halved]
        x = _at_once(jnp.fft.ifftn, x, axes, self.norm)
        return x.real if self.last and self.halved is not None else x


def _at_once(transform: Callable[..., Array], x: Array, axes: list[int], norm: str | None) -> Array:
    for start in range(0, len(axes), AT_ONCE):
        x = transform(x, axes=tuple(axes[start : start + AT_ONCE]), norm=norm)
    return x


def lowest(x: Array, axis: int, n: int, *, from_0: bool = False) -> Array:
    """Return the `n` lowest of all frequencies along `axis`: 0, 1, ..., -1, or, with `from_0`, the first n."""
    if n == x.shape[axis]:
        return x
    negative = 0 if from_0 else n // 2
    return joined_slices([(x, 0, n - negative), (x, x.shape[axis] - negative, x.shape[axis])], axis)


def with_zeros(x: Array, axis: int, n: int) -> Array:
    """Return `n` frequencies along `axis`: the lowest from `x`, and zeros."""
    m = x.shape[axis]
    if n == m:
        return x
    between = jnp.zeros((*x.shape[:axis], n - m, *x.shape[axis + 1 :]), x.dtype)
    return joined_slices([(x, 0, m - m // 2), (between, 0, n - m), (x, m - m // 2, m)], axis)


@dataclass(frozen=True)
class Move:
    """A repartition of the tensor with its dimensions in another `order`, used for packing and sending."""

    order: tuple[int, ...]
    plan: RepartitionPlan

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's resulting block, with its dimensions in the order of `x`."""
        owned, needed = self.plan.exchange.owned, self.plan.exchange.needed
        x = x.transpose(self.order) if world.rank in owned.cell_of else x
        y = self.plan.run(world, x)
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return y.transpose(back) if world.rank in needed.cell_of else y


@dataclass(frozen=True)
class StagePlan(BlocksPlan):
    """A movement to the grid of a stage, and the computation there; None if there is none.

    - `inputs`: the workers' blocks between the two.
    """

    move: Move | None
    inputs: ShapeDtypes = field(hash=False)
    step: Transform | None

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's resulting block."""
        x = x if self.move is None else self.move.run(world, x)
        if self.step is None:
            return x
        y = self.blocks[world.rank]
        return self.step(x).astype(y.dtype) if x.size else tie(jnp.zeros(y.shape, y.dtype), x)


@dataclass(frozen=True)
class StagesPlan(BlocksPlan):
    """The plan of stages on several grids; `grid` has the final blocks."""

    stages: tuple[StagePlan, ...]
    grid: ProductGrid

    @property
    def dtype(self) -> np.dtype:
        """The final dtype of the data."""
        return self.blocks[self.grid.ranks[0]].dtype

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's final block."""
        for stage in self.stages:
            x = stage.run(world, x)
        return x


def plan_stages(
    blocks: ShapeDtypes,
    grid: ProductGrid,
    dtype: np.dtype,
    path: Sequence[tuple[Partition, Transform | None]],
    like: ProductGrid,
    rebalanced: Collection[int] = (),
) -> StagesPlan:
    """Plan the steps on the grids of `path`, starting with `grid`, for blocks of `dtype`.

    On a grid with the workers and the shape of `like`, the blocks are those of `like` along dimensions of equal length,
    except `rebalanced`. Elsewhere they are balanced.
    """
    stages: list[StagePlan] = []
    before: Transform | None = None
    for P, step in path:
        needed = _grid_on(P, grid, like, rebalanced) if stages else grid
        move = None if needed == grid else _move(blocks, grid, needed, dtype, step or before)
        if move is not None:
            blocks = {worker: move.plan.output(worker) for worker in blocks if worker not in needed.cell_of}
            blocks |= {worker: ShapeDtype(box_shape(needed.box(c)), dtype) for worker, c in needed.cell_of.items()}
        grid, before, inputs = needed, step, blocks
        if step is not None:
            dtype, lengths = step.dtype(dtype), step.lengths()
            along = (((0, lengths[d]),) if d in lengths else ranges for d, ranges in enumerate(grid.ranges))
            grid = ProductGrid(grid.ranks, tuple(along))
            shapes = {worker: box_shape(grid.box(cell)) for worker, cell in grid.cell_of.items()}
            blocks = {worker: ShapeDtype(shapes.get(worker, x.shape), dtype) for worker, x in blocks.items()}
        stages.append(StagePlan(blocks, move, inputs, step))
    return StagesPlan(blocks, tuple(stages), grid)


def _grid_on(P: Partition, grid: ProductGrid, like: ProductGrid, rebalanced: Collection[int]) -> ProductGrid:
    """Return the blocks on `P` of the tensor of `grid`."""
    ranges = [balanced_ranges(n, p) for n, p in zip(grid.extent, P.shape, strict=True)]
    if (P.ranks, P.shape) == (like.ranks, like.shape):
        for d, (n, m) in enumerate(zip(grid.extent, like.extent, strict=True)):
            ranges[d] = like.ranges[d] if n == m and d not in rebalanced else ranges[d]
    return ProductGrid(P.ranks, tuple(ranges))


def _move(blocks: ShapeDtypes, grid: ProductGrid, needed: ProductGrid, dtype: np.dtype, step: Transform | None) -> Move:
    """Plan the movement before or after `step`.

    XLA transforms along the last dimension, and transposes for other ones. That is fast if the other dimension is the
    second to last, since these matrices stay in the cache. So the dimension is moved there.
    """
    dims = len(grid.shape)
    axes = list(step.lengths()) if step is not None else []
    order = tuple(range(dims))
    if len(axes) == 1 and axes[0] < dims - 2:
        order = (*(d for d in order[:-1] if d != axes[0]), axes[0], dims - 1)
    turned = {
        worker: ShapeDtype(tuple(x.shape[d] for d in order), x.dtype) if worker in grid.cell_of else x
        for worker, x in blocks.items()
    }
    exchange = Exchange(_in_order(grid, order), _in_order(needed, order))
    return Move(order, RepartitionPlan("repartition", turned, dtype, exchange, True))


def _in_order(grid: ProductGrid, order: tuple[int, ...]) -> ProductGrid:
    """Return the blocks of the tensor with its dimensions in another order."""
    ranks = np.reshape(grid.ranks, grid.shape).transpose(order).ravel()
    return ProductGrid(tuple(ranks.tolist()), tuple(grid.ranges[d] for d in order))
