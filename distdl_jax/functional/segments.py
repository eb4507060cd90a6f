"""Means, extrema and softmax over the entries of a split tensor with the same segment number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.functional.block_checks import common_dtype, owned_grid
from distdl_jax.functional.calls import function_call
from distdl_jax.functional.plan import Computation, ShapeDtypes, plan_and_run, taking_part
from distdl_jax.functional.rows import Rows
from distdl_jax.functional.take import TakePlan, checked_segments, plan_segment_sum, summed_partition, taken_rows
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.decomposition import ProductGrid, Range, balanced_range, balanced_ranges, index_of
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.text import documented
from distdl_jax.tracing.tie import materialize, tie
from distdl_jax.transports.world import Workers, World
from distdl_jax.validation import checked_axis


@dataclass(frozen=True)
class GroupedPlan(Computation):
    """Entries that are sent to the owners of their segments, sorted, and a computation there.

    - `operation`: "max" or "min", one number for each segment; or "softmax", one for each entry, which is sent back.
    - `gather`: the movement to the owners.
    - `segment_ids`: the numbers of all segments, in the order of the sorted entries.
    - `segments`: by index along the dimension of the entries, the segments owned there.
    """

    operation: str
    gather: TakePlan
    segment_ids: Rows
    segments: tuple[Range, ...]

    @property
    def workers(self) -> Workers:
        return self.gather.workers

    @cached_property
    def back(self) -> TakePlan:
        """The movement of each entry back to its origin."""
        outputs = self.gather.outputs
        return TakePlan("segment_softmax", outputs, self.gather.dtype, self.gather.exchange, takes=False)

    def output(self, worker: int) -> ShapeDtype:
        if self.operation == "softmax":
            return self.back.output(worker)
        block = self.gather.output(worker)
        if (own := self._own(worker)) is None:
            return block
        axis = self.gather.exchange.axis
        return ShapeDtype((*block.shape[:axis], own[1], *block.shape[axis + 1 :]), block.dtype)

    def _own(self, worker: int) -> tuple[np.ndarray, int] | None:
        """Return the worker's own segment numbers of its received entries, and its number of segments."""
        grid, axis = self.gather.exchange.entries, self.gather.exchange.axis
        if (cell := grid.cell_of.get(worker)) is None:
            return None
        (first, last), (start, stop) = grid.box(cell)[axis], self.segments[grid.index(cell)[axis]]
        return self.segment_ids.array[first:last] - start, stop - start

    def computed(self, world: World, x: Array) -> Array:
        x = self.gather.run(world, x)
        if (own := self._own(world.rank)) is not None:
            x = tie(self._of_segments(x, *own), x)
        return self.back.run(world, x) if self.operation == "softmax" else x

    def _of_segments(self, x: Array, ids: np.ndarray, n: int) -> Array:
        axis = self.gather.exchange.axis
        rows, known = jnp.moveaxis(x, axis, 0), {"num_segments": n, "indices_are_sorted": True}
        if self.operation == "softmax":
            rows = _softmax(rows.astype(accumulation_dtype(x.dtype)), ids, known).astype(x.dtype)
        else:
            extremum: Any = jax.ops.segment_max if self.operation == "max" else jax.ops.segment_min
            # The derivative compares the entries with their extremum. XLA might recompute them, off by an ulp.
            rows = extremum(materialize(rows), ids, **known)
        return jnp.moveaxis(rows, 0, axis)


def _softmax(rows: Array, ids: np.ndarray, known: dict[str, Any]) -> Array:
    largest = lax.stop_gradient(jax.ops.segment_max(rows, ids, **known))
    powers = jnp.exp(rows - largest[ids])
    return powers / jax.ops.segment_sum(powers, ids, **known)[ids]


