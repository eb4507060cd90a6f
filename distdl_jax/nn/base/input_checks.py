"""Checks of arguments and inputs that several layers share, with the same message on all workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import common_dtype, owned_grid
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.decomposition import ProductGrid, balanced_ranges
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.validation import check_key, checked_boolean, is_real


def real_grid(
    name: str, x: ShapeDtypes, P_x: Partition, lengths: Mapping[int, int | None]
) -> tuple[ProductGrid, np.dtype]:
    """Return the grid of the blocks of `x` on `P_x`, and their dtype, which must be real and floating.

    - `lengths`: the length required in each dimension, or None for any; where one is required, blocks must be balanced.

    **Raises:** `PlanError` if x does not satisfy this.
    """
    dtype = common_dtype(name, x, P_x.ranks)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise PlanError(f"`{name}` must hold real floating-point numbers, but is {dtype}.")
    grid = owned_grid(name, P_x, x)
    for d, length in lengths.items():
        n = grid.extent[d] if length is None else length
        if grid.ranges[d] != balanced_ranges(n, P_x.shape[d]):
            blocks = [stop - start for start, stop in grid.ranges[d]]
            raise PlanError(
                f"`{name}` must have length {n} in dimension {d}, balanced over {P_x.shape[d]} workers, but its blocks "
                f"there have lengths {blocks}."
            )
    return grid, dtype


def check_features(P_x: Any, dims: int) -> None:
    """Reject anything but a partition of a batch, channels, and `dims` feature dimensions."""
    check_partitions(P_x=P_x)
    if P_x.dim != dims + 2:
        raise InvalidArgumentError(
            f"`P_x` ({shape_text(P_x.shape)}) must have {dims + 2} dimensions: batch, channels, and {dims} feature "
            "dimensions."
        )


def check_probability(name: str, value: Any) -> None:
    """Reject anything but a number from 0 to below 1."""
    if not is_real(value) or not 0 <= value < 1:
        raise InvalidArgumentError(f"`{name}` (={value!r}) must be a probability, from 0 to below 1.")


def checked_key(key: Array | None, training: bool, draws: bool) -> Array | None:
    """Return the argument `key`, which a layer with random numbers needs in training; None if nothing is drawn."""
    if not (checked_boolean("training", training) and draws):
        return None
    if key is None:
        raise InvalidArgumentError("`key` (=None) must be a random key in training, the same on every worker.")
    check_key("key", key)
    return key
