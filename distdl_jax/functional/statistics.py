"""Mean and variance over the blocks of several workers, in one movement and without cancellation.

Each worker computes the mean and the sum of squared deviations of its own entries. These are sent to all workers of the
team, which combine them by the parallel algorithm: with n_i entries, means m_i and sums of squares s_i,

    m = sum n_i m_i / n,        var = sum (s_i + n_i (m_i - m)^2) / n

The counts n_i follow from the shapes, so they are not sent. Source: Chan, Golub and LeVeque (1983).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.functional.all_gather import GatherPlan
from distdl_jax.functional.all_sum_reduce import AllSumPlan, teams_alike
from distdl_jax.functional.block_checks import GridBlocks
from distdl_jax.functional.movement import Movement
from distdl_jax.functional.plan import MovementPlan, ShapeDtypes
from distdl_jax.plans.alike import derived
from distdl_jax.plans.broadcasting import reduction_teams, team_at
from distdl_jax.plans.decomposition import Box, ProductGrid, balanced_ranges, box_shape
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.worker_ranks import Workers, union
from distdl_jax.tracing.context import in_own_width
from distdl_jax.tracing.tie import tie
from distdl_jax.tracing.world import World


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

    @property
    def teams(self) -> tuple[Workers, ...]:
        """All teams, by world rank."""
        return reduction_teams(self.grid.ranks, self.grid.shape, self.axes)

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
        x, team, counts = x.astype(self.dtype), self.team(world.rank), self.counts(world.rank)
        total = np.maximum(counts.sum(axis=0), 1).astype(self.dtype)
        if not self.centred:
            squares = self._sums(world.rank, x, jnp.square)
            return jnp.zeros_like(squares), self.movement.run(world, squares) / total
        if x.size:
            mean, squares = _mean_and_squares(x, self.entries, self.box(world.rank))
        else:
            mean = squares = self._sums(world.rank, x)
        if len(team) == 1:
            return mean, squares / total
        row = jnp.stack([mean, squares]).reshape(1, -1)
        rows = self.movement.run(world, row).reshape(len(team), 2, *mean.shape)
        means, weights = rows[:, 0], counts.astype(self.dtype)
        mean = jnp.sum(means * (weights / total), axis=0)
        return mean, jnp.sum(rows[:, 1] + weights * jnp.square(means - mean), axis=0) / total

    def _sums(self, worker: int, x: Array, of: Callable[[Array], Array] = lambda x: x) -> Array:
        """Return the sums over the block of `worker`; 0 if it is empty, which still depends on `x`."""
        if x.size == 0:
            return tie(self.entries.sums(self.box(worker), jnp.zeros(x.shape, self.dtype)), x)
        return self.entries.sums(self.box(worker), of(x))

    @cached_property
    def movement(self) -> MovementPlan:
        """The movement in `run`, for all teams."""
        return _MovementOfTeams(self)

    def movement_of(self, worker: int) -> MovementPlan:
        """Return the plan of the movement in the team of `worker`."""
        team, sums = self.team(worker), self.entries.shape(self.box(worker))
        return self._gathered(team, 2 * math.prod(sums)) if self.centred else self._summed(team, sums)

    def _summed(self, team: Workers, shape: tuple[int, ...]) -> AllSumPlan:
        """Plan the sum of a team's squares on all of its workers."""
        return AllSumPlan((team,), dict.fromkeys(team, ShapeDtype(shape, self.dtype)))

    def _gathered(self, team: Workers, size: int) -> GatherPlan:
        """Plan the gather of the rows of a team on all of its workers."""
        grid = ProductGrid(team, (balanced_ranges(len(team), len(team)), ((0, size),)))
        row = ShapeDtype((1, size), self.dtype)
        return GatherPlan("moments", dict.fromkeys(team, row), self.dtype, grid, (0,), gathers=True)


@dataclass(frozen=True)
class _MovementOfTeams(MovementPlan):
    """The movement of `moments`, in each of its teams."""

    name: ClassVar[str] = "moments"
    moments: Moments

    @property
    def workers(self) -> Workers:
        return union(self.moments.grid.ranks)

    @cached_property
    def _plans(self) -> dict[int, MovementPlan]:
        """The plans of requested teams, by their first worker."""
        return {}

    def _plan(self, worker: int) -> MovementPlan:
        first = self.moments.team(worker)[0]
        if first not in self._plans:
            self._plans[first] = self.moments.movement_of(first)
        return self._plans[first]

    @property
    def inputs(self) -> ShapeDtypes:  # type: ignore[override]
        blocks = GridBlocks(self.moments.grid, self.moments.dtype)
        return derived(lambda worker: self._plan(worker).inputs[worker], blocks)

    def output(self, worker: int) -> ShapeDtype:
        return self._plan(worker).output(worker)

    @property
    def alike(self) -> Iterable[Workers]:
        # Each worker of a team contributes the same number of values.
        teams = [team for team in self.moments.teams if len(team) > 1]
        return teams_alike((team, self._plan(team[0]).inputs[team[0]]) for team in teams)

    def part(self, worker: int) -> Movement | None:
        alone = worker not in self.moments.grid.cell_of or len(self.moments.team(worker)) == 1
        return None if alone else self._plan(worker).part(worker)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _mean_and_squares(x: Array, entries: Entries, box: Box) -> tuple[Array, Array]:
    """Return the mean of each statistic's entries in a nonempty block, and the sum of squared deviations."""
    mean = entries.sums(box, x) / np.maximum(entries.counts(box), 1).astype(x.dtype)
    return mean, entries.sums(box, jnp.square(x - entries.spread(box, mean)))


@in_own_width
def _forward(x: Array, entries: Entries, box: Box) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    mean, squares = _mean_and_squares(x, entries, box)
    return (mean, squares), (x, mean)


@in_own_width
def _backward(
    entries: Entries, box: Box, residuals: tuple[Array, Array], cotangents: tuple[Array, Array]
) -> tuple[Array]:
    """Compute the gradient in one pass over x: deviations sum to 0, so squares contribute none through the mean."""
    (x, mean), (of_mean, of_squares) = residuals, cotangents
    of_mean = of_mean / np.maximum(entries.counts(box), 1).astype(x.dtype)
    deviation = x - entries.spread(box, mean)
    return (entries.spread(box, of_mean) + 2 * entries.spread(box, of_squares) * deviation,)


_mean_and_squares.defvjp(_forward, _backward)
