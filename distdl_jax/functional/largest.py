"""The largest elements along a dimension that may be split, and their indices."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import PlanError
from distdl_jax.functional.all_gather import GatherPlan, plan_all_gather
from distdl_jax.functional.all_reduce import plan_all_reduce
from distdl_jax.functional.block_checks import common_dtype, outside, owned_grid
from distdl_jax.functional.calls import function_call
from distdl_jax.functional.plan import Plan, ShapeDtypes, taking_part
from distdl_jax.kernels.dtypes import extreme
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import materialize, tie
from distdl_jax.transports.agreement import exchange_shapes
from distdl_jax.transports.world import Workers, World
from distdl_jax.validation import checked_axis, checked_integer


@dataclass(frozen=True)
class TopKPlan(Plan):
    """The largest `k` along `axis`: each worker's own, gathered along the dimension, and the largest of these.

    - `blocks`: of x, on P_x.
    - `values`, `places`: the gathering of the values, and of their indices.
    """

    k: int
    axis: int
    blocks: ProductGrid
    values: GatherPlan
    places: GatherPlan

    @property
    def workers(self) -> Workers:
        return self.values.workers

    def output(self, worker: int) -> ShapeDtype:
        """Return the shape and dtype of the values of `worker`; the indices have the same shape."""
        shape = list(self.values.inputs[worker].shape)
        shape[self.axis] = self.k
        return ShapeDtype(tuple(shape), self.values.dtype)

    def run(self, world: World, x: Array) -> tuple[Array, Array]:
        """Return the values and the indices, given this worker's block `x`."""
        start, _ = self.blocks.box(self.blocks.cell_of[world.rank])[self.axis]
        values, places = largest(x, self.values.inputs[world.rank].shape[self.axis], self.axis)
        candidates = tie(self.values.run(world, values), x)
        places = self.places.run(world, places + np.int32(start))
        values, chosen = largest(candidates, self.k, self.axis)
        return values, jnp.take_along_axis(places, chosen, self.axis)


def largest(x: Array, k: int, axis: int) -> tuple[Array, Array]:
    """Return the `k` largest elements along `axis`, in descending order, and their indices: `lax.top_k`."""
    values, places = lax.top_k(jnp.moveaxis(x, axis, -1), k)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(places, -1, axis).astype(np.int32)


def plan_top_k(shape_dtypes: ShapeDtypes, P_x: Partition, k: int, axis: int = -1) -> TopKPlan:
    """Plan `top_k` from the shapes and dtypes on at least the workers of P_x."""
    k, axis = checked_integer("k", k, 0), checked_axis("axis", axis, P_x.shape)
    inputs = taking_part(shape_dtypes, P_x.ranks)
    dtype, blocks = common_dtype("x", inputs, P_x.ranks), owned_grid("x", P_x, inputs)
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise PlanError(f"`x` must hold real numbers, which have an order, but is {dtype}.")
    if k > blocks.extent[axis]:
        raise PlanError(
            f"`k` (={k}) must be at most the length of `x` (of shape {blocks.extent}) along dimension {axis}."
        )
    values, places = {}, {}
    for worker, block in inputs.items():
        shape = list(block.shape)
        shape[axis] = min(k, shape[axis])
        values[worker], places[worker] = ShapeDtype(tuple(shape), dtype), ShapeDtype(tuple(shape), np.dtype(np.int32))
    return TopKPlan(k, axis, blocks, *(plan_all_gather(each, P_x, axis) for each in (values, places)))


