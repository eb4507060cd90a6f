"""Rows of a split tensor by number, and sums of entries into rows by number: adjoints of each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.functional.block_checks import block_or_placeholder, common_dtype, owned_grid
from distdl_jax.functional.box_exchange import BoxPlan
from distdl_jax.functional.calls import function_call
from distdl_jax.functional.plan import ShapeDtypes, plan_and_run, taking_part
from distdl_jax.functional.rows import RowExchange, Rows
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.messages import ExchangePlan
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.validation import checked_axis, checked_integer, is_traced


@dataclass(frozen=True)
class TakePlan(BoxPlan):
    """Rows by number (`takes`), or the adjoint: the sums of entries into the rows with their numbers."""

    exchange: RowExchange
    takes: bool

    @property
    def copies(self) -> bool:
        return self.takes and self.exchange.repeats

    @property
    def adds(self) -> bool:
        return not self.takes and self.exchange.repeats

    def steps(self, worker: int) -> tuple[ExchangePlan, ...]:
        """Return the exchange of rows, and the copies from rows to entries; or the adjoints of both."""
        moved, copied = self.exchange.plan(worker), self.exchange.copy(worker)
        return (moved, copied) if self.takes else (copied.reverse(), moved.reverse())

    def output(self, worker: int) -> ShapeDtype:
        grid = self.exchange.entries if self.takes else self.exchange.owned
        return block_or_placeholder(grid, worker, self.inputs[worker], self.dtype)


taken_rows = lru_cache(maxsize=64)(RowExchange.of)  # shared by all layers of a network on a mesh


def plan_take(
    shape_dtypes: ShapeDtypes, P_x: Partition, indices: Any, axis: int = 0, P_y: Partition | None = None
) -> TakePlan:
    """Plan `take` from the shapes and dtypes on at least the workers of both partitions."""
    axis, rows = checked_axis("axis", axis, P_x.shape), checked_rows("indices", indices)
    P_y = taken_partition(P_x, rows, axis, P_y)
    inputs = taking_part(shape_dtypes, P_x.ranks, P_y.ranks)
    table = owned_grid("x", P_x, inputs)
    n = table.extent[axis]
    if rows.array.size and not (-n <= rows.array.min() and rows.array.max() < n):
        wrong = rows.array[(rows.array < -n) | (rows.array >= n)].flat[0]
        raise PlanError(f"`indices` holds {wrong}, but dimension {axis} of `x` has {n} rows: 0 to {n - 1}.")
    rows = Rows(np.where(rows.array < 0, rows.array + n, rows.array)) if (rows.array < 0).any() else rows
    shape = (*table.extent[:axis], *rows.shape, *table.extent[axis + 1 :])
    exchange = taken_rows(table, ProductGrid.balanced(shape, P_y.shape, P_y.ranks), axis, rows)
    return TakePlan("take", inputs, common_dtype("x", inputs, P_x.ranks), exchange, takes=True)


def plan_segment_sum(
    shape_dtypes: ShapeDtypes,
    P_x: Partition,
    segment_ids: Any,
    num_segments: int,
    axis: int = 0,
    P_y: Partition | None = None,
) -> TakePlan:
    """Plan `segment_sum` from the shapes and dtypes on at least the workers of both partitions."""
    axis, (rows, n) = checked_axis("axis", axis, P_x.shape), checked_segments(segment_ids, num_segments)
    P_y = summed_partition(P_x, rows, axis, P_y)
    inputs = taking_part(shape_dtypes, P_x.ranks, P_y.ranks)
    entries, after = owned_grid("x", P_x, inputs), axis + len(rows.shape)
    if entries.extent[axis:after] != rows.shape:
        raise PlanError(
            f"`segment_ids` (of shape {shape_text(rows.shape)}) must have a number for each entry of `x`, of shape "
            f"{shape_text(entries.extent)}, from dimension {axis} on."
        )
    shape = (*entries.extent[:axis], n, *entries.extent[after:])
    exchange = taken_rows(ProductGrid.balanced(shape, P_y.shape, P_y.ranks), entries, axis, rows)
    return TakePlan("segment_sum", inputs, common_dtype("x", inputs, P_x.ranks), exchange, takes=False)


@function_call
def take(x: Array, P_x: Partition, indices: Any, axis: int = 0, P_y: Partition | None = None) -> Array:
    """Take rows of a split tensor by their numbers: `jnp.take` of the whole tensor.

    With x of shape n_0 x ... x n_{D-1}, and `indices` of shape m_0 x ... x m_{k-1} in place of dimension `axis`:

        y[a.., e.., b..] = x[a.., indices[e..], b..]

    The numbers are known while JAX traces: the senders of a mesh's edges, the corners of its cells. So the workers plan
    which rows to send to whom. A row is sent to a worker once, however many of its entries have that number, with all
    rows for one worker in one message; nothing else moves. The adjoint is `segment_sum`: cotangents of a row are summed
    on each worker, and the sums are sent back.

    **Arguments:**

    - `x`: this worker's block if it is in P_x: D dimensions; blocks may be unbalanced and empty, of any dtype.
      Elsewhere a zero-volume array, floating or complex if and only if the data is.
    - `P_x`: the partition of x.
    - `indices`: the row numbers of all entries of the whole result, the same on every worker: integers in numpy (a
      list, a concrete JAX array), of one dimension or more; they may repeat. Negative ones count from the end.
    - `axis`: the dimension of x with the rows; a negative one counts from the end.
    - `P_y`: the partition of y, of D - 1 + k dimensions. Default: P_x, over whose workers along `axis` the first
      dimension of `indices` is split.

    **Returns:** in P_y the balanced block of y; in P_x only, a zero-volume array of the data's dtype; in neither, `x`.

    **Raises:** `InvalidTypeError` if `indices` are not integers, or are traced; `InvalidArgumentError` for a
    dimension that P_x doesn't have, or a P_y of another number of dimensions; `PlanError`, on every worker of both,
    if a number has no row, or blocks don't form a grid.

    >>> import jax, distdl_jax as dj
    >>> dj.functional.take(jax.numpy.array([1.0, 2.0, 3.0]), dj.Partition().grid([1]), [2, 0, 2, -1]).tolist()
    [3.0, 1.0, 3.0, 3.0]

    Source: `jax.numpy.take`; the ghost nodes of mesh solvers, as in PETSc's VecScatter.
    """
    check_partitions(P_x=P_x)
    axis, rows = checked_axis("axis", axis, P_x.shape), checked_rows("indices", indices)
    P_y = taken_partition(P_x, rows, axis, P_y)
    plan = partial(plan_take, P_x=P_x, indices=rows, axis=axis, P_y=P_y)
    return plan_and_run(f"take of {rows!r} along {axis}", plan, x, P_x, P_y)


@function_call
def segment_sum(
    x: Array, P_x: Partition, segment_ids: Any, num_segments: int, axis: int = 0, P_y: Partition | None = None
) -> Array:
    """Sum the entries of a split tensor with the same number: `jax.ops.segment_sum` of the whole tensor.

    With `segment_ids` of shape m_0 x ... x m_{k-1}, in place of the dimensions of x from `axis` on:

        y[a.., i, b..] = sum over the e.. with segment_ids[e..] = i of x[a.., e.., b..]

    For instance messages of edges to their receivers, or contributions of cells to their corners. The numbers are known
    while JAX traces. Each worker sums its entries for a row, and sends the sum to the worker that owns the row, with
    all rows for one worker in one message. A number without entries gives 0. The adjoint is `take`.

    **Arguments:**

    - `x`: this worker's block if it is in P_x; blocks may be unbalanced and empty, of any dtype. Half precisions are
      summed, and sent, in float32, and rounded once; the sum of booleans is their "or". Elsewhere a zero-volume array,
      floating or complex if and only if the data is.
    - `P_x`: the partition of x.
    - `segment_ids`: the segment numbers of all entries of the whole tensor, 0 to `num_segments` - 1, the same on every
      worker: integers in numpy (a list, a concrete JAX array), of one dimension or more.
    - `num_segments`: the length of y in dimension `axis`.
    - `axis`: the first dimension of x with these entries; a negative one counts from the end.
    - `P_y`: the partition of y, with k - 1 dimensions fewer than x. Default: P_x, over whose workers along the numbered
      dimensions the segments are split.

    **Returns:** in P_y the balanced block of y; in P_x only, a zero-volume array of the data's dtype; in neither, `x`.

    **Raises:** `InvalidTypeError` if `segment_ids` are not integers, or are traced; `InvalidArgumentError` for a
    number out of range, a dimension that P_x doesn't have, or a P_y of another number of dimensions; `PlanError`, on
    every worker of both, if `segment_ids` don't fit x, or blocks don't form a grid.

    >>> import jax, distdl_jax as dj
    >>> dj.functional.segment_sum(jax.numpy.array([1.0, 2.0, 3.0]), dj.Partition().grid([1]), [2, 0, 2], 4).tolist()
    [2.0, 0.0, 4.0, 0.0]

    Source: `jax.ops.segment_sum`; the adjoint of `take`.
    """
    check_partitions(P_x=P_x)
    axis, (rows, n) = checked_axis("axis", axis, P_x.shape), checked_segments(segment_ids, num_segments)
    P_y = summed_partition(P_x, rows, axis, P_y)
    plan = partial(plan_segment_sum, P_x=P_x, segment_ids=rows, num_segments=n, axis=axis, P_y=P_y)
    return plan_and_run(f"segment_sum of {rows!r} to {n} along {axis}", plan, x, P_x, P_y)


def checked_rows(name: str, value: Any) -> Rows:
    """Return the argument `name`, an array of integers known while tracing, as a value."""
    if isinstance(value, Rows):
        return value
    if is_traced(value):
        other = "jnp.take(all_gather(x, P_x, axis), indices, axis)"
        if name == "segment_ids":
            other = "reduce_scatter(jax.ops.segment_sum(x, segment_ids, num_segments), P_x, 0)"
        raise InvalidTypeError(
            f"`{name}` (={value!r}) must be known while tracing, as a numpy array and not an argument of the jit: the "
            f"messages depend on it. For numbers that change from call to call, {other} does the same with this "
            "worker's block of them."
        )
    numbers = np.asarray(value)
    if numbers.size == 0 and not hasattr(value, "dtype"):
        numbers = numbers.astype(int)
    if not np.issubdtype(numbers.dtype, np.integer):
        raise InvalidTypeError(f"`{name}` (of dtype {numbers.dtype}) must hold integers, the row numbers.")
    if numbers.ndim == 0:
        raise InvalidArgumentError(f"`{name}` (={value!r}) must have one dimension or more.")
    return Rows(numbers)


def checked_segments(
    segment_ids: Any, num_segments: int, name: str = "segment_ids", total: str = "num_segments"
) -> tuple[Rows, int]:
    """Return the argument `name`, segment numbers, as a value, and the argument `total`, the number of segments."""
    rows, n = checked_rows(name, segment_ids), checked_integer(total, num_segments, 0)
    if rows.array.size and not (rows.array.min() >= 0 and rows.array.max() < n):
        wrong = rows.array[(rows.array < 0) | (rows.array >= n)].flat[0]
        raise InvalidArgumentError(f"`{name}` holds {wrong}, but must be 0 to {n - 1} (`{total}` is {n}).")
    return rows, n


def taken_partition(P_x: Partition, rows: Rows, axis: int, P_y: Partition | None) -> Partition:
    """Return the partition of taken rows, with the dimensions of the numbers in place of `axis`."""
    more = len(rows.shape) - 1
    return _checked_or(P_x, (*P_x.shape[: axis + 1], *(1,) * more, *P_x.shape[axis + 1 :]), P_y)


def summed_partition(P_x: Partition, rows: Rows, axis: int, P_y: Partition | None) -> Partition:
    """Return the partition of sums, with one dimension in place of the dimensions of the numbers."""
    after = axis + len(rows.shape)
    if after > P_x.dim:
        raise InvalidArgumentError(
            f"`segment_ids` (of shape {shape_text(rows.shape)}) must not have more dimensions than `x` has from "
            f"dimension {axis} on, on P_x ({shape_text(P_x.shape)})."
        )
    return _checked_or(P_x, (*P_x.shape[:axis], prod(P_x.shape[axis:after]), *P_x.shape[after:]), P_y)


def _checked_or(P_x: Partition, shape: Sequence[int], P_y: Partition | None) -> Partition:
    if P_y is None:
        return P_x if P_x.shape == shape else P_x.create_cartesian_topology_partition(shape)
    check_partitions(P_x=P_x, P_y=P_y)
    if P_y.dim != len(shape):
        raise InvalidArgumentError(
            f"`P_y` ({shape_text(P_y.shape)}) must have as many dimensions as the result, {len(shape)}, like "
            f"{shape_text(tuple(shape))}."
        )
    return P_y
