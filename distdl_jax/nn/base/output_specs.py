"""The spec of a layer's output, from its blocks on all workers."""

from __future__ import annotations

from collections.abc import Sequence

from distdl_jax.errors import PlanError
from distdl_jax.functional.block_checks import owned_grid
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.partitions.partition import CartesianPartition, Partition
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.shape_dtype import shape_text


def spec_of_blocks(layer: str, blocks: ShapeDtypes, P_y: Partition, copied: Sequence[int] = ()) -> TensorSpec:
    """Return the spec of a tensor on `P_y` with the given blocks, and with copies along the dimensions `copied`.

    `layer` is the name of the layer that returns it, for errors. Raises `PlanError` if no spec describes the blocks,
    since they are not balanced.
    """
    dims = len(blocks[P_y.ranks[0]].shape)
    grid = _of_dimensions(P_y, dims, tuple(copied))
    first = TensorSpec((0,) * dims, *grid).first_copies
    extent = owned_grid("y", first, {worker: blocks[worker] for worker in first.ranks}).extent
    spec = TensorSpec(extent, *grid)
    for worker, shape in spec.block_shapes.items():
        if blocks[worker].shape != shape:
            raise PlanError(
                f"No TensorSpec describes the output of {layer}: worker {worker} gets {blocks[worker].shape}, but the "
                f"balanced block of {shape_text(extent)} on {shape_text(P_y.shape)} workers is {shape}."
            )
    others = {worker: block.shape for worker, block in blocks.items() if worker not in spec.block_shapes}
    return spec.with_placeholders({worker: shape for worker, shape in others.items() if 0 in shape})


def _of_dimensions(P: Partition, dims: int, copied: tuple[int, ...]) -> tuple[CartesianPartition, tuple[int, ...]]:
    """Return `P` with `dims` dimensions besides those of copies, and the numbers of the latter."""
    shape: list[int] = []
    replicated: list[int] = []
    for d, p in enumerate(P.shape):
        if d in copied:
            replicated.append(len(shape))
            # A tensor broadcast to more dimensions has none where its copies are.
            shape += [p] if d < P.dim - dims else [p, 1]
        else:
            shape.append(p)
    missing = dims - (len(shape) - len(replicated))
    if missing > 0:  # the tensor's first dimensions are not split
        shape, replicated = [1] * missing + shape, [d + missing for d in replicated]
    while missing < 0 and shape[-1] == 1 and len(shape) - 1 not in replicated:  # nor were its removed last ones
        shape.pop()
        missing += 1
    if missing < 0:
        raise PlanError(
            f"No TensorSpec describes an output of {dims} dimensions on a partition of {shape_text(P.shape)} workers."
        )
    return P.create_cartesian_topology_partition(shape), tuple(replicated)