@function_call
def top_k(x: Array, P_x: Partition, k: int, axis: int = -1) -> tuple[Array, Array]:
    """Return the `k` largest elements along `axis`, and their indices in the whole tensor: a split `jax.lax.top_k`.

    All workers along `axis` get copies of the same result; along the other dimensions each has its block. In reverse
    mode the cotangents of the copies of a value are summed, and sent to the worker that owns the element. So if every
    copy is used in the loss, it counts once for each, as with `all_gather`: use it on one worker, or divide.

    **Arguments:**

    - `x`: this worker's block on P_x, of real numbers or integers; blocks may be uneven and empty. Zero-volume outside
      P_x.
    - `P_x`: the partition, with as many dimensions as the tensor.
    - `k`: the number of elements, at most the length of the tensor along `axis`.
    - `axis`: the dimension; negative ones count from the end. The k largest of each worker along it are sent to all of
      them, values and indices, in two movements; there is no communication if it is not split.

    **Returns:** the values, in descending order, with the block's shape except k along `axis`, in x's dtype; and the
    indices, int32. Equal elements are ordered by index, and NaN comes first. Outside P_x, `x` and an empty int32 array.

    **Raises:** `InvalidArgumentError` for a negative `k`, or a dimension that P_x doesn't have; `PlanError`, on every
    worker of P_x, if `k` exceeds the number of elements, x is complex or boolean, or the blocks don't form a grid.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> [each.tolist() for each in top_k(jax.numpy.array([3.0, 7.0, 7.0, 1.0]), P, 2)]
    [[7.0, 7.0], [1, 2]]

    Source: `jax.lax.top_k`; the gathering is Hewett and Grady's (2020).
    """
    check_partitions(P_x=P_x)
    k, axis = checked_integer("k", k, 0), checked_axis("axis", axis, P_x.shape)
    if not P_x.active:
        return outside(P_x.world, x), jnp.zeros((0,), np.int32)
    label = f"top_k of {k} along {axis} on {P_x.describe()}"
    with jax.named_scope("top_k"):
        shape_dtypes = exchange_shapes(P_x.world, tuple(sorted(P_x.ranks)), label, x)
        return plan_top_k(shape_dtypes, P_x, k, axis).run(P_x.world, x)


@function_call
def argmax(x: Array, P_x: Partition, axis: int = 1) -> Array:
    """Return the index, in the whole tensor, of the largest element along `axis`: a split `jnp.argmax`.

    **Arguments:**

    - `x`: this worker's block on P_x, of real numbers or bools; blocks may be uneven and empty. Zero-volume outside
      P_x.
    - `P_x`: the partition, with as many dimensions as the tensor.
    - `axis`: the dimension. For each line along it, two numbers are reduced over the workers along it.

    **Returns:** an int32 array of the block's shape without `axis`, the same on all workers along it; the first of
    equal elements, with NaN above all, as in `jnp.argmax`. Outside P_x, `x`.

    **Raises:** `InvalidArgumentError` for a dimension that P_x doesn't have; `PlanError`, on every worker of P_x, if
    the blocks don't form a grid, or the tensor has no elements along `axis`.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([1, 2])
    ...     logits = dj.TensorSpec((2, 4), P).block(jnp.array([[1.0, 5, 2, 3], [1, 2, 9, 4]]))
    ...     return dj.functional.argmax(logits, P).tolist()
    >>> dj.simulate(2, program)
    [[1, 2], [1, 2]]
    """
    check_partitions(P_x=P_x)
    axis = checked_axis("axis", axis, P_x.shape)
    if not P_x.active:
        return outside(P_x.world, x)
    team = tuple(sorted(P_x.ranks))
    shape_dtypes = exchange_shapes(P_x.world, team, f"argmax along {axis} on {P_x.describe()}", x)
    common_dtype("x", shape_dtypes, P_x.ranks)
    return argmax_of(x, P_x, owned_grid("x", P_x, shape_dtypes), axis)


def argmax_of(x: Array, P_x: Partition, grid: ProductGrid, axis: int) -> Array:
    """Return `argmax`, given the blocks of all workers, `grid`."""
    if grid.extent[axis] == 0:
        raise PlanError(f"`x` (of shape {grid.extent}) must have an element along dimension {axis}.")
    assert P_x.rank is not None
    start, stop = grid.box(P_x.rank)[axis]
    x, none = lax.stop_gradient(x), np.int32(np.iinfo(np.int32).max)
    # Materialized: the array sent is compared with the answer.
    own = materialize(jnp.max(x, axis, initial=extreme(np.dtype(x.dtype), largest=False)))
    lines = _lines(P_x, grid, axis, own.dtype)
    largest = plan_all_reduce(lines, P_x, "max", axis).run(P_x.world, own)
    if start == stop:
        place = jnp.full(own.shape, none)
    else:
        attained = (own == largest) | (own != own)
        place = jnp.where(attained, jnp.argmax(x, axis).astype(np.int32) + np.int32(start), none)
    lines = _lines(P_x, grid, axis, np.dtype(np.int32))
    return plan_all_reduce(lines, P_x, "min", axis).run(P_x.world, place)


def _lines(P_x: Partition, grid: ProductGrid, axis: int, dtype: np.dtype) -> ShapeDtypes:
    """Return the shape and dtype on each worker of one number for each line along `axis`."""
    shapes = {}
    for worker in P_x.ranks:
        box = grid.box(grid.cell_of[worker])
        shape = tuple(stop - start for d, (start, stop) in enumerate(box) if d != axis)
        shapes[worker] = ShapeDtype(shape, np.dtype(dtype))
    return shapes
