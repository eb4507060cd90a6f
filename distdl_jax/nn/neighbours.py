"""Whether layers that follow each other fit: where one leaves its output, and where the next takes its input from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.nn.layer import Layer
from distdl_jax.output_specs import partition_of_output
from distdl_jax.partition import CartesianPartition, Partition


def partition_of_input(layers: Sequence[Any]) -> Partition | None:
    """The P_x of the first layer that has one."""
    for layer in layers:
        inner = getattr(layer, "layers", None)
        P = partition_of_input(inner) if inner else getattr(layer, "P_x", None)
        if P is not None:
            return P
    return None


def in_equal_blocks(P: Partition, other: Partition) -> bool:
    """Whether each worker has the same block of a tensor on both; dimensions that are not cut may be missing.

    A partition that is no grid does not say how it is cut.
    """
    if not (isinstance(P, CartesianPartition) and isinstance(other, CartesianPartition)):
        return set(P.ranks) == set(other.ranks)
    alike = P.shape == other.shape if P.dim == other.dim else _cut(P) == _cut(other)
    return P.ranks == other.ranks and alike


def _cut(P: Partition) -> tuple[int, ...]:
    return tuple(p for p in P.shape if p > 1)


def check_neighbours(layers: Sequence[Callable[..., Any]]) -> None:
    """Refuse layers one of which would leave out blocks that the ones before it leave, or take them for others.

    After copies were made one of them may do. A function may turn dimensions, so that after it the workers alone count.
    """
    P: Partition | None = None
    turned = False
    for place, layer in enumerate(layers):
        turned = turned or not isinstance(layer, Layer)
        P_x = partition_of_input((layer,))
        if P_x is None:
            continue
        if P is not None and P.world is P_x.world:
            fits = set(P.ranks) == set(P_x.ranks) if turned else in_equal_blocks(P, P_x)
            if not fits:
                raise InvalidArgumentError(
                    f"`layers[{place}]` ({type(layer).__name__}) takes its input from {P_x.describe()}, but what "
                    f"comes before leaves it on {P.describe()}: a `Repartition` between them moves it."
                )
        P, turned = None if _makes_copies(layer) else partition_of_output((layer,), P_x), False


def _makes_copies(layer: Any) -> bool:
    """Whether the last that moves anything leaves the same on several workers."""
    if inner := getattr(layer, "layers", None):
        last = next((its for its in reversed(inner) if partition_of_input((its,)) is not None), None)
        return _makes_copies(last)
    try:
        return bool(getattr(layer, "_copied", ()))
    except PlanError:  # of a broadcast that transposes, which no spec describes
        return True
