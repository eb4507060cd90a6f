"""Mean and variance over the blocks of several workers, by sums of constant size and without cancellation.

The workers of a team sum their entries, which gives all of them one number c: the mean, up to rounding. Then they sum
the deviations from it, and their squares. With n entries, for any c,

    mean = c + sum (x - c) / n,        var = sum (x - c)^2 / n - (sum (x - c) / n)^2

The last term is of the order of c's rounding error, squared. Both formulas hold for any c, so c is a constant to JAX:
derivatives of all orders are exact, and the gradient takes one sum over the team. Source: Chan, Golub and LeVeque
(1983), "corrected two-pass algorithm".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.functional.all_sum_reduce import AllSumPlan
from distdl_jax.functional.block_checks import GridBlocks
from distdl_jax.kernels.dtypes import in_own_width
from distdl_jax.plans.alike import derived
from distdl_jax.plans.broadcasting import reduction_teams, team_at
from distdl_jax.plans.decomposition import Box, ProductGrid, box_shape
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.worker_ranks import Workers
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.world import World


class Entries(Protocol):
    """The entries of a tensor that share a mean and a variance, within one worker's block.

    Statistics have the same shape on all workers of a team, the *shape of the sums*.
    """

    def counts(self, box: Box) -> np.ndarray:
        """Return the number of entries of the block `box` for each statistic, which broadcasts with the sums."""

    def sums(self, box: Box, x: Array) -> Array:
        """Return the sums over the entries of the block."""

    def shape(self, box: Box) -> tuple[int, ...]:
        """Return the shape of the sums."""

    def spread(self, box: Box, sums: Array) -> Array:
        """Broadcast statistics to the entries of the block: an array that broadcasts with it."""


@dataclass(frozen=True)
class Along:
    """All entries with equal indices in every dimension but `dims`: sums have length 1 in these."""

    dims: tuple[int, ...]

    def counts(self, box: Box) -> np.ndarray:
        shape = box_shape(box)
        return np.full((1,) * len(shape), math.prod(shape[d] for d in self.dims))

    def sums(self, box: Box, x: Array) -> Array:
        return jnp.sum(x, axis=self.dims, keepdims=True)

    def shape(self, box: Box) -> tuple[int, ...]:
        return tuple(1 if d in self.dims else n for d, n in enumerate(box_shape(box)))

    def spread(self, box: Box, sums: Array) -> Array:
        return sums


@dataclass(frozen=True)
class InGroups:
    """The entries of one sample and one of `groups` groups of adjacent channels: sums are samples x groups.

    A group may be split, and a worker may have parts of several.
    """

    groups: int
    channels: int

    def _members(self, box: Box) -> np.ndarray:
        """Return whether each channel of the block is in each group: channels x groups."""
        group_of = np.arange(*box[1]) // (self.channels // self.groups)
        return group_of[:, None] == np.arange(self.groups)

    def counts(self, box: Box) -> np.ndarray:
        return self._members(box).sum(axis=0, keepdims=True) * math.prod(box_shape(box)[2:])

    def sums(self, box: Box, x: Array) -> Array:
        # A product with 0 and 1 would spread infinity and NaN from one group to the others.
        of_channels = jnp.sum(x, axis=tuple(range(2, x.ndim)))
        return jnp.sum(jnp.where(self._members(box), of_channels[:, :, None], 0), axis=1)

    def shape(self, box: Box) -> tuple[int, ...]:
        return box_shape(box)[0], self.groups

    def spread(self, box: Box, sums: Array) -> Array:
        of_channels = jnp.sum(jnp.where(self._members(box), sums[:, None, :], 0), axis=2)
        return of_channels.reshape(*of_channels.shape, *(1,) * (len(box) - 2))


@dataclass(frozen=True)
class Moments:
    """Mean and variance over teams of workers.

    - `grid`: the blocks of the tensor.
    - `axes`: the dimensions along which workers form a team.
    - `entries`: the entries that are averaged.
    - `dtype`: of the sums.
    - `centred`: whether the mean is subtracted. Otherwise the mean is 0, and the "variance" is the mean square.
    """

    grid: ProductGrid
    axes: tuple[int, ...]
    entries: Entries
    dtype: np.dtype
    centred: bool = True

    def team(self, worker: int) -> Workers:
        """Return the workers that share statistics with `worker`, by world rank."""
        return team_at(self.grid.ranks, self.grid.shape, self.axes, self.grid.cell_of[worker])

    def box(self, worker: int) -> Box:
        """Return the ranges of the block of `worker`."""
        return self.grid.box(self.grid.cell_of[worker])

    def counts(self, worker: int) -> np.ndarray:
        """Return the number of entries on each worker of the team: workers x a shape that broadcasts with the sums."""
        return np.stack([self.entries.counts(self.box(each)) for each in self.team(worker)])

    def spread(self, worker: int, sums: Array) -> Array:
        """Broadcast statistics to the entries of the block of `worker`."""
        return self.entries.spread(self.box(worker), sums)

    def run(self, world: World, x: Array) -> tuple[Array, Array]:
        """Return mean and biased variance over this worker's team, in the shape of the sums."""
        x, counts = x.astype(self.dtype), self.counts(world.rank)
        total = np.maximum(counts.sum(axis=0), 1).astype(self.dtype)
        if not self.centred:
            squares = self._sums(world.rank, x, jnp.square)
            return jnp.zeros_like(squares), self.sums.run(world, squares) / total
        centre = self.sums.run(world, self._sums(world.rank, lax.stop_gradient(x))) / total
        if x.size:
            own = _deviations(x, centre, self.entries, self.box(world.rank), len(counts) == 1)
        else:
            own = (self._sums(world.rank, x),) * 2
        shift, squares = self.pairs.run(world, jnp.stack(own)) / total
        # Infinities have no deviations from their mean, which is infinite.
        return jnp.where(jnp.isinf(centre), centre, centre + shift), _variance(squares, shift)

    def _sums(self, worker: int, x: Array, of: Callable[[Array], Array] = lambda x: x) -> Array:
        """Return the sums over the block of `worker`; 0 if it is empty, which still depends on `x`."""
        if x.size == 0:
            return tie(self.entries.sums(self.box(worker), jnp.zeros(x.shape, self.dtype)), x)
        return self.entries.sums(self.box(worker), of(x))

    @cached_property
    def sums(self) -> AllSumPlan:
        """The sum over each team of one number for each statistic."""
        return self._over_teams()

    @cached_property
    def pairs(self) -> AllSumPlan:
        """The sum over each team of two numbers for each statistic."""
        return self._over_teams(2)

    def _over_teams(self, *numbers: int) -> AllSumPlan:
        def own(worker: int) -> ShapeDtype:
            return ShapeDtype((*numbers, *self.entries.shape(self.box(worker))), self.dtype)

        teams = reduction_teams(self.grid.ranks, self.grid.shape, self.axes)
        return AllSumPlan(teams, derived(own, GridBlocks(self.grid, self.dtype)))


