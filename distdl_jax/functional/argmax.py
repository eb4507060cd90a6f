"""Argmax along a dimension that is split."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import PlanError
from distdl_jax.functional.all_reduce import plan_all_reduce
from distdl_jax.functional.block_checks import common_dtype, outside, owned_grid
from distdl_jax.functional.collectives import extreme
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import materialize
from distdl_jax.transports.agreement import compared, exchange_shapes
from distdl_jax.validation import checked_axis


@compared
def argmax(x: Array, P_x: Partition, axis: int = 1) -> Array:
    """Return the index, in the whole tensor, of the largest element along `axis`: `jnp.argmax` of a split tensor.

    **Arguments:**

    - `x`: this worker's block on P_x, of real numbers or bools; blocks may be uneven and empty. Zero-volume outside
      P_x.
    - `P_x`: the partition, of as many dimensions as the tensor.
    - `axis`: the dimension. Two numbers for each line along it are reduced over the workers along it.

    **Returns:** an int32 array of the block's shape without `axis`, the same on all workers along it; of equal elements
    the first, and NaN above all, as in `jnp.argmax`. Outside P_x, `x`.

    **Raises:** `InvalidArgumentError` for a dimension that P_x doesn't have; `PlanError`, on every worker of P_x, where
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
        raise PlanError(f"`x` (of shape {grid.extent}) must have an element along dimension {axis}, to have a largest.")
    assert P_x.rank is not None
    start, stop = grid.box(P_x.rank)[axis]
    x, none = lax.stop_gradient(x), np.int32(np.iinfo(np.int32).max)
    # Materialized: the array sent is compared with the answer.
    mine = materialize(jnp.max(x, axis, initial=extreme(np.dtype(x.dtype), largest=False)))
    lines = _lines(P_x, grid, axis, mine.dtype)
    largest = plan_all_reduce(lines, P_x, "max", axis).run(P_x.world, mine)
    if start == stop:
        place = jnp.full(mine.shape, none)
    else:
        attained = (mine == largest) | (mine != mine)
        place = jnp.where(attained, jnp.argmax(x, axis).astype(np.int32) + np.int32(start), none)
    lines = _lines(P_x, grid, axis, np.dtype(np.int32))
    first: Array = plan_all_reduce(lines, P_x, "min", axis).run(P_x.world, place)
    return first


def _lines(P_x: Partition, grid: ProductGrid, axis: int, dtype: np.dtype) -> ShapeDtypes:
    """Return the shape and dtype on each worker of one number for each line along `axis`."""
    shapes = {}
    for worker in P_x.ranks:
        box = grid.box(grid.cell_of[worker])
        shape = tuple(stop - start for d, (start, stop) in enumerate(box) if d != axis)
        shapes[worker] = ShapeDtype(shape, np.dtype(dtype))
    return shapes
