"""What a layer makes of a tensor as a whole: the spec of its output from that of its input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.partition import CartesianPartition, Partition
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.primitives.block_checks import owned_grid
from distdl_jax.primitives.plan import Plan, ShapeDtypes
from distdl_jax.tensors import TensorSpec, check_spec


class Planned(Protocol):
    """What has a plan: every layer."""

    def plan(self, x: ShapeDtypes) -> Plan:
        """What it makes of what all workers hold."""


def output_spec(layer: Planned, x_spec: TensorSpec, P_y: Partition, copied: Sequence[int] = ()) -> TensorSpec:
    """The spec of what `layer` leaves on `P_y`, with copies along its dimensions `copied`; nothing moves.

    Raises `PlanError` where x does not fit, or no spec describes the output, since its blocks are not balanced.
    """
    check_spec(x_spec, "x_spec")
    P_x = getattr(layer, "P_x", x_spec.partition)
    if x_spec.replicated or (x_spec.partition.ranks, x_spec.partition.shape) != (P_x.ranks, P_x.shape):
        raise InvalidArgumentError(
            f"`x_spec` (={x_spec!r}) must be of a tensor on P_x, {P_x.describe()}, and without copies."
        )
    takes_indices = getattr(_first_with_parameters(layer), "takes_indices", False)
    dtype = np.dtype(np.int32 if takes_indices else np.float32)  # shapes don't depend on it
    x = {worker: ShapeDtype(x_spec.shape_on(worker), dtype) for worker in range(P_x.world.size)}
    after = layer.plan(x).after(x)
    dims = len(after[P_y.ranks[0]].shape)
    grid = _of_dimensions(P_y, dims, tuple(copied))
    first = TensorSpec((0,) * dims, *grid).first_copies
    extent = owned_grid("y", first, {worker: after[worker] for worker in first.ranks}).extent
    spec = TensorSpec(extent, *grid)
    for worker, shape in spec.block_shapes.items():
        if after[worker].shape != shape:
            raise PlanError(
                f"No TensorSpec describes the output of {layer!r}: worker {worker} gets {after[worker].shape}, but the "
                f"balanced block of {shape_text(extent)} on {shape_text(P_y.shape)} workers is {shape}."
            )
    others = {worker: held.shape for worker, held in after.items() if worker not in spec.block_shapes}
    return spec.with_placeholders({worker: shape for worker, shape in others.items() if 0 in shape})


def partition_of_output(layers: Sequence[Any], P_x: Partition) -> Partition:
    """Where the last of `layers` leaves its output: on its P_y, or P_x; functions leave it where it is."""
    return _partition_of_output(layers) or P_x


def _partition_of_output(layers: Sequence[Any]) -> Partition | None:
    for layer in reversed(layers):
        inner = getattr(layer, "layers", None)
        P = _partition_of_output(inner) if inner else getattr(layer, "P_y", None) or getattr(layer, "P_x", None)
        if P is not None:
            return P
    return None


def _first_with_parameters(layer: Any) -> Any:
    """It, or the first of its layers, that has parameters; what comes before moves data, say, of every dtype."""
    inner = getattr(layer, "layers", None)
    if inner is None:
        return layer if hasattr(layer, "param_specs") and layer.param_specs() else None
    return next((found for its in inner if (found := _first_with_parameters(its)) is not None), None)


def _of_dimensions(P: Partition, dims: int, copied: tuple[int, ...]) -> tuple[CartesianPartition, tuple[int, ...]]:
    """`P`, with a dimension for each of the tensor, and beside them those along which there are copies."""
    shape: list[int] = []
    replicated: list[int] = []
    for d, p in enumerate(P.shape):
        if d in copied:
            replicated.append(len(shape))
            # A tensor of fewer dimensions, of a broadcast to more of them, has none where its copies are.
            shape += [p] if d < P.dim - dims else [p, 1]
        else:
            shape.append(p)
    missing = dims - (len(shape) - len(replicated))
    if missing > 0:  # the tensor's first dimensions are not split
        shape, replicated = [1] * missing + shape, [d + missing for d in replicated]
    while missing < 0 and shape[-1] == 1 and len(shape) - 1 not in replicated:  # nor were its last ones, which are gone
        shape.pop()
        missing += 1
    if missing < 0:
        raise PlanError(
            f"No TensorSpec describes an output of {dims} dimensions on a partition of {shape_text(P.shape)} workers."
        )
    return P.create_cartesian_topology_partition(shape), tuple(replicated)
