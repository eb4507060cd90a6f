"""Arrays that need not fit into memory, of which any box can be read."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from distdl_jax.checkpoint.foreign_formats import ArrayInFile, arrays_in, some
from distdl_jax.errors import CheckpointError, InvalidArgumentError, InvalidTypeError, SetupError
from distdl_jax.plans.decomposition import Box, box_shape

Halo = Sequence[tuple[int, int]]


def open_array(path: str | os.PathLike[str], name: str | None = None) -> Any:
    """An array in a file, of which nothing is read yet: something to `read` from.

    **Arguments:**

    - `path`: an npy file (which becomes a memory map), an npz or a safetensors file, an HDF5 file (`.h5`, `.hdf5`; it
      takes h5py, the extra `hdf5`) or a Zarr array or group (a folder or zip file `.zarr`; it takes zarr, the extra
      `zarr`).
    - `name`: which array of the file; not needed where it holds only one.

    **Raises:** `InvalidArgumentError` where there is no array of that name, or a name is needed; `SetupError` where
    the package is missing that reads such a file; `OSError` where it can't be read.
    """
    path = os.fspath(path)
    kind = os.path.splitext(path.rstrip("/"))[1]
    found: dict[str, Any] = {}
    if kind in (".h5", ".hdf5"):
        file = _package("h5py", "hdf5").File(path, "r", locking="best-effort")
        found = {}
        dataset = _package("h5py", "hdf5").Dataset
        file.visititems(lambda its, value: found.update({its: value}) if isinstance(value, dataset) else None)
        return _one(path, found, name)
    if kind == ".zarr":
        opened = _package("zarr", "zarr").open(path, mode="r")
        return opened if hasattr(opened, "dtype") else _one(path, dict(opened.arrays()), name)
    if kind == ".npy":
        return np.load(path, mmap_mode="r")
    try:
        found = arrays_in(path)
    except CheckpointError as error:
        if kind in (".npz", ".safetensors"):
            raise
        raise CheckpointError(
            f"`path` (={path!r}) must end in .npy, .npz, .safetensors, .h5, .hdf5 or .zarr, and be such a file: {error}"
        ) from None
    return _one(path, found, name)


def read(source: Any, box: Box | None, halo: Halo | None = None) -> np.ndarray[Any, Any]:
    """What is in a box of an array, and nothing else of it.

    **Arguments:**

    - `source`: what `open_array` returns, or the path of a file that holds one array; a numpy array or memory map, an
      h5py dataset, a Zarr array, or anything with `shape`, `dtype` and slices. How it is cut into chunks on disk does
      not matter to the result; it does to the time.
    - `box`: a range `(start, stop)` for each dimension; a `TensorSpec` says that of this worker (`spec.box`). None, the
      box of a worker that has no part: a zero-volume array comes back.
    - `halo`: how much more to read, `(left, right)` for each dimension; clipped at the array's boundary.

    **Returns:** a numpy array in the source's dtype (in this machine's byte order). Not collective.

    **Raises:** `InvalidArgumentError` where the box or the halo don't fit the array; `OSError`.

    >>> x = np.arange(12).reshape(3, 4)
    >>> read(x, ((1, 3), (0, 2))).tolist(), read(x, ((1, 3), (0, 2)), halo=((1, 1), (1, 1))).shape
    ([[4, 5], [8, 9]], (3, 3))
    """
    array = open_array(source) if isinstance(source, str | os.PathLike) else source
    check_array("source", array)
    shape, native = tuple(array.shape), np.dtype(array.dtype).newbyteorder("=")
    if box is None:
        return np.zeros(0, native)
    wanted = with_halo(_checked_box(box, shape), halo, shape)
    if isinstance(array, ArrayInFile):
        return array.read(wanted)
    if 0 in box_shape(wanted):
        return np.zeros(box_shape(wanted), native)
    found = np.asarray(array[tuple(slice(start, stop) for start, stop in wanted)])
    return np.ascontiguousarray(found, native).reshape(box_shape(wanted))


def check_array(name: str, array: Any) -> None:
    """Refuse what is no array."""
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        raise InvalidTypeError(f"`{name}` (={array!r}) must be an array, or the path of a file that holds one.")


def with_halo(box: Box, halo: Halo | None, shape: Sequence[int]) -> Box:
    """The box with its halo, clipped at the boundary of an array of `shape`.

    >>> with_halo(((2, 4), (0, 3)), ((1, 1), (2, 2)), (5, 3))
    ((1, 5), (0, 3))
    """
    if halo is None:
        return box
    try:
        widths = [(operator.index(left), operator.index(right)) for left, right in halo]
    except (TypeError, ValueError):
        raise InvalidTypeError(f"`halo` (={halo!r}) must hold two integers, left and right, per dimension.") from None
    if len(widths) != len(shape) or any(width < 0 for pair in widths for width in pair):
        raise InvalidArgumentError(
            f"`halo` (={halo!r}) must hold widths of 0 or more for each of the {len(shape)} dimensions."
        )
    return tuple(
        (max(0, start - left), min(n, stop + right)) if start < stop else (start, stop)
        for (start, stop), (left, right), n in zip(box, widths, shape, strict=True)
    )


def _checked_box(box: Any, shape: tuple[int, ...]) -> Box:
    try:
        ranges = tuple((operator.index(start), operator.index(stop)) for start, stop in box)
    except (TypeError, ValueError):
        raise InvalidTypeError(f"`box` (={box!r}) must hold a range (start, stop) for each dimension.") from None
    if len(ranges) != len(shape) or not all(
        0 <= start <= stop <= n for (start, stop), n in zip(ranges, shape, strict=False)
    ):
        raise InvalidArgumentError(f"`box` (={box!r}) is no box of an array of shape {shape}.")
    return ranges


def _one(path: str, found: dict[str, Any], name: str | None) -> Any:
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name is None or name not in found:
        raise InvalidArgumentError(f"`name` (={name!r}) must be that of an array in {path}. It holds {some(found)}.")
    return found[name]


def _package(name: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise SetupError(f"To read such a file takes {name}: pip install 'distdl_jax[{extra}]' ({error}).") from None
