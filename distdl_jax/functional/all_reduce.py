"""All-reduce: the sum, mean, maximum, minimum or product of a team's subtensors, on every worker of the team."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.all_gather import GatherPlan
from distdl_jax.functional.all_sum_reduce import AllSumPlan, TeamMovement, plan_all_sum_reduce
from distdl_jax.functional.block_checks import is_differentiable
from distdl_jax.functional.calls import function_call
from distdl_jax.functional.collectives import Operations, allreduce_in_team, allreduce_operations
from distdl_jax.functional.plan import Computation, MovementPlan, ShapeDtypes, plan_and_run
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.broadcasting import reduction_axes
from distdl_jax.plans.decomposition import ProductGrid, ranges_of_sizes
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.transports.world import Workers, World

Operation = Literal["sum", "mean", "max", "min", "prod"]


@dataclass(frozen=True)
class Extremum(TeamMovement):
    """One worker's part of the maximum (or minimum) of the team's blocks."""

    largest: bool

    def run(self, world: World, x: Array) -> Array:
        with jax.named_scope("all_max" if self.largest else "all_min"):
            order, back = _order(np.dtype(x.dtype), self.largest)
            return back(allreduce_in_team(world, self.team, order(x), "max"))

    def operations(self, worker: int, x: ShapeDtype) -> Operations:
        dtype = np.dtype(f"int{8 * x.dtype.itemsize}") if is_differentiable(x.dtype) else x.dtype
        return allreduce_operations(self.team, ShapeDtype(x.shape, dtype), "max")

    def adjoint_input(self, y: ShapeDtype) -> ShapeDtype:
        return ShapeDtype((2, *y.shape), accumulation_dtype(y.dtype))

    def residual(self, x: Array, y: Array) -> Array:
        """Return where this worker has the maximum."""
        return x == y

    def before_adjoint(self, is_largest: Array, dy: Array) -> Array:
        """Return the cotangents, and the number of workers that share them, to be summed in one message."""
        wide = accumulation_dtype(np.dtype(dy.dtype))
        return jnp.stack([dy.astype(wide), is_largest.astype(wide)])

    def after_adjoint(self, is_largest: Array, sums: Array, dtype: np.dtype) -> Array:
        """Return this worker's share of the sum: as for JAX's own maximum, also for NaN."""
        return (sums[0] * is_largest / sums[1]).astype(dtype)


def _order(dtype: np.dtype, largest: bool) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """Return the order-preserving maps from values to integers (or booleans) and back. NaN is above everything."""
    if not is_differentiable(dtype):
        # `~` reverses the order, without overflow.
        return (jnp.asarray, jnp.asarray) if largest else (jnp.bitwise_not, jnp.bitwise_not)
    integer = np.dtype(f"int{8 * dtype.itemsize}")

    def mirrored(bits: Array) -> Array:
        return jnp.where(bits < 0, bits ^ np.iinfo(integer).max, bits)

    def order(x: Array) -> Array:
        x = x if largest else -x
        return mirrored(lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.nan, x).astype(dtype), integer))

    def back(bits: Array) -> Array:
        x = lax.bitcast_convert_type(mirrored(bits), dtype)
        return x if largest else -x

    return order, back


@dataclass(frozen=True)
class ExtremumPlan(AllSumPlan):
    """The maximum, or the minimum, of the blocks of each of `teams`."""

    largest: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        for worker, block in self.inputs.items():
            if jnp.issubdtype(block.dtype, jnp.complexfloating):
                raise PlanError(f"On worker {worker}: `x` is {block}, but complex numbers have no order.")

    def _movement(self, team: Workers, differentiable: bool) -> Extremum:
        return Extremum(team, differentiable, self.largest)


@dataclass(frozen=True)
class MeanPlan(Computation):
    """The mean of each team's blocks, summed in at least float32; for integers and booleans, in JAX's default float.

    `sums` holds the teams and their blocks.
    """

    sums: AllSumPlan

    @property
    def workers(self) -> Workers:
        return self.sums.workers

    def output(self, worker: int) -> ShapeDtype:
        block = self.sums.inputs[worker]
        return ShapeDtype(block.shape, np.dtype(jnp.result_type(block.dtype, float)))

    def computed(self, world: World, x: Array) -> Array:
        total = self._wide_sums.run(world, x.astype(self._wide_sums.inputs[world.rank].dtype))
        return (total / len(self.sums.team_of[world.rank])).astype(self.output(world.rank).dtype)

    @cached_property
    def _wide_sums(self) -> AllSumPlan:
        """The sums, in the dtype in which they are computed."""
        dtypes = {worker: accumulation_dtype(self.output(worker).dtype) for worker in self.sums.inputs}
        inputs = {worker: ShapeDtype(block.shape, dtypes[worker]) for worker, block in self.sums.inputs.items()}
        return AllSumPlan(self.sums.teams, inputs)


@dataclass(frozen=True)
class ProdPlan(Computation):
    """The product of each team's blocks, computed from all of them together, so that its derivative is exact at 0, too.

    `sums` holds the teams and their blocks.
    """

    sums: AllSumPlan

    @property
    def workers(self) -> Workers:
        return self.sums.workers

    def output(self, worker: int) -> ShapeDtype:
        return self.sums.inputs[worker]

    def gathered(self, worker: int) -> GatherPlan:
        """Plan the all-gather of the subtensors of the worker's team, as rows."""
        team, block = self.sums.team_of[worker], self.sums.inputs[worker]
        rows = ProductGrid(team, (ranges_of_sizes((1,) * len(team)), ((0, block.size),)))
        row = ShapeDtype((1, block.size), block.dtype)
        return GatherPlan("all_reduce", dict.fromkeys(team, row), block.dtype, rows, (0,), gathers=True)

    def computed(self, world: World, x: Array) -> Array:
        if len(self.sums.team_of[world.rank]) == 1:
            return x
        rows = self.gathered(world.rank).run(world, x.reshape(1, -1))
        wide = rows.astype(accumulation_dtype(np.dtype(x.dtype)))
        return _product(wide).astype(x.dtype).reshape(x.shape)


