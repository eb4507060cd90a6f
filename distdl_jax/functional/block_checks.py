"""Checks of all workers' blocks in an operation; misfits raise the same error on all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

import jax.numpy as jnp
import numpy as np

from distdl_jax.errors import PlanError
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.alike import ByClass, of_team, representatives, workers_of
from distdl_jax.plans.decomposition import ProductGrid, box_shape, ranges_of_sizes
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.plans.worker_ranks import positions, union
from distdl_jax.transports.agreement import shape_dtype_of
from distdl_jax.transports.world import Workers, World

T = TypeVar("T")


@lru_cache(maxsize=64)
def is_differentiable(dtype: np.dtype) -> bool:
    """Say whether data of `dtype` has derivatives: floating and complex."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def common_shape_dtype(name: str, shape_dtypes: Mapping[int, ShapeDtype], who: str = "are summed") -> ShapeDtype:
    """Return the common shape and dtype of all of `shape_dtypes` (by world rank); list them if they differ."""
    different = {shape_dtypes[worker] for worker in representatives(shape_dtypes)}
    if len(different) > 1:
        listed = ", ".join(f"{block} on worker {worker}" for worker, block in sorted(shape_dtypes.items()))
        raise PlanError(f"`{name}` must have the same shape and dtype on all workers that {who}, but is {listed}.")
    return different.pop()


def outside(world: World, x: T, name: str = "x") -> T:
    """Return the argument `name`, a placeholder or a number, of a worker outside of an operation, unchanged.

    A block would be returned as if it were the result. The other workers don't wait: no worker agrees with this one.
    """
    if not isinstance(x, int | float | complex):
        check_placeholders(name, {world.rank: shape_dtype_of(name, x)}, ())
    return x


def check_placeholders(name: str, shape_dtypes: Mapping[int, ShapeDtype], owners: Workers) -> None:
    """Reject blocks of workers outside `owners` (world ranks), which hold no part of the tensor.

    A single number is accepted: it may be the sum over a placeholder.
    """
    if len(shape_dtypes) == len(owners):
        return
    for worker in sorted(representatives(shape_dtypes)):
        block = shape_dtypes[worker]
        if block.size > 1 and worker not in positions(owners):
            raise PlanError(
                f"`{name}` is {block} on worker {worker}, which is outside of its partition: on workers without a part "
                "of it, pass a zero-volume tensor (dj.zero_volume_tensor(dtype=...))."
            )


def common_dtype(name: str, shape_dtypes: Mapping[int, ShapeDtype], owners: Workers) -> np.dtype:
    """Return the dtype of the blocks of `owners` (world ranks); reject blocks, or another kind of dtype, elsewhere."""
    dtype, blocks = shape_dtypes[owners[0]].dtype, of_team(shape_dtypes, owners)
    if any(blocks[worker].dtype != dtype for worker in representatives(blocks)):
        listed = ", ".join(f"{shape_dtypes[worker].dtype} on worker {worker}" for worker in owners)
        raise PlanError(f"`{name}` must have one dtype on all workers that hold a part of it, but is {listed}.")
    check_kinds(name, shape_dtypes, dtype)
    check_placeholders(name, shape_dtypes, owners)
    return dtype


def check_kinds(name: str, shape_dtypes: Mapping[int, ShapeDtype], dtype: np.dtype) -> None:
    """Reject a placeholder that carries no derivative although the data does, or vice versa.

    Otherwise JAX would differentiate on some workers only, and the job would hang.
    """
    inexact = is_differentiable(dtype)
    for worker in sorted(representatives(shape_dtypes)):
        block = shape_dtypes[worker]
        if is_differentiable(block.dtype) != inexact:
            raise PlanError(
                f"`{name}` is {block} on worker {worker}, but the data is {dtype}: on workers without a part of it, "
                "pass a zero-volume tensor of the data's dtype (zero_volume_tensor(dtype=...))."
            )


def owned_grid(name: str, P: Partition, shape_dtypes: Mapping[int, ShapeDtype]) -> ProductGrid:
    """Return the grid of the blocks on `P`, balanced or not, from their shapes by world rank."""
    blocks = of_team(shape_dtypes, P.ranks)
    if isinstance(blocks, GridBlocks) and blocks.grid.shape == P.shape:
        return blocks.grid

    def listed() -> str:
        return ", ".join(f"{list(blocks[worker].shape)} on worker {worker}" for worker in P.ranks[:64])

    shapes = [blocks[worker].shape for worker in representatives(blocks)]
    if any(len(shape) != P.dim for shape in shapes):
        raise PlanError(
            f"`{name}` must have as many dimensions as its partition ({shape_text(P.shape)}), but has the shapes "
            f"{listed()}."
        )
    of_cells = np.reshape(shapes, (len(shapes), P.dim))
    of_cells = of_cells[blocks.classes.numbers] if isinstance(blocks, ByClass) else of_cells
    ranges = []
    for d, p in enumerate(P.shape):
        lengths = np.moveaxis(of_cells[:, d].reshape(P.shape), d, 0).reshape(p, -1)
        if np.any(lengths != lengths[:, :1]):
            raise PlanError(
                f"The blocks of `{name}` don't form a {shape_text(P.shape)} grid: workers with the same index in "
                f"dimension {d} must hold the same length there, but the shapes are {listed()}."
            )
        ranges.append(ranges_of_sizes(lengths[:, 0].tolist()))
    return ProductGrid(P.ranks, tuple(ranges))


class GridBlocks(ByClass[ShapeDtype]):
    """The shapes and dtypes of the blocks of all workers of a grid, by world rank; as `grid` they tile a tensor."""

    def __init__(self, grid: ProductGrid, dtype: np.dtype) -> None:
        sizes = [[stop - start for start, stop in ranges] for ranges in grid.ranges]
        super().__init__(grid.ranks, sizes, lambda worker: ShapeDtype(box_shape(grid.box(grid.cell_of[worker])), dtype))
        self.grid = ProductGrid(grid.ranks, tuple(map(ranges_of_sizes, sizes)))


def by_class(name: str, P: Partition, shape_dtypes: Mapping[int, ShapeDtype]) -> Mapping[int, ShapeDtype]:
    """Return the same shapes and dtypes by class of workers, if they are the blocks of a tensor on `P`, with one dtype.

    If other workers take part, or blocks don't fit together (checked elsewhere), they are returned unchanged.
    """
    if isinstance(shape_dtypes, GridBlocks) or workers_of(shape_dtypes) != union(P.ranks):
        return shape_dtypes
    try:
        dtypes = {shape_dtypes[worker].dtype for worker in representatives(shape_dtypes)}
        return GridBlocks(owned_grid(name, P, shape_dtypes), dtypes.pop()) if len(dtypes) == 1 else shape_dtypes
    except PlanError:
        return shape_dtypes


def block_or_placeholder(
    grid: ProductGrid, worker: int, before: ShapeDtype, dtype: np.dtype, preserve_batch: bool = True
) -> ShapeDtype:
    """Return the shape and dtype of the block of `worker` in `grid`, or of its placeholder outside it."""
    if (cell := grid.cell_of.get(worker)) is not None:
        return ShapeDtype(box_shape(grid.box(cell)), dtype)
    return ShapeDtype(zero_volume_shape(before.shape, preserve_batch), dtype)


def zero_volume_shape(shape: tuple[int, ...], preserve_batch: bool) -> tuple[int, ...]:
    """Return the shape of the placeholder for a block of `shape`: empty, with its batch dimension if preserved."""
    return (shape[0], 0) if preserve_batch and shape else (0,)
