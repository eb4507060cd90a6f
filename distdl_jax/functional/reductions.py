"""Reductions of a split tensor along its dimensions, as jax.numpy's: every worker gets the result for its own block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import PlanError
from distdl_jax.functional.all_reduce import Extremum, ExtremumPlan
from distdl_jax.functional.all_sum_reduce import AllSumPlan, plan_all_sum_reduce
from distdl_jax.functional.block_checks import common_dtype, is_differentiable, outside, owned_grid
from distdl_jax.functional.collectives import Operations, accumulation_dtype, extreme, mean_dtype
from distdl_jax.functional.plan import BlocksPlan, ShapeDtypes, plan_and_run, taking_part
from distdl_jax.functional.statistics import Along, Moments
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.tracing.tie import materialize, tie
from distdl_jax.tracing.world import Workers, World
from distdl_jax.transports.agreement import compared
from distdl_jax.validation import checked_axes, checked_boolean, checked_integer

Axes = int | Sequence[int] | None
Reduction = Literal["sum", "mean", "max", "min", "var"]


@dataclass(frozen=True)
class ReductionPlan(BlocksPlan):
    """A reduction of each worker's block along `axes`, and then over workers; the output has length 1 along them.

    - `over_workers`: the plan of the second; a mean and a variance divide by `count`.
    """

    axes: tuple[int, ...]
    count: int
    over_workers: Any

    def run(self, world: World, x: Array) -> Array:
        """Return this worker's block of the reduction."""
        if world.rank not in self.blocks:
            return x
        return self._reduced(world, x).astype(self.output(world.rank).dtype)

    def _reduced(self, world: World, x: Array) -> Array:
        wide = self.over_workers.inputs[world.rank].dtype
        if x.size == 0:  # JAX drops what empty arrays depend on
            own = tie(jnp.zeros(self.output(world.rank).shape, wide), x)
        else:
            own = jnp.sum(x, self.axes, dtype=wide, keepdims=True)
        total: Array = self.over_workers.run(world, own)
        return total / np.asarray(self.count, total.dtype) if self.count != 1 else total


class VariancePlan(ReductionPlan):
    """The mean of squared deviations from the mean; `over_workers` finds both."""

    def _reduced(self, world: World, x: Array) -> Array:
        moments: Moments = self.over_workers
        n = math.prod(moments.grid.extent[d] for d in self.axes)
        variance = moments.run(world, x)[1] * np.asarray(n, moments.dtype)
        return variance / np.asarray(self.count or np.nan, moments.dtype)  # no number, as in jnp


@dataclass(frozen=True)
class ExtremumAlongPlan(ReductionPlan):
    """The largest entries, or the smallest."""

    largest: bool

    def _reduced(self, world: World, x: Array) -> Array:
        shape, dtype = self.output(world.rank).shape, np.dtype(x.dtype)
        if not is_differentiable(dtype):
            of = jnp.max if self.largest else jnp.min
            own = tie(of(x, self.axes, keepdims=True, initial=extreme(dtype, not self.largest)), x)
            found: Array = self.over_workers.run(world, own)
            return found
        wide = self.over_workers.inputs[world.rank].dtype
        if x.size == 0:
            own, ties = tie(jnp.full(shape, -np.inf, wide), x), jnp.zeros(shape, wide)
        else:
            own, ties = _largest((x if self.largest else -x).astype(wide), self.axes)
        if len(self.over_workers.team_of[world.rank]) > 1:
            own = self.over_workers.run(world, jnp.stack([own, ties], -1))
        return own if self.largest else -own


class CountedExtremum(Extremum):
    """One worker's part of the largest of a team's numbers, each of which comes with the number of entries that tie."""

    def run(self, world: World, x: Array) -> Array:
        return super().run(world, x[..., 0])

    def operations(self, worker: int, x: ShapeDtype) -> Operations:
        return super().operations(worker, ShapeDtype(x.shape[:-1], x.dtype))

    def residual(self, x: Array, y: Array) -> Array:
        """Return how many of this worker's entries are the largest."""
        return jnp.where(x[..., 0] == y, x[..., 1], 0)

    def after_adjoint(self, ties: Array, sums: Array, dtype: np.dtype) -> Array:
        """Return the share of the sum that falls to this worker's entries; their number has no derivative."""
        share = super().after_adjoint(ties, sums, dtype)
        return jnp.stack([share, jnp.zeros_like(share)], -1)