def plan_grouped(
    shape_dtypes: ShapeDtypes,
    P_x: Partition,
    segment_ids: Any,
    num_segments: int,
    axis: int = 0,
    P_y: Partition | None = None,
    operation: str = "max",
) -> GroupedPlan:
    """Plan one of these functions from the shapes and dtypes on at least the workers of both partitions."""
    axis, (ids, n) = checked_axis("axis", axis, P_x.shape), _checked_line(segment_ids, num_segments)
    P_y = summed_partition(P_x, ids, axis, P_y)
    inputs = taking_part(shape_dtypes, P_x.ranks, P_y.ranks)
    owned, dtype = owned_grid("x", P_x, inputs), common_dtype("x", inputs, P_x.ranks)
    if jnp.issubdtype(dtype, jnp.complexfloating) or (
        operation == "softmax" and not jnp.issubdtype(dtype, jnp.floating)
    ):
        raise PlanError(f"`x` must hold {'real' if operation != 'softmax' else 'floating'} numbers, but is {dtype}.")
    if owned.extent[axis] != len(ids.array):
        raise PlanError(
            f"`segment_ids` (of length {len(ids.array)}) must have a number for each entry of `x`, of shape "
            f"{shape_text(owned.extent)}, along dimension {axis}."
        )
    order = np.argsort(ids.array, kind="stable")
    segments = balanced_ranges(n, P_y.shape[axis])
    ends = np.searchsorted(ids.array[order], np.array(segments)).tolist()
    others = ProductGrid.balanced(owned.extent, P_y.shape, P_y.ranks).ranges
    entries = ProductGrid(P_y.ranks, (*others[:axis], tuple(map(tuple, ends)), *others[axis + 1 :]))
    gather = TakePlan(f"segment_{operation}", inputs, dtype, taken_rows(owned, entries, axis, Rows(order)), takes=True)
    return GroupedPlan(operation, gather, Rows(ids.array[order]), segments)


def _checked_line(segment_ids: Any, num_segments: int) -> tuple[Rows, int]:
    ids, n = checked_segments(segment_ids, num_segments)
    if len(ids.shape) != 1:
        raise InvalidArgumentError(f"`segment_ids` (of shape {shape_text(ids.shape)}) must have one dimension.")
    return ids, n


_BY_SEGMENT = """
**Arguments:**

- `x`: this worker's block if it is in P_x, maybe unbalanced or empty, of $numbers. Elsewhere a zero-volume array.
- `P_x`: the partition of x.
- `segment_ids`: the segment numbers of all entries of the whole tensor along `axis`, 0 to `num_segments` - 1, the same
  on every worker: integers in numpy, $ids.
- `num_segments`: the number of segments.
- `axis`: the dimension of x with these entries; a negative one counts from the end.
$result

**Raises:** as in `segment_sum`$refused.

>>> import jax, distdl_jax as dj
>>> $name(jax.numpy.array([1.0, 5.0, 1.0]), dj.Partition().grid([1]), [1, 0, 1], 2).tolist()
$example

Source: $source.
"""
_ONE_FOR_EACH = {
    "refused": "",
    "ids": "of one dimension",
    "result": """\
- `P_y`: the partition of the result, as in `segment_sum`. Default: P_x, over whose workers the segments are split.

**Returns:** in P_y the balanced block of y; in P_x only, a zero-volume array; in neither, `x`.""",
}


@function_call
@documented(
    _BY_SEGMENT,
    **_ONE_FOR_EACH,
    numbers="real numbers",
    example="[5.0, 1.0]",
    source="`jax.ops.segment_max`; the aggregation of PointNet and EdgeConv",
)
def segment_max(
    x: Array, P_x: Partition, segment_ids: Any, num_segments: int, axis: int = 0, P_y: Partition | None = None
) -> Array:
    """Return the maximum over entries of a split tensor with the same number: a split `jax.ops.segment_max`.

    y[a.., i, b..] = the largest x[a.., e, b..] with segment_ids[e] = i; if there is none, the smallest number of the
    dtype, minus infinity for floating ones. An entry is sent to the worker that owns its segment if it is on another
    one; few are if sorted by segment. Tied entries share the gradient equally.
    """
    return _grouped(x, P_x, segment_ids, num_segments, axis, P_y, "max")


