"""Whether layers that follow each other fit: where one leaves its output, and where the next takes its input from.

Only what is known for sure is refused: of this library's layers, and of the functions of `jax.nn`, which leave blocks
where they are. Any other function may turn dimensions, or move data itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.layer.output_specs import partition_of_output
from distdl_jax.partition import CartesianPartition, Partition
from distdl_jax.plans.shape_dtype import shape_text


class Ends(NamedTuple):
    """Where layers take their input from, and where they leave their output; None where that is not known."""

    P_x: Partition | None = None
    P_y: Partition | None = None


class Seam(NamedTuple):
    """Where a layer's input comes from: the one before leaves it on `P_y`, and layer `place` takes it from `P_x`."""

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
        return set(self.P_y.ranks) - set(self.P_x.ranks)


def partition_of_input(layers: Sequence[Any]) -> Partition | None:
    """The P_x of the first layer that has one."""
    for layer in layers:
        inner = getattr(layer, "layers", None)
        P = partition_of_input(inner) if inner else getattr(layer, "P_x", None)
        if P is not None:
            return P
    return None


def in_equal_blocks(P: Partition, other: Partition) -> bool:
    """Whether each worker has the same block of a tensor on both; dimensions that are not cut may be missing."""
    alike = P.shape == other.shape if P.dim == other.dim else _cut(P) == _cut(other)
    return P.ranks == other.ranks and alike


def rearranged(P: Partition, other: Partition) -> bool:
    """Whether both are of the same workers, but these have other blocks there."""
    are_grids = isinstance(P, CartesianPartition) and isinstance(other, CartesianPartition)
    alike = are_grids and P.dim == other.dim and set(P.ranks) == set(other.ranks)
    return alike and not in_equal_blocks(P, other)


def _cut(P: Partition) -> tuple[int, ...]:
    return tuple(p for p in P.shape if p > 1)


def seams(layers: Sequence[Callable[..., Any]]) -> list[Seam | None]:
    """For each layer, between what is known of it and of the one before it; None where that is not enough."""
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


def ends_of(layer: Any) -> Ends:
    """Those of a layer, or of the layers within it."""
    if not type(layer).__module__.startswith("distdl_jax."):
        return Ends()
    if hasattr(layer, "shortcut"):  # two ways beside each other
        ways = [ends_of(its) for its in layer.layers]
        return Ends(*(next((its[end] for its in ways if its[end] is not None), None) for end in (0, 1)))
    if (inner := getattr(layer, "layers", None)) is not None:
        known = [ends_of(its) for its in inner if not _stays(its)]
        return Ends(known[0].P_x, known[-1].P_y) if known else Ends()
    if (P_x := getattr(layer, "P_x", None)) is None:
        return Ends()
    return Ends(P_x, None if _makes_copies(layer) else partition_of_output((layer,), P_x))


def check_arrangement(layers: Sequence[Callable[..., Any]]) -> None:
    """Refuse layers one of which takes the blocks of the one before it for others, of the same workers."""
    for seam in seams(layers):
        if seam is not None and rearranged(seam.P_y, seam.P_x):
            raise InvalidArgumentError(f"{seam}: a `Repartition` between them moves it.")


def check_taken(seam: Seam, shapes: Mapping[int, Sequence[int]]) -> None:
    """Refuse a layer that would leave out what the one before it has left on some of the workers that hold `shapes`."""
    for worker in sorted(seam.left_out & shapes.keys()):
        if 0 not in (shape := tuple(shapes[worker])):
            raise PlanError(
                f"{seam}, a block of {shape_text(shape)} on worker {worker}, too: a `Repartition` between them moves "
                "it."
            )


def _stays(layer: Any) -> bool:
    """Whether it is known to leave blocks as they are."""
    return getattr(jax.nn, getattr(layer, "__name__", ""), None) is layer


def _makes_copies(layer: Any) -> bool:
    """Whether it leaves the same on several workers, one of which may do for what follows."""
    try:
        return bool(getattr(layer, "_copied", ()))
    except PlanError:  # of a broadcast that transposes, which no spec describes
        return True
