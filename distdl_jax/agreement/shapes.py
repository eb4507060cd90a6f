"""Exchange of shapes and dtypes, which a worker outside the source partition doesn't know.

It happens over a control communicator while a program is traced. The compiled program has the shapes built in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.agreement.agree import agree
from distdl_jax.errors import InvalidTypeError
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.world import Workers, World


def exchange_shapes(world: World, team: Workers, label: str, x: Array) -> dict[int, ShapeDtype]:
    """Return the shape and dtype of `x` on every worker of `team`, by world rank."""
    shapes: dict[int, ShapeDtype] = agree(world, team, label, lambda: shape_dtype_of("x", x))
    return shapes


def exchange_named_shapes(
    world: World, team: Workers, label: str, arrays: Mapping[str, Any]
) -> dict[int, dict[str, ShapeDtype]]:
    """Return the shape and dtype of each of `arrays` on every worker of `team`, by world rank and name."""
    shapes: dict[int, dict[str, ShapeDtype]]
    shapes = agree(world, team, label, lambda: {name: shape_dtype_of(name, x) for name, x in arrays.items()})
    return shapes


def shape_dtype_of(name: str, x: Any) -> ShapeDtype:
    """Return the shape and dtype of the argument `name`, which must be an array."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise InvalidTypeError(
            f"`{name}` (={x!r}) must be an array; a worker that holds no part of it passes zero_volume_tensor()."
        )
    try:
        dtype = np.dtype(jnp.result_type(x.dtype))
    except TypeError:
        is_key = isinstance(x, Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        advice = "; give jax.random.key_data of random keys, and wrap what comes." if is_key else "."
        raise InvalidTypeError(f"`{name}` (of dtype {x.dtype}) must be an array of numbers{advice}") from None
    return ShapeDtype(tuple(x.shape), sendable_dtype(name, dtype))


def sendable_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """Return `dtype`, the dtype of the argument `name`; refuse one of less than a byte, which no message carries."""
    if (bits := jax.dtypes.itemsize_bits(dtype)) < 8:
        raise InvalidTypeError(
            f"`{name}` (of dtype {dtype}) must be of a dtype of whole bytes, as messages are, not of {bits} bits. One "
            "of 8 bits holds the same numbers."
        )
    return dtype
