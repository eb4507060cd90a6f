"""The placeholder that a worker holds where it owns no part of a tensor."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


def zero_volume_tensor(batch_size: int | None = None, dtype: DTypeLike = float) -> Array:
    """An array with no elements: what a worker passes, or holds, in place of a tensor that it owns no part of.

    **Arguments:**

    - `batch_size`: the length of the first dimension, where the placeholder is to keep it; else it has one dimension.
    - `dtype`: that of the data that it stands for. Default: JAX's default float.

    **Returns:** an array of shape `(batch_size, 0)`, or `(0,)`.

    >>> zero_volume_tensor(batch_size=4).shape
    (4, 0)
    """
    return jnp.zeros((0,) if batch_size is None else (batch_size, 0), dtype)
