"""Integers that number classes, rows or places, in a dtype in which each can be compared with all others."""

from __future__ import annotations

import numpy as np
from jax import Array


def as_indices(x: Array) -> Array:
    """Return integers or booleans in at least 32 bits, signed where they were narrower.

    JAX compares in the dtype of the array: of bytes, 256 would be 0, and -100 a class.
    """
    return x if x.dtype.itemsize >= 4 else x.astype(np.int32)
