"""Data that every worker can paint for all workers, from a name alone."""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp


def painted(name: str, shapes: Sequence[Any], dtype: Any, lead: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """For each worker an array of its shape, or a dictionary of arrays: small integers, so that sums are exact in
    every dtype; with imaginary parts where there are any."""
    rng = np.random.default_rng(zlib.crc32(f"{name} {dtype} {lead}".encode()))
    dtype = np.dtype(dtype)
    return tuple(
        jax.tree.map(lambda shape: _numbers(rng, lead + shape, dtype), each, is_leaf=is_shape) for each in shapes
    )


def smooth(name: str, shapes: Sequence[Any], lead: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """The same in float64 and not integers, for programs that are not linear."""
    return tuple(
        jax.tree.map(lambda x: np.sin(1.7 * x + np.arange(x.size).reshape(x.shape)), each)
        for each in painted(name, shapes, np.float64, lead)
    )


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    numbers = rng.integers(0 if dtype.kind in "ub" else -3, 4, shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (numbers + 1j * rng.integers(-3, 4, shape)).astype(dtype)
    return (numbers % 2 if dtype.kind == "b" else numbers).astype(dtype)


def is_shape(shape: Any) -> bool:
    """Whether this is a shape, for pytrees of shapes."""
    return isinstance(shape, tuple)
