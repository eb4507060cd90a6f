"""Slices of arrays of any library: which dtype they really have, their masks, and one reader at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.plans.decomposition import Box
from distdl_jax.transports.threads.one_reader import one_reader

_EXACT_AND_SAFE = {"distdl_jax", "h5py", "zarr"}
"""Packages whose slices have the declared dtype, and which threads may call at once."""

_KNOWN = np.ndarray, np.generic, jax.Array
"""The same of numpy and JAX."""


def reader_of(array: Any) -> AbstractContextManager[None]:
    """Return a context in which this thread may use an array: netCDF4 calls its library even for a shape."""
    return nullcontext() if _is_exact_and_safe(array) else one_reader()


def sliced(name: str, array: Any, box: Box) -> np.ndarray[Any, Any]:
    """Read a box of the argument `name`, as `plain` returns it."""
    return plain(name, _raw(name, array, box), array)


def slice_dtype(name: str, array: Any) -> np.dtype[Any]:
    """Return the dtype of an array's slices, the same on all workers, in this machine's byte order.

    The declared one may be the stored one: a packed variable of netCDF4 declares int16, and its slices are float64. So
    one element is read, whatever this worker's box is; not of numpy, JAX, h5py and Zarr.
    """
    if not _is_exact_and_safe(array):
        with suppress(*() if all(array.shape) else (Exception,)):  # a source may not be able to slice nothing
            return _native(_raw(name, array, tuple((0, min(n, 1)) for n in array.shape)).dtype)
    try:
        return _native(np.dtype(array.dtype))
    except TypeError:
        raise InvalidTypeError(f"`{name}` must have a dtype of numpy, not {array.dtype}.") from None


def plain(name: str, values: np.ndarray[Any, Any], source: Any = None) -> np.ndarray[Any, Any]:
    """Return values as a plain array, in this machine's byte order, with NaN for masked entries.

    `source` is the array of which the values are a slice, for messages.

    **Raises:** `InvalidArgumentError` if entries are missing, but the dtype has no NaN.
    """
    array, mask = np.asarray(values), np.ma.getmask(values)  # of a masked array, what is below its mask
    array = array.astype(_native(array.dtype), copy=False)
    if b"\1" not in mask.tobytes():
        return array
    if not jnp.issubdtype(array.dtype, np.inexact):
        variable = getattr(source, "name", None)
        called = f"{variable!r}, of" if isinstance(variable, str) else "of"
        raise InvalidArgumentError(
            f"`{name}` ({called} dtype {array.dtype}) has masked entries, for which only floating dtypes have NaN. "
            "Convert it to one, or fill them (`x.filled(0)`); netCDF4's `variable.set_auto_mask(False)` reads what is "
            "stored in their places."
        )
    array = array.copy()
    array[mask] = np.nan
    return array


def as_numpy(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Return the argument `name`, or a part of it, as a numpy array, which may be masked."""
    try:
        return value if isinstance(value, np.ndarray) else np.asarray(value)
    except TypeError as error:
        raise InvalidTypeError(
            f"`{name}` (of type {type(value).__name__}) can't be converted to an array of numpy: {error}"
        ) from error


def _raw(name: str, array: Any, box: Box) -> np.ndarray[Any, Any]:
    """Read a box, which may be masked."""
    with reader_of(array):  # the conversion, too: xarray reads when its slice is converted
        return as_numpy(name, array[tuple(slice(start, stop) for start, stop in box)])


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("=")


def _is_exact_and_safe(array: Any) -> bool:
    return isinstance(array, _KNOWN) or type(array).__module__.partition(".")[0] in _EXACT_AND_SAFE