@function_call
@documented(_BY_SEGMENT, **_ONE_FOR_EACH, numbers="real numbers", example="[5.0, 1.0]", source="`jax.ops.segment_min`")
def segment_min(
    x: Array, P_x: Partition, segment_ids: Any, num_segments: int, axis: int = 0, P_y: Partition | None = None
) -> Array:
    """Return the minimum over entries of a split tensor with the same number: a split `jax.ops.segment_min`.

    The counterpart of `segment_max`; if no entry has the number, the largest number of the dtype.
    """
    return _grouped(x, P_x, segment_ids, num_segments, axis, P_y, "min")


@function_call
@documented(
    _BY_SEGMENT,
    numbers="floating-point numbers",
    refused="",
    ids="of one dimension",
    result="\n**Returns:** this worker's block, split like x; outside P_x, `x`.",
    example="[0.5, 1.0, 0.5]",
    source="Veličković et al. (2018), arXiv:1710.10903; jraph's function of the same name",
)
def segment_softmax(x: Array, P_x: Partition, segment_ids: Any, num_segments: int, axis: int = 0) -> Array:
    """Apply the softmax to the entries of a split tensor with the same number: the attention of graph networks.

    y[a.., e, b..] = exp(x[a.., e, b..]) / the sum of the same over all entries with the number of e. An entry is sent
    to the worker that owns its segment and back if it is on another one; few are if sorted by segment. Half precisions
    are computed in float32.
    """
    return _grouped(x, P_x, segment_ids, num_segments, axis, None, "softmax")


@function_call
@documented(
    _BY_SEGMENT,
    **_ONE_FOR_EACH | {"ids": "of one dimension or more", "refused": "; `InvalidTypeError` for booleans"},
    numbers="any numbers",
    example="[5.0, 1.0]",
    source="jraph's function of the same name; GraphSAGE's mean, Hamilton et al. (2017), arXiv:1706.02216",
)
def segment_mean(
    x: Array, P_x: Partition, segment_ids: Any, num_segments: int, axis: int = 0, P_y: Partition | None = None
) -> Array:
    """Return the mean of entries of a split tensor with the same number: `segment_sum` divided by their number.

    If no entry has the number, the mean is 0, as in jraph. Means of integers are floating-point numbers.
    """
    check_partitions(P_x=P_x)
    axis, (ids, n) = checked_axis("axis", axis, P_x.shape), checked_segments(segment_ids, num_segments)
    P_y = summed_partition(P_x, ids, axis, P_y)
    if x.dtype == jnp.bool_:
        raise InvalidTypeError(f"`x` (of dtype {x.dtype}) must hold numbers.")
    plan = partial(plan_segment_sum, P_x=P_x, segment_ids=ids, num_segments=n, axis=axis, P_y=P_y)
    y = plan_and_run(f"segment_mean of {ids!r} to {n} along {axis}", plan, x, P_x, P_y)
    if P_y.rank is None:
        return y
    start, stop = balanced_range(n, P_y.shape[axis], index_of(P_y.rank, P_y.shape)[axis])
    counts = np.maximum(np.bincount(ids.array.ravel(), minlength=n)[start:stop], 1)
    mean = y.astype(accumulation_dtype(y.dtype)) / counts.reshape(-1, *(1,) * (y.ndim - axis - 1)).astype(
        "float32" if y.dtype.itemsize < 8 else "float64"
    )
    return mean.astype(y.dtype) if jnp.issubdtype(y.dtype, jnp.inexact) else mean


def _grouped(
    x: Array, P_x: Partition, segment_ids: Any, num_segments: int, axis: int, P_y: Partition | None, operation: str
) -> Array:
    check_partitions(P_x=P_x)
    axis, (ids, n) = checked_axis("axis", axis, P_x.shape), _checked_line(segment_ids, num_segments)
    P_y = summed_partition(P_x, ids, axis, P_y)
    name = f"segment_{operation}"
    plan: Callable[[ShapeDtypes], GroupedPlan] = partial(
        plan_grouped, P_x=P_x, segment_ids=ids, num_segments=n, axis=axis, P_y=P_y, operation=operation
    )
    with jax.named_scope(name):
        return plan_and_run(f"{name} of {ids!r} to {n} along {axis}", plan, x, P_x, P_y)