def _product(rows: Array) -> Array:
    """Return the product of the rows; for complex ones in real arithmetic, since `jax.checkpoint` can't save those."""
    if not jnp.issubdtype(rows.dtype, jnp.complexfloating):
        return jnp.prod(rows, axis=0)
    if rows.size == 0:
        return rows[0]
    real, imag = rows.real, rows.imag
    while (n := len(real)) > 1:  # pair by pair, leaving an odd row unchanged
        (a, c), (b, d) = (jnp.split(part[: n - n % 2], 2) for part in (real, imag))
        products, last = (a * c - b * d, a * d + b * c), (real[-1:], imag[-1:])
        real, imag = map(jnp.concatenate, zip(products, last, strict=True)) if n % 2 else products
    return lax.complex(real[0], imag[0])


def plan_all_reduce(
    shape_dtypes: ShapeDtypes,
    P_x: Partition,
    op: Operation = "sum",
    axes_reduce: int | Sequence[int] | None = None,
    axes_keep: int | Sequence[int] | None = None,
) -> MovementPlan | Computation:
    """Plan `all_reduce` from the shapes and dtypes on the workers of P_x, or on those of some of its teams."""
    _check_op(op)
    sums = plan_all_sum_reduce(shape_dtypes, P_x, _axes(P_x, axes_reduce, axes_keep))
    if op in ("max", "min"):
        return ExtremumPlan(sums.teams, sums.inputs, op == "max")
    return sums if op == "sum" else MeanPlan(sums) if op == "mean" else ProdPlan(sums)


