"""Reductions of a split tensor along dimensions, like jax.numpy's: every worker gets its block's result."""

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
from distdl_jax.functional.calls import function_call
from distdl_jax.functional.collectives import Operations
from distdl_jax.functional.plan import BlocksPlan, Computation, ShapeDtypes, plan_and_run, taking_part
from distdl_jax.functional.statistics import Along, Moments
from distdl_jax.kernels.dtypes import accumulation_dtype, extreme, in_own_width, mean_dtype
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.text import documented
from distdl_jax.tracing.tie import materialize, tie
from distdl_jax.transports.world import Workers, World
from distdl_jax.validation import checked_axes, checked_boolean, checked_integer

Axes = int | Sequence[int] | None
Reduction = Literal["sum", "mean", "max", "min", "var"]


@dataclass(frozen=True)
class ReductionPlan(BlocksPlan, Computation):
    """A reduction of each worker's block along `axes`, and then over workers; the output has length 1 along them.

    - `over_workers`: the plan of the second step; a mean divides by `count`.
    """

    axes: tuple[int, ...]
    count: int
    over_workers: AllSumPlan

    def computed(self, world: World, x: Array) -> Array:
        return self._reduced(world, x).astype(self.output(world.rank).dtype)

    def _reduced(self, world: World, x: Array) -> Array:
        wide = self.over_workers.inputs[world.rank].dtype
        if x.size == 0:  # JAX drops the dependencies of empty arrays
            own = tie(jnp.zeros(self.output(world.rank).shape, wide), x)
        else:
            own = jnp.sum(x, self.axes, dtype=wide, keepdims=True)
        total = self.over_workers.run(world, own)
        return total / np.asarray(self.count, total.dtype) if self.count != 1 else total


@dataclass(frozen=True)
class VariancePlan(BlocksPlan, Computation):
    """The sum of squared deviations from the mean along `axes`, divided by `count`; `moments` computes both."""

    axes: tuple[int, ...]
    count: int
    moments: Moments

    def computed(self, world: World, x: Array) -> Array:
        n = math.prod(self.moments.grid.extent[d] for d in self.axes)
        squares = self.moments.run(world, x)[1] * np.asarray(n, self.moments.dtype)
        variance = squares / np.asarray(self.count or np.nan, self.moments.dtype)  # NaN, as in jnp
        return variance.astype(self.output(world.rank).dtype)


@dataclass(frozen=True)
class ExtremumAlongPlan(ReductionPlan):
    """The maximum, or the minimum."""

    largest: bool

    def _reduced(self, world: World, x: Array) -> Array:
        shape, dtype = self.output(world.rank).shape, np.dtype(x.dtype)
        if not is_differentiable(dtype):
            of = jnp.max if self.largest else jnp.min
            own = tie(of(x, self.axes, keepdims=True, initial=extreme(dtype, not self.largest)), x)
            return self.over_workers.run(world, own)
        wide = self.over_workers.inputs[world.rank].dtype
        if x.size == 0:
            own, ties = tie(jnp.full(shape, -np.inf, wide), x), jnp.zeros(shape, wide)
        else:
            own, ties = _largest((x if self.largest else -x).astype(wide), self.axes)
        if len(self.over_workers.team_of[world.rank]) > 1:
            own = self.over_workers.run(world, jnp.stack([own, ties], -1))
        return own if self.largest else -own


class CountedExtremum(Extremum):
    """One worker's part of the maximum of a team's numbers, each of which comes with its number of tied entries."""

    def run(self, world: World, x: Array) -> Array:
        return super().run(world, x[..., 0])

    def operations(self, worker: int, x: ShapeDtype) -> Operations:
        return super().operations(worker, ShapeDtype(x.shape[:-1], x.dtype))

    def residual(self, x: Array, y: Array) -> Array:
        """Return how many of this worker's entries equal the maximum."""
        return jnp.where(x[..., 0] == y, x[..., 1], 0)

    def after_adjoint(self, ties: Array, sums: Array, dtype: np.dtype) -> Array:
        """Return this worker's share of the sum; the number of entries is not differentiated."""
        share = super().after_adjoint(ties, sums, dtype)
        return jnp.stack([share, jnp.zeros_like(share)], -1)


