"""Checks of arguments that several of these functions share."""

from __future__ import annotations

from collections.abc import Sequence

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.partitions.partition import Partition
from distdl_jax.validation import checked_axes, checked_integers

Sizes = int | Sequence[int]


def checked_dimensions(axes: Sizes | None, default: Sequence[int], P_x: Partition) -> tuple[int, ...]:
    """Return the argument `axes`, one dimension of P_x or more, in the order in which they are given."""
    along = tuple(default) if axes is None else checked_integers("axes", axes, or_one=True)
    checked_axes("axes", along, P_x.shape)
    if not along:
        raise InvalidArgumentError(f"`axes` (={axes!r}) must name a dimension or more of P_x, which has {P_x.dim}.")
    return tuple(d % P_x.dim for d in along)


def checked_per_axis(name: str, values: Sizes, axes: tuple[int, ...], least: int) -> dict[int, int]:
    """Return the argument `name`, one integer or one for each of `axes`, by dimension, ascending."""
    numbers = checked_integers(name, values, or_one=True)
    numbers = numbers * len(axes) if len(numbers) == 1 else numbers
    if len(numbers) != len(axes) or min(numbers, default=least) < least:
        raise InvalidArgumentError(
            f"`{name}` (={values!r}) must be an integer, {least} or more, or one for each of the dimensions {axes}."
        )
    return dict(sorted(zip(axes, numbers, strict=True)))