@function_call
def all_reduce(
    x: Array,
    P_x: Partition,
    op: Operation = "sum",
    axes_reduce: int | Sequence[int] | None = None,
    axes_keep: int | Sequence[int] | None = None,
) -> Array:
    """Reduce the subtensors of `x` along dimensions of `P_x`, element by element, on every worker.

    With P_x of shape p_0 x ... x p_{D-1}, workers with equal indices outside `axes_reduce` form a team, and each of
    them gets the reduction over its team.

    | `op` | y | the cotangent of x, with s the sum of the team's cotangents of y |
    |---|---|---|
    | "sum" | the sum | s |
    | "mean" | the sum over the number of workers in the team; of blocks see below | s over that number |
    | "max", "min" | the largest, the smallest; NaN if there is one | s, shared equally by those that tie; else 0 |
    | "prod" | the product | s times the product of the others' x, exact at 0 |

    **Arguments:**

    - `x`: this worker's subtensor: any shape and dtype, the same within a team; for "max" and "min" not complex. Half
      precisions are summed and multiplied in float32 and rounded once. The sum of booleans is their "or"; their mean,
      and the mean of integers, has JAX's default float dtype. Zero-volume outside P_x.
    - `P_x`: the partition.
    - `op`: the operation. "mean" counts every worker once: the mean of blocks' means is the mean of the tensor only if
      all blocks have one size; `functional.mean` of the tensor takes any. "prod" stores the subtensors of the whole
      team during the product, the others one more.
    - `axes_reduce`, `axes_keep`: dimensions to reduce along, or to keep; at most one of the two. Default: all.

    **Returns:** an array of x's shape and, except for a mean, dtype; outside P_x, `x` itself.

    **Raises:** `InvalidArgumentError`, on every worker, for another `op`, or a dimension that P_x doesn't have;
    `PlanError`, on every worker of a team, if shapes or dtypes differ within it, or numbers have no order.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition()
    ...     return float(dj.all_reduce(jnp.float32(P.rank), P, "max"))
    >>> dj.simulate(4, program)
    [3.0, 3.0, 3.0, 3.0]

    Source: Hewett and Grady (2020), all-sum-reduce, and extensions of it.
    """
    check_partitions(P_x=P_x)
    _check_op(op)
    axes = _axes(P_x, axes_reduce, axes_keep)
    team = P_x.create_allreduction_partition(axes)
    plan = partial(plan_all_reduce, P_x=P_x, op=op, axes_reduce=axes)
    return plan_and_run(f"all_reduce ({op}) along {axes}", plan, x, P_x, team=team.ranks)


@function_call
def all_max(
    x: Array,
    P_x: Partition,
    axes_reduce: int | Sequence[int] | None = None,
    axes_keep: int | Sequence[int] | None = None,
) -> Array:
    """Return the elementwise maximum of the subtensors of `x` along dimensions of `P_x`, on every worker.

    The same as `all_reduce` with "max". The subgradient is as in `jnp.max`: tied workers share the cotangent equally. A
    softmax over split features, for instance, subtracts it without a derivative: `jax.lax.stop_gradient`.

    **Arguments:**

    - `x`: this worker's subtensor, the same shape and dtype within a team; real. Zero-volume outside P_x. To reduce x's
      own dimensions too, apply `jnp.max` first: over an empty block with `initial=-jnp.inf`.
    - `P_x`: the partition.
    - `axes_reduce`, `axes_keep`: dimensions to compare along, or to keep; at most one of the two. Default: all.

    **Returns:** an array like x; outside P_x, `x` itself.

    **Raises:** `InvalidArgumentError`, on every worker, for a dimension that P_x doesn't have; `PlanError`, on every
    worker of a team, if shapes or dtypes differ within it, or numbers have no order.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([2, 2])
    ...     return float(dj.functional.all_max(jnp.float32(P.rank), P, axes_reduce=1))
    >>> dj.simulate(4, program)
    [1.0, 1.0, 3.0, 3.0]
    """
    return all_reduce(x, P_x, "max", axes_reduce, axes_keep)


def _check_op(op: Any) -> None:
    if op not in get_args(Operation):
        raise InvalidArgumentError(f"`op` (={op!r}) must be one of {', '.join(map(repr, get_args(Operation)))}.")


def _axes(P_x: Partition, axes_reduce: Any, axes_keep: Any) -> tuple[int, ...]:
    if axes_reduce is None and axes_keep is None:
        return tuple(range(P_x.dim))
    return reduction_axes(P_x.shape, axes_reduce, axes_keep)