def _variance(squares: Array, shift: Array) -> Array:
    """Return the mean square minus the square of the mean: not below 0, and infinite if the mean square is."""
    variance = jnp.where(jnp.isinf(squares), squares, squares - jnp.square(shift))
    return variance - lax.stop_gradient(jnp.minimum(variance, 0))  # rounding, which has no derivative


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _deviations(x: Array, centre: Array, entries: Entries, box: Box, alone: bool) -> tuple[Array, Array]:
    """Return the sums, over a nonempty block, of the deviations from a constant, and of their squares.

    - `alone`: whether `centre` is the mean of the block. Then the sums of the deviations are 0, but for rounding, and
      a pass over x is saved, with the accuracy of `jnp.var`.
    """
    deviations = x - entries.spread(box, centre)
    sums = jnp.zeros_like(centre) if alone else entries.sums(box, deviations)
    return sums, entries.sums(box, jnp.square(deviations))


@in_own_width
def _forward(
    x: Array, centre: Array, entries: Entries, box: Box, alone: bool
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    return _deviations(x, centre, entries, box, alone), (x, centre)


@in_own_width
def _backward(
    entries: Entries, box: Box, alone: bool, residuals: tuple[Array, Array], cotangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Compute the gradient from x, which is stored anyway, in one pass."""
    (x, centre), (of_sums, of_squares) = residuals, cotangents
    deviations = x - entries.spread(box, centre)
    return entries.spread(box, of_sums) + 2 * entries.spread(box, of_squares) * deviations, jnp.zeros_like(centre)


_deviations.defvjp(_forward, _backward)
