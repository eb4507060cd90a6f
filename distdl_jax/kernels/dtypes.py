"""In which dtype numbers are summed and averaged, and the extremes of a dtype."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


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
