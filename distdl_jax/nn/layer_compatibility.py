"""Check of layers that follow each other: the partition of an output against the partition of the next input.

Only what is certain is refused: between layers of this library, and functions of `jax.nn`, which leave blocks where
they are. Any other function may turn dimensions, or move data itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.layer.layer import Ends, ends_of
from distdl_jax.partition import CartesianPartition, Partition
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.plans.worker_ranks import union


class Seam(NamedTuple):
    """The place in front of a layer: the layer before leaves its output on `P_y`, layer `place` takes it from `P_x`."""

    place: int
    layer: Any
    P_y: Partition
    P_x: Partition

    def __str__(self) -> str:
        takes = f"`layers[{self.place}]` ({type(self.layer).__name__}) takes its input from {self.P_x.describe()}"
        return f"{takes}, but what comes before leaves it on {self.P_y.describe()}"

    @property
    def left_out(self) -> set[int]:
        """The workers whose blocks the layer does not take."""
        return set() if self.P_y.ranks == self.P_x.ranks else set(self.P_y.ranks) - set(self.P_x.ranks)


def in_equal_blocks(P: Partition, other: Partition) -> bool:
    """Say whether each worker has the same block of a tensor on both; dimensions that are not cut may be missing."""
    alike = P.shape == other.shape if P.dim == other.dim else _cut(P) == _cut(other)
    return P.ranks == other.ranks and alike


def rearranged(P: Partition, other: Partition) -> bool:
    """Say whether both have the same workers, but these have other blocks."""
    are_grids = isinstance(P, CartesianPartition) and isinstance(other, CartesianPartition)
    if not are_grids or P.dim != other.dim or in_equal_blocks(P, other):
        return False
    return union(P.ranks) == union(other.ranks)


def _cut(P: Partition) -> tuple[int, ...]:
    return tuple(p for p in P.shape if p > 1)


def seams(layers: Sequence[Callable[..., Any]]) -> list[Seam | None]:
    """Return the seam in front of each layer; None where too little is certain of the two layers."""
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
    """Return what is certain of the partitions of layers that follow each other."""
    known = [ends_of(layer) for layer in layers if not _stays(layer)]
    return Ends(known[0].P_x, known[-1].P_y) if known else Ends()


def check_arrangement(layers: Sequence[Callable[..., Any]]) -> None:
    """Refuse a layer that takes its input from the workers of the layer before it, but in other blocks."""
    for seam in seams(layers):
        if seam is not None and rearranged(seam.P_y, seam.P_x):
            raise InvalidArgumentError(f"{seam}: a `Repartition` between them moves it.")


def check_taken(seam: Seam, shapes: Mapping[int, Sequence[int]]) -> None:
    """Refuse a layer that would leave out the block of a worker; `shapes` are the blocks' shapes, by world rank."""
    for worker in sorted(seam.left_out & shapes.keys()):
        if 0 not in (shape := tuple(shapes[worker])):
            raise PlanError(
                f"{seam}, a block of {shape_text(shape)} on worker {worker}, too: a `Repartition` between them moves "
                "it."
            )


def _stays(layer: Any) -> bool:
    """Say whether a function is known to leave blocks as they are."""
    return getattr(jax.nn, getattr(layer, "__name__", ""), None) is layer
