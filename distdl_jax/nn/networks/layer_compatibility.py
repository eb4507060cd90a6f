"""Compatibility of adjacent layers: the partition of an output against the partition of the next input.

Only misfits that are certain are rejected: between layers of this library, and functions of `jax.nn`, which leave
blocks where they are. Any other function may transpose dimensions, or communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.nn.base.layer import BaseLayer, Ends, ends_of
from distdl_jax.partitions.partition import CartesianPartition, Partition
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.plans.worker_ranks import union


class Seam(NamedTuple):
    """The boundary before a layer: the previous layer leaves its output on `P_y`, layer `place` takes it from `P_x`."""

    place: int
    layer: Any
    P_y: Partition
    P_x: Partition

    def __str__(self) -> str:
        takes = f"`layers[{self.place}]` ({type(self.layer).__name__}) takes its input from {self.P_x.describe()}"
        return f"{takes}, but the previous layer leaves it on {self.P_y.describe()}"

    @property
    def left_out(self) -> set[int]:
        """The workers whose blocks the layer does not use."""
        return set() if self.P_y.ranks == self.P_x.ranks else set(self.P_y.ranks) - set(self.P_x.ranks)


def in_equal_blocks(P: Partition, other: Partition) -> bool:
    """Say whether each worker has the same block of a tensor on both; unsplit dimensions may be missing."""
    alike = P.shape == other.shape if P.dim == other.dim else _cut(P) == _cut(other)
    return P.ranks == other.ranks and alike


def rearranged(P: Partition, other: Partition) -> bool:
    """Say whether both have the same workers, but with different blocks."""
    are_grids = isinstance(P, CartesianPartition) and isinstance(other, CartesianPartition)
    if not are_grids or P.dim != other.dim or in_equal_blocks(P, other):
        return False
    return union(P.ranks) == union(other.ranks)


def _cut(P: Partition) -> tuple[int, ...]:
    return tuple(p for p in P.shape if p > 1)


def seams(layers: Sequence[Callable[..., Any]]) -> list[Seam | None]:
    """Return the seam before each layer; None if too little is certain about the two layers."""
    found: list[Seam | None] = []
    before: Partition | None = None
    for place, layer in enumerate(layers):
        found.append(None)
        if _stays(layer):
            continue
        P_x, P_y = ends_of(layer)
        if before is not None and P_x is not None and before.world is P_x.world:
            found[-1] = Seam(place, layer, before, P_x)
        before = P_y
    return found


def ends_of_chain(layers: Sequence[Any]) -> Ends:
    """Return what is certain of the partitions of a chain of layers."""
    known = [ends_of(layer) for layer in layers if not _stays(layer)]
    return Ends(known[0].P_x, known[-1].P_y) if known else Ends()


def check_arrangement(layers: Sequence[Callable[..., Any]]) -> None:
    """Reject a layer that takes its input from the previous layer's workers, but in different blocks."""
    for seam in seams(layers):
        if seam is not None and rearranged(seam.P_y, seam.P_x):
            raise InvalidArgumentError(f"{seam}: a `Repartition` between them moves it.")


def check_taken(seam: Seam, shapes: Mapping[int, Sequence[int]]) -> None:
    """Reject a layer that would ignore the block of a worker; `shapes` are the blocks' shapes, by world rank."""
    for worker in sorted(seam.left_out & shapes.keys()):
        if 0 not in (shape := tuple(shapes[worker])):
            raise PlanError(
                f"{seam}, a block of {shape_text(shape)} on worker {worker}, too: a `Repartition` between them moves "
                "it."
            )


def spare_copies(layers: Sequence[Any]) -> dict[int, set[int]]:
    """Return, by a layer's place, the workers with copies before it, in whose place it uses another worker's."""
    found: dict[int, set[int]] = {}
    before: Any = None
    for place, layer in enumerate(layers):
        P_x = ends_of(layer).P_x
        if isinstance(before, BaseLayer) and P_x is not None:
            found[place] = _spared(before, P_x)
        if not _stays(layer):
            before = layer
    return found


def _spared(layer: BaseLayer, P_x: Partition) -> set[int]:
    """Return the workers outside of `P_x` whose block of a layer's output is replicated on a worker of `P_x`."""
    P_y: Partition | None = layer.output_partition
    try:
        copied = layer._copied
    except PlanError:  # of a broadcast that transposes a partition, which tells nothing about copies
        return set()
    if P_y is None or not copied:
        return set()
    blocks = np.arange(P_y.size).reshape(P_y.shape)
    first = blocks[tuple(slice(0, 1) if d in copied else slice(None) for d in range(P_y.dim))]
    block_of = dict(zip(P_y.ranks, np.broadcast_to(first, P_y.shape).ravel().tolist(), strict=True))
    taken = {block_of[rank] for rank in P_x.ranks if rank in block_of}
    return {rank for rank, block in block_of.items() if rank not in P_x.ranks and block in taken}


def _stays(layer: Any) -> bool:
    """Say whether a function is known to leave blocks in place."""
    return getattr(jax.nn, getattr(layer, "__name__", ""), None) is layer