class CountedExtremumPlan(AllSumPlan):
    """The maximum over each of `teams`; blocks are pairs of a number and its number of tied entries."""

    def output(self, worker: int) -> ShapeDtype:
        block = self.inputs[worker]
        return ShapeDtype(block.shape[:-1], block.dtype)

    def _movement(self, team: Workers, differentiable: bool) -> Extremum:
        return CountedExtremum(team, differentiable, True)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _largest(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the maximum along `axes`, of length 1 there, and the number of entries that equal it."""
    y = jnp.max(x, axes, keepdims=True)
    return y, jnp.sum(x == y, axes, keepdims=True, dtype=x.dtype)


@_largest.defjvp
@in_own_width
def _largest_jvp(axes: tuple[int, ...], primals: tuple[Array], tangents: tuple[Array]) -> tuple[Any, Any]:
    """Share the cotangent equally between tied entries."""
    # XLA may compute x twice with different rounding, and then no entry equals the maximum.
    x, dx = materialize(*primals), *tangents
    y, ties = _largest(x, axes)
    # NaN equals nothing, and makes the whole gradient NaN: by a product, which XLA should not replace by a selection.
    tying = materialize((x == y).astype(x.dtype))
    return (y, ties), (jnp.sum(tying * dx, axes, keepdims=True) / ties, jnp.zeros_like(ties))


def plan_reduction(
    shape_dtypes: ShapeDtypes, P_x: Partition, op: Reduction, axes: tuple[int, ...], ddof: int = 0
) -> ReductionPlan | VariancePlan:
    """Plan a reduction, with keepdims, from the shapes and dtypes on at least the workers of P_x."""
    x = taking_part(shape_dtypes, P_x.ranks)
    dtype, grid = common_dtype("x", x, P_x.ranks), owned_grid("x", P_x, x)
    n = math.prod(grid.extent[d] for d in axes)
    if op == "sum" and not is_differentiable(dtype):
        output = np.dtype(jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((), dtype)).dtype)
    else:
        output = dtype if op in ("sum", "max", "min") else mean_dtype(dtype)
    if op in ("max", "min", "var") and jnp.issubdtype(dtype, jnp.complexfloating):
        why = "" if op == "var" else ", which have an order"
        raise PlanError(f"`x` must hold real numbers{why}, but is {dtype}.")
    wide = accumulation_dtype(output)  # in which the workers' results are combined, and rounded once
    shapes = {
        worker: tuple(1 if d in axes else length for d, length in enumerate(block.shape)) for worker, block in x.items()
    }
    blocks = {worker: ShapeDtype(shape, output) for worker, shape in shapes.items()}
    if op == "var":
        # Two rounds, of sums and of squared deviations: one round of squares would lose the digits of the mean.
        return VariancePlan(blocks, axes, n - ddof if n > ddof else 0, Moments(grid, axes, Along(axes), wide))
    sums = plan_all_sum_reduce({worker: ShapeDtype(shape, wide) for worker, shape in shapes.items()}, P_x, axes)
    if op in ("sum", "mean"):
        return ReductionPlan(blocks, axes, n if op == "mean" else 1, sums)
    if n == 0:
        raise PlanError(f"`x` ({shape_text(grid.extent)}) must have an entry along dimensions {axes}.")
    if not is_differentiable(dtype):
        return ExtremumAlongPlan(blocks, axes, n, ExtremumPlan(sums.teams, sums.inputs, op == "max"), op == "max")
    # With the number of ties, by which the gradient is divided: ties on other workers count, too.
    pairs = {worker: ShapeDtype((*shape, 2), wide) for worker, shape in shapes.items()}
    return ExtremumAlongPlan(blocks, axes, n, CountedExtremumPlan(sums.teams, pairs), op == "max")


def _reduce(
    x: Array, P_x: Partition, op: Reduction, axes: Axes, keepdims: bool, ddof: int = 0, name: str | None = None
) -> Array:
    check_partitions(P_x=P_x)
    along = tuple(range(P_x.dim)) if axes is None else checked_axes("axes", axes, P_x.shape)
    keepdims = checked_boolean("keepdims", keepdims)
    if not P_x.active:
        return outside(P_x.world, x)
    plan = partial(plan_reduction, P_x=P_x, op=op, axes=along, ddof=ddof)
    label = f"{name or op} along {along}, keepdims {keepdims}{f', ddof {ddof}' if op == 'var' else ''},"
    y = plan_and_run(label, plan, x, P_x)
    return y if keepdims else lax.squeeze(y, along)


_ALONG_DIMENSIONS = """
With x of n_0 x ... x n_{D-1} on P_x of p_0 x ... x p_{D-1}, workers with equal indices outside `axes` form a team, and
each of them gets a copy of the same block of the result, so that `x - $name(x, P_x, axes)` is correct on every worker,
including one without entries. There is no communication along unsplit dimensions. $moves

The gradient is the sum of the copies' cotangents, for any loss whose parts the workers compute from the result and from
their own blocks. A loss of the result *alone* would count once for each copy: divide it by the number of copies, the
product of P_x's shape along `axes`.

**Arguments:**

- `x`: this worker's block on P_x, of D dimensions: $numbers, uneven or empty. Zero-volume outside P_x.
- `P_x`: the partition.
- `axes`: the dimensions, one or several; negative ones count from the end. Default: all.
- `keepdims`: whether they remain with length 1, so that the result broadcasts with x. (In jnp they don't.)
$arguments **Returns:** this worker's block of the result, $returns. `TensorSpec(shape, P_x, replicated=axes)` describes
it if dimensions don't remain. Outside P_x, `x`.

**Raises:** `InvalidTypeError` if `keepdims` is not True or False; `InvalidArgumentError`, on every worker, for a
dimension that P_x doesn't have; `PlanError`, on every worker of P_x, if the blocks don't form a grid$refused.

>>> import jax.numpy as jnp, distdl_jax as dj
>>> def program():
...     P = dj.Partition().grid([1, 2])
...     x = dj.TensorSpec((2, 4), P).block(jnp.array([[1.0, 3, 1, 3], [2, 8, 2, 8]]))
...     return dj.functional.$name(x, P, axes=1).ravel().tolist()
>>> dj.simulate(2, program)
$example

Source: $source.
"""
_REDUCTION = {"arguments": "", "refused": "", "source": "numpy's reductions; Hewett and Grady (2020), all-sum-reduce"}
_SUM = _REDUCTION | {
    "numbers": "any numbers",
    "moves": "One number for each entry of the result is summed over the team, forward and backward.",
}
_EXTREMUM = _REDUCTION | {
    "numbers": "real numbers",
    "moves": "One number for each entry of the result is compared over the team; in the backward pass, two are summed, "
    "and tied\nentries, on all workers, share the gradient equally, as in jnp.",
    "refused": ", or the tensor\nhas no entries along `axes`",
}
_VARIANCE = _REDUCTION | {
    "numbers": "real numbers",
    "moves": "The team sums one number for each entry of the result, for the mean, and then two, for the deviations "
    "from it\nand their squares, without cancellation; in the backward pass two.",
    "arguments": "- `ddof`: subtracted from the number of entries in the divisor; 1 for the unbiased variance.\n",
    "returns": "floating-point, also of integers; NaN if `ddof` leaves no entry",
    "source": "Chan, Golub and LeVeque (1983)",
}


@function_call
@documented(
    _ALONG_DIMENSIONS,
    **_SUM,
    returns="floating-point, also of integers and booleans",
    example="[[2.0, 5.0], [2.0, 5.0]]",
)
def mean(x: Array, P_x: Partition, axes: Axes = None, keepdims: bool = True) -> Array:
    """Return the mean along dimensions of a split tensor: `jnp.mean`. Half precisions are summed in float32."""
    return _reduce(x, P_x, "mean", axes, keepdims)


@function_call
@documented(
    _ALONG_DIMENSIONS,
    **_VARIANCE,
    example="[[1.0, 9.0], [1.0, 9.0]]",
)
def var(x: Array, P_x: Partition, axes: Axes = None, keepdims: bool = True, ddof: int = 0) -> Array:
    """Return the variance along dimensions of a split tensor: `jnp.var`."""
    return _reduce(x, P_x, "var", axes, keepdims, checked_integer("ddof", ddof, 0))


@function_call
@documented(
    _ALONG_DIMENSIONS,
    **_VARIANCE,
    example="[[1.0, 3.0], [1.0, 3.0]]",
)
def std(x: Array, P_x: Partition, axes: Axes = None, keepdims: bool = True, ddof: int = 0) -> Array:
    """Return the standard deviation along dimensions of a split tensor: `jnp.std`, the root of `var`.

    As in jnp, its gradient at 0 is NaN.
    """
    y = _reduce(x, P_x, "var", axes, keepdims, checked_integer("ddof", ddof, 0), "std")
    return jnp.sqrt(y) if P_x.active else y


@function_call
@documented(
    _ALONG_DIMENSIONS,
    **_EXTREMUM,
    returns="of x's dtype; a NaN is above all, and then the whole gradient is NaN",
    example="[[3.0, 8.0], [3.0, 8.0]]",
)
def max(x: Array, P_x: Partition, axes: Axes = None, keepdims: bool = True) -> Array:
    """Return the maximum along dimensions of a split tensor: `jnp.max`.

    A softmax along a split dimension is
    `(e := jnp.exp(x - jax.lax.stop_gradient(max(x, P_x, axis)))) / sum(e, P_x, axis)`.
    """
    return _reduce(x, P_x, "max", axes, keepdims)


@function_call
@documented(
    _ALONG_DIMENSIONS, **_EXTREMUM, returns="of x's dtype; NaN if there is one", example="[[1.0, 2.0], [1.0, 2.0]]"
)
def min(x: Array, P_x: Partition, axes: Axes = None, keepdims: bool = True) -> Array:
    """Return the minimum along dimensions of a split tensor: `jnp.min`."""
    return _reduce(x, P_x, "min", axes, keepdims)


@function_call
@documented(
    _ALONG_DIMENSIONS,
    **_SUM,
    returns="of x's dtype; of integers and booleans, of jnp's integer",
    example="[[8.0, 20.0], [8.0, 20.0]]",
)
def sum(x: Array, P_x: Partition, axes: Axes = None, keepdims: bool = True) -> Array:
    """Return the sum along dimensions of a split tensor: `jnp.sum`. Half precisions are summed in float32.

    `all_sum_reduce` instead adds whole blocks, entry by entry, without reducing dimensions.
    """
    return _reduce(x, P_x, "sum", axes, keepdims)
