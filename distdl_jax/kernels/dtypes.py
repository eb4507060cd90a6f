"""In which dtype and width numbers are computed, and the extremes of a dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

_F = TypeVar("_F", bound=Callable[..., Any])

WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))
"""The dtypes that JAX would replace by half as wide ones outside of `jax.enable_x64`."""


def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which data of `dtype` is summed: float32 for half precisions, otherwise unchanged."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return np.dtype(np.float32)
    return np.dtype(dtype)


def mean_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of means of data of `dtype`: floating for integers and booleans, as in `jnp.mean`."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.dtype(dtype)
    return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)


def extreme(dtype: np.dtype, largest: bool) -> Any:
    """Return the maximum, or the minimum, of a real dtype: an infinity, if it has one."""
    if jnp.issubdtype(dtype, np.bool_):
        return np.bool_(largest)
    if jnp.issubdtype(dtype, jnp.inexact):
        infinity = np.asarray(np.inf if largest else -np.inf, dtype)
        if np.isinf(infinity):  # some 8-bit formats have none
            return infinity
    info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype)
    return dtype.type(info.max if largest else info.min)


def wide_as(values: Iterable[Any]) -> AbstractContextManager[Any]:
    """Inside, JAX has 64-bit numbers if one of these arrays, or shapes and dtypes, has them."""
    if jax.config.jax_enable_x64 or not any(getattr(x, "dtype", None) in WIDE for x in values):  # type: ignore[attr-defined, unused-ignore]
        return nullcontext()
    return jax.enable_x64(True)


def in_own_width(rule: _F) -> _F:
    """Decorate a rule of a function: JAX calls it later than the function, outside of a user's `jax.enable_x64`."""

    @wraps(rule)
    def wide(*args: Any) -> Any:
        with wide_as(jax.tree.leaves(args)):
            return rule(*args)

    return wide  # type: ignore[return-value]
