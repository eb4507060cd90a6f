"""Halo exchange: each worker's block with its neighbours' data around it."""

from __future__ import annotations

from collections.abc import Sequence

from jax import Array, lax

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.partition import Partition, check_partitions
from distdl_jax.plans.decomposition import Box, ProductGrid, Range
from distdl_jax.plans.halos import Halos, needed_ranges, own_box
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.boxes import (
    BoxMovement,
    common_dtype,
    is_differentiable,
    owned_grid,
    run_boxes,
)
from distdl_jax.primitives.handshake import handshake, shape_dtype_of

Halo = tuple[tuple[int, int], ...]


def halo_exchange(x: Array, P_x: Partition, halo: Sequence[Sequence[int]], *, periodic: Sequence[bool] = ()) -> Array:
    """Widen the blocks of a tensor on `P_x` by what their neighbours hold.

    With P_x of shape p_0 x ... x p_{D-1}, a worker that owns the range [a, b) of dimension d gets the range
    [a - left, b + right), clipped to the tensor, or wrapped around it where the dimension is periodic. The data goes
    dimension by dimension, so that corners ride along, from as many neighbours as it takes where a block is narrower
    than the halo. The adjoint adds each halo's cotangent back into the block that it was copied from.

    **Arguments:**

    - `x`: this worker's block, of D dimensions; blocks may be uneven and empty. Zero-volume outside P_x.
    - `P_x`: the partition.
    - `halo`: this worker's ((left, right), ...), a pair of widths per dimension, in elements. They may differ between
      workers; those with the same index in a dimension exchange what the widest of them needs. A negative width
      leaves out data that this worker does not need. Ignored outside P_x.
    - `periodic`: per dimension, whether it wraps around. Default: none does.

    **Returns:** the wider block; outside P_x, `x`.

    **Raises:** `InvalidArgumentError`, on every worker of P_x, where the widths don't fit; `PlanError` where the
    blocks don't form a grid.

    Source: DistDL documentation, "backends" (halo exchange) and "convolution"; Hewett and Grady (2020).
    """
    check_partitions(P_x=P_x)
    wraps = tuple(bool(flag) for flag in periodic) or (False,) * P_x.dim
    if len(wraps) != P_x.dim:
        raise InvalidArgumentError(f"`periodic` (={tuple(periodic)}) must have {P_x.dim} entries, one per dimension.")
    if not P_x.active:
        return x
    purpose = f"halo_exchange on {P_x.describe()}"
    told = handshake(P_x.world, P_x.ranks, purpose, lambda: (shape_dtype_of("x", x), _checked_halo(halo, P_x.dim)))
    shape_dtypes = {worker: shape_dtype for worker, (shape_dtype, _) in told.items()}
    owned = owned_grid("x", P_x, {worker: shape_dtype.shape for worker, shape_dtype in shape_dtypes.items()})
    try:
        needed = needed_ranges(owned, [told[worker][1] for worker in P_x.ranks], wraps)
    except ValueError as error:
        raise InvalidArgumentError(f"`halo` doesn't fit the blocks of `x`: {error}") from None
    widest = exchange_ranges("halo_exchange", x, P_x, shape_dtypes, Halos(owned, needed, wraps))
    return _cropped(
        widest, P_x, owned, needed, own_box(owned, owned.cell_of[P_x.world.rank], told[P_x.world.rank][1], wraps)
    )


def _cropped(x: Array, P_x: Partition, owned: ProductGrid, needed: tuple[tuple[Range, ...], ...], box: Box) -> Array:
    """What this worker asked for, of the widest that a worker of the same index did; `x` itself where that is all."""
    index = owned.index(owned.cell_of[P_x.world.rank])
    starts = [want[0] - ranges[i][0] for want, ranges, i in zip(box, needed, index, strict=True)]
    stops = [start + want[1] - want[0] for start, want in zip(starts, box, strict=True)]
    return x if tuple(stops) == tuple(x.shape) and not any(starts) else lax.slice(x, starts, stops)


def exchange_ranges(name: str, x: Array, P_x: Partition, shape_dtypes: dict[int, ShapeDtype], halos: Halos) -> Array:
    """Give each worker of `P_x` the ranges that `halos` says it needs, from the `shape_dtypes` that all of them told.

    For workers of P_x only.
    """
    world = P_x.world
    dtype = common_dtype("x", shape_dtypes, P_x.ranks)
    steps = halos.plans(world.rank)
    mine = shape_dtypes[world.rank]
    shape = steps[-1].out_shape if steps else mine.shape
    target = ShapeDtype(shape, dtype)
    plan = BoxMovement(name, world, P_x.ranks, steps, mine, target, is_differentiable(dtype), copies=True)
    return run_boxes(plan, x)


def _checked_halo(halo: Sequence[Sequence[int]], dim: int) -> Halo:
    try:
        widths = tuple((int(left), int(right)) for left, right in halo)
    except (TypeError, ValueError):
        widths = ()
    if len(widths) != dim:
        raise InvalidArgumentError(
            f"`halo` (={halo!r}) must be {dim} pairs (left, right) of integers, one for each dimension of P_x."
        )
    return widths
