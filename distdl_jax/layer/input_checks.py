"""Checks of a layer's input that several layers share: in the same words on all workers."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from distdl_jax.errors import PlanError
from distdl_jax.partition import Partition
from distdl_jax.plans.decomposition import ProductGrid, balanced_ranges
from distdl_jax.primitives.block_checks import common_dtype, owned_grid
from distdl_jax.primitives.plan import ShapeDtypes


def real_grid(
    name: str, x: ShapeDtypes, P_x: Partition, lengths: Mapping[int, int | None]
) -> tuple[ProductGrid, np.dtype]:
    """Return the grid of the blocks of `x` on `P_x`, and their dtype, which must be real and floating.

    - `lengths`: by dimension, the length that the tensor must have, None for any: there, blocks must be balanced.

    **Raises:** `PlanError` where x is not so.
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
                f"have lengths {blocks} there."
            )
    return grid, dtype
