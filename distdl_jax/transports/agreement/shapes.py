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

from distdl_jax.errors import InvalidTypeError
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.world import Workers, World
from distdl_jax.transports.agreement.agree import agree


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
    if not is_array(x):
        text = repr(x)
        text = text if len(text) <= 80 else structure_text(x)
        raise InvalidTypeError(
            f"`{name}` (={text}) must be an array; a worker that holds no part of it passes zero_volume_tensor()."
        )
    try:
        dtype = np.dtype(jnp.result_type(x.dtype))
    except TypeError:
        is_key = isinstance(x, Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        advice = "; give jax.random.key_data of random keys, and wrap what comes." if is_key else "."
        raise InvalidTypeError(f"`{name}` (of dtype {x.dtype}) must be an array of numbers{advice}") from None
    return ShapeDtype(tuple(x.shape), sendable_dtype(name, dtype))


def is_array(value: Any) -> bool:
    """Return whether a value has a shape and a dtype."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def structure_text(tree: Any) -> str:
    """Describe what stands in the place of an array, or of a tree, without its numbers.

    >>> structure_text({"a": 1}), structure_text((1, 2)), structure_text(np.ones((2, 3), np.float32))
    ("a dictionary of ['a']", 'a tuple of 2', 'float32[2, 3]')
    """
    if is_array(tree):
        return str(ShapeDtype(tuple(tree.shape), np.dtype(tree.dtype)))
    if isinstance(tree, Mapping):
        return f"a dictionary of {[*tree][:8]}"
    if isinstance(tree, tuple | list):
        return f"a {type(tree).__name__} of {len(tree)}"
    return repr(tree)[:80]


def sendable_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """Return `dtype`, the dtype of the argument `name`; refuse one of less than a byte, which no message carries."""
    if (bits := jax.dtypes.itemsize_bits(dtype)) < 8:
        raise InvalidTypeError(
            f"`{name}` (of dtype {dtype}) must be of a dtype of whole bytes, as messages are, not of {bits} bits. One "
            "of 8 bits holds the same numbers."
        )
    return dtype