class CountedExtremumPlan(AllSumPlan):
    """The largest numbers of each of `teams`; blocks are pairs, of a number and of how many entries tie there."""

    def output(self, worker: int) -> ShapeDtype:
        block = self.inputs[worker]
        return ShapeDtype(block.shape[:-1], block.dtype)

    def _movement(self, team: Workers, differentiable: bool) -> Extremum:
        return CountedExtremum(team, differentiable, True)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _largest(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the largest entries along `axes`, of length 1 there, and the number of entries that tie."""
    y = jnp.max(x, axes, keepdims=True)
    return y, jnp.sum(x == y, axes, keepdims=True, dtype=x.dtype)


@_largest.defjvp
def _largest_jvp(axes: tuple[int, ...], primals: tuple[Array], tangents: tuple[Array]) -> tuple[Any, Any]:
    """Share the cotangent equally between entries that tie."""
    # XLA may compute x twice, rounded in two ways, and then none is as large as the largest.
    x, dx = materialize(*primals), *tangents
    y, ties = _largest(x, axes)
    # A NaN ties with nothing, and makes NaN of the whole gradient: a product, of which XLA is not to make a selection.
    tying = materialize((x == y).astype(x.dtype))
    return (y, ties), (jnp.sum(tying * dx, axes, keepdims=True) / ties, jnp.zeros_like(ties))


def plan_reduction(
    shape_dtypes: ShapeDtypes, P_x: Partition, op: Reduction, axes: tuple[int, ...], ddof: int = 0
) -> ReductionPlan:
    """Plan a reduction, with keepdims, from the shapes and dtypes on the workers of P_x, and perhaps of more."""
    x = taking_part(shape_dtypes, P_x.ranks)
    dtype, grid = common_dtype("x", x, P_x.ranks), owned_grid("x", P_x, x)
    n = math.prod(grid.extent[d] for d in axes)
    if op == "sum" and not is_differentiable(dtype):
        output = np.dtype(jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((), dtype)).dtype)
    else:
        output = dtype if op in ("sum", "max", "min") else mean_dtype(dtype)
    if op in ("max", "min", "var") and jnp.issubdtype(dtype, jnp.complexfloating):
        why = "" if op == "var" else ", of which one is the largest"
        raise PlanError(f"`x` must hold real numbers{why}, but is {dtype}.")
    wide = accumulation_dtype(output)
    shapes = {
        worker: tuple(1 if d in axes else length for d, length in enumerate(block.shape)) for worker, block in x.items()
    }
    blocks = {worker: ShapeDtype(shape, output) for worker, shape in shapes.items()}
    if op == "var":
        return VariancePlan(blocks, axes, n - ddof if n > ddof else 0, Moments(grid, axes, Along(axes), wide))
    sums = plan_all_sum_reduce({worker: ShapeDtype(shape, wide) for worker, shape in shapes.items()}, P_x, axes)
    if op in ("sum", "mean"):
        return ReductionPlan(blocks, axes, n if op == "mean" else 1, sums)
    if n == 0:
        raise PlanError(
            f"`x` ({shape_text(grid.extent)}) must have an entry along dimensions {axes}, to have an extreme one."
        )
    if not is_differentiable(dtype):
        return ExtremumAlongPlan(blocks, axes, n, ExtremumPlan(sums.teams, sums.inputs, op == "max"), op == "max")
    pairs = {worker: ShapeDtype((*shape, 2), wide) for worker, shape in shapes.items()}
    return ExtremumAlongPlan(blocks, axes, n, CountedExtremumPlan(sums.teams, pairs), op == "max")


def _reduce(x: Array, P_x: Partition, op: Reduction, axes: Axes, keepdims: bool, ddof: int = 0) -> Array:
    check_partitions(P_x=P_x)
    along = tuple(range(P_x.dim)) if axes is None else checked_axes("axes", axes, P_x.shape)
    keepdims = checked_boolean("keepdims", keepdims)
    if not P_x.active:
        return outside(P_x.world, x)
    label = f"{op} along {along} on {P_x.describe()}"
    plan = partial(plan_reduction, P_x=P_x, op=op, axes=along, ddof=ddof)
    y = plan_and_run(P_x.world, P_x.ranks, label, plan, x)
    return y if keepdims else lax.squeeze(y, along)


@compared
def mean(x: Array, P_x: Partition, axes: Axes = None, keepdims: bool = True) -> Array:
    """Return the mean along dimensions of a split tensor, `jnp.mean`: every worker gets the means for its own block.

    With x of n_0 x ... x n_{D-1} on P_x of p_0 x ... x p_{D-1}, the workers that agree in every index outside `axes`
    form one team, and each of them gets the same block of the means, a copy, so that `x - mean(x, P_x, axes)` is right
    on every worker, one that has no entries, too. One number for each mean is summed over the team, forward and
    backward; along dimensions that are not split nothing moves.

    The gradient of the copies is the sum of their cotangents: that of any loss whose parts the workers compute from
    the means and from their own blocks. A loss of the means *alone* would count once for each copy: divide it by their
    number, the product of P_x's shape along `axes`.

    **Arguments:**

    - `x`: this worker's block on P_x, of D dimensions: of any numbers, uneven or empty. Half precisions are summed in
      float32; the mean of integers and booleans is a floating-point number. Zero-volume outside P_x.
    - `P_x`: the partition.
    - `axes`: the dimensions, one or several; negative ones count from the end. Default: all.
    - `keepdims`: whether they remain, of length 1, so that the result broadcasts with x. (In jnp they don't.)

    **Returns:** this worker's block of the means. It is described by `TensorSpec(shape, P_x, replicated=axes)` where
    dimensions don't remain. Outside P_x, `x`.

    **Raises:** `InvalidTypeError` where `keepdims` is not True or False; `InvalidArgumentError`, on every worker, for a
    dimension that P_x doesn't have; `PlanError`, on every worker of P_x, where the blocks don't form a grid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> mean(jnp.array([[1.0, 3.0], [5.0, 7.0]]), P, axes=1).tolist()
    [[2.0], [6.0]]

    Source: numpy's reductions; Hewett and Grady (2020), all-sum-reduce.
    """
    return _reduce(x, P_x, "mean", axes, keepdims)


@compared
def var(x: Array, P_x: Partition, axes: Axes = None, keepdims: bool = True, ddof: int = 0) -> Array:
    """Return the variance along dimensions of a split tensor: `jnp.var`, of which every worker gets its block.

    Two numbers for each variance go to each worker of the team, in one movement: the mean and the squared deviations of
    each block, from which the whole's are found without cancellation.

    **Arguments:**

    - `x`: this worker's block on P_x, of real numbers, uneven or empty. Zero-volume outside P_x.
    - `P_x`: the partition, of as many dimensions as the tensor.
    - `axes`: the dimensions, one or several; negative ones count from the end. Default: all.
    - `keepdims`: whether they remain, of length 1, so that the result broadcasts with x. (In jnp they don't.)
    - `ddof`: what is subtracted from the number of entries to divide by; 1 for the unbiased variance.

    **Returns:** this worker's block of the variances, a copy on all workers along `axes`, with the gradient of copies
    as in `mean`; of integers a floating-point number; NaN where `ddof` leaves no entry. Outside P_x, `x`.

    **Raises:** `InvalidTypeError` where `keepdims` is not True or False; `InvalidArgumentError`, on every worker, for a
    dimension that P_x doesn't have; `PlanError`, on every worker of P_x, where the blocks don't form a grid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([1, 2])
    ...     x = dj.TensorSpec((2, 4), P).block(jnp.arange(8.0).reshape(2, 4))
    ...     return dj.functional.var(x, P, axes=1).ravel().tolist()
    >>> dj.simulate(2, program)
    [[1.25, 1.25], [1.25, 1.25]]

    Source: Chan, Golub and LeVeque (1983).
    """
    return _reduce(x, P_x, "var", axes, keepdims, checked_integer("ddof", ddof, 0))


@compared
def std(x: Array, P_x: Partition, axes: Axes = None, keepdims: bool = True, ddof: int = 0) -> Array:
    """Return the standard deviation along dimensions of a split tensor, `jnp.std`: the root of `var`.

    **Arguments:**

    - `x`: this worker's block on P_x, of real numbers, uneven or empty. Zero-volume outside P_x.
    - `P_x`: the partition, of as many dimensions as the tensor.
    - `axes`: the dimensions, one or several; negative ones count from the end. Default: all.
    - `keepdims`: whether they remain, of length 1, so that the result broadcasts with x. (In jnp they don't.)
    - `ddof`: what is subtracted from the number of entries to divide by; 1 for the unbiased variance.

    **Returns:** this worker's block, as `var`. As in jnp the gradient where it is 0 is not a number. Outside P_x, `x`.

    **Raises:** `InvalidTypeError` where `keepdims` is not True or False; `InvalidArgumentError`, on every worker, for a
    dimension that P_x doesn't have; `PlanError`, on every worker of P_x, where the blocks don't form a grid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([1, 2])
    ...     x = dj.TensorSpec((2, 4), P).block(jnp.array([[0.0, 2, 0, 2], [1, 7, 1, 7]]))
    ...     return dj.functional.std(x, P, axes=1).ravel().tolist()
    >>> dj.simulate(2, program)
    [[1.0, 3.0], [1.0, 3.0]]
    """
    y = var(x, P_x, axes, keepdims, ddof)
    return jnp.sqrt(y) if P_x.active else y


@compared
def max(x: Array, P_x: Partition, axes: Axes = None, keepdims: bool = True) -> Array:
    """Return the largest entries along dimensions of a split tensor: `jnp.max`, of which every worker gets its block.

    One number for each is compared over the team. Backward, two are summed; the entries that tie, on all workers, share
    the gradient equally, as in jnp. A softmax along a split dimension is
    `(e := jnp.exp(x - jax.lax.stop_gradient(max(x, P_x, axis)))) / sum(e, P_x, axis)`.

    **Arguments:**

    - `x`: this worker's block on P_x, of real numbers, uneven or empty. Zero-volume outside P_x.
    - `P_x`: the partition, of as many dimensions as the tensor.
    - `axes`: the dimensions, one or several; negative ones count from the end. Default: all.
    - `keepdims`: whether they remain, of length 1, so that the result broadcasts with x. (In jnp they don't.)

    **Returns:** this worker's block of the largest, of x's dtype, a copy on all workers along `axes`; a NaN is above
    all, and then the whole gradient is NaN. Outside P_x, `x`.

    **Raises:** `InvalidTypeError` where `keepdims` is not True or False; `InvalidArgumentError`, on every worker, for a
    dimension that P_x doesn't have; `PlanError`, on every worker of P_x, where the blocks don't form a grid,
    or the tensor has no entries along `axes`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([1, 2])
    ...     x = dj.TensorSpec((2, 4), P).block(jnp.arange(8.0).reshape(2, 4))
    ...     return dj.functional.max(x, P, axes=1).ravel().tolist()
    >>> dj.simulate(2, program)
    [[3.0, 7.0], [3.0, 7.0]]
    """
    return _reduce(x, P_x, "max", axes, keepdims)


@compared
def min(x: Array, P_x: Partition, axes: Axes = None, keepdims: bool = True) -> Array:
    """Return the smallest entries along dimensions of a split tensor: `jnp.min`, of which every worker gets its block.

    What moves, and how entries that tie share the gradient, is as in `max`.

    **Arguments:**

    - `x`: this worker's block on P_x, of real numbers, uneven or empty. Zero-volume outside P_x.
    - `P_x`: the partition, of as many dimensions as the tensor.
    - `axes`: the dimensions, one or several; negative ones count from the end. Default: all.
    - `keepdims`: whether they remain, of length 1, so that the result broadcasts with x. (In jnp they don't.)

    **Returns:** this worker's block of the smallest, of x's dtype, a copy on all workers along `axes`; NaN where there
    is one. Outside P_x, `x`.

    **Raises:** `InvalidTypeError` where `keepdims` is not True or False; `InvalidArgumentError`, on every worker, for a
    dimension that P_x doesn't have; `PlanError`, on every worker of P_x, where the blocks don't form a grid,
    or the tensor has no entries along `axes`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([1, 2])
    ...     x = dj.TensorSpec((2, 4), P).block(jnp.arange(8.0).reshape(2, 4))
    ...     return dj.functional.min(x, P, axes=1).ravel().tolist()
    >>> dj.simulate(2, program)
    [[0.0, 4.0], [0.0, 4.0]]
    """
    return _reduce(x, P_x, "min", axes, keepdims)


@compared
def sum(x: Array, P_x: Partition, axes: Axes = None, keepdims: bool = True) -> Array:
    """Return the sum along dimensions of a split tensor: `jnp.sum`, of which every worker gets its block.

    The workers along `axes` get copies, as from `mean`, with the same gradient. `all_sum_reduce` adds up whole blocks,
    entry by entry, and leaves dimensions as they are.

    **Arguments:**

    - `x`: this worker's block on P_x, of any numbers, uneven or empty. Zero-volume outside P_x.
    - `P_x`: the partition, of as many dimensions as the tensor.
    - `axes`: the dimensions, one or several; negative ones count from the end. Default: all.
    - `keepdims`: whether they remain, of length 1, so that the result broadcasts with x. (In jnp they don't.)

    **Returns:** this worker's block of the sums, of x's dtype; of integers and booleans, of jnp's integer. Half
    precisions are summed in float32 and rounded once. Outside P_x, `x`.

    **Raises:** `InvalidTypeError` where `keepdims` is not True or False; `InvalidArgumentError`, on every worker, for a
    dimension that P_x doesn't have; `PlanError`, on every worker of P_x, where the blocks don't form a grid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([1, 2])
    ...     x = dj.TensorSpec((2, 4), P).block(jnp.arange(8.0).reshape(2, 4))
    ...     return dj.functional.sum(x, P, axes=1).ravel().tolist()
    >>> dj.simulate(2, program)
    [[6.0, 22.0], [6.0, 22.0]]
    """
    return _reduce(x, P_x, "sum", axes, keepdims)
