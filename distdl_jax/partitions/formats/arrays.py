"""Arrays in files from any program, which need not fit into memory: safetensors, npz, npy, HDF5 and Zarr."""

from __future__ import annotations

import mmap
import operator
import os
import threading
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import IO, Any

import numpy as np

from distdl_jax.errors import CheckpointError, InvalidArgumentError, InvalidTypeError
from distdl_jax.partitions.formats.boxes_in_files import Pause, box_of_index, fill
from distdl_jax.partitions.formats.hdf5_zarr import open_hdf5, open_zarr
from distdl_jax.partitions.formats.plain_files import PlainFile, chosen, damage_in_words, integers, read_exactly
from distdl_jax.partitions.formats.safetensors import dtype_named, read_header
from distdl_jax.partitions.formats.slices import reader_of, slice_dtype, sliced
from distdl_jax.plans.decomposition import Box, box_shape
from distdl_jax.text import brief, quoted

Halo = Sequence[tuple[int, int]]

_ZIP = b"PK\x03\x04"
_NPY = b"\x93NUMPY"


def open_array(path: str | os.PathLike[str], name: str | None = None) -> Any:
    """Return an array in a file, without reading it yet: a source for `read`.

    **Arguments:**

    - `path`: an npy, npz or safetensors file, an HDF5 file (`.h5`, `.hdf5`; requires h5py, the extra `hdf5`) or a Zarr
      array or group (a folder or zip file `.zarr`; requires zarr, the extra `zarr`). The file must not change;
      replacing it by a new one with the same name is safe.
    - `name`: of the array in the file; not needed if there is only one.

    **Returns:** an array with `shape` and `dtype` that is sliced like numpy's; only the slice is read.

    **Raises:** `InvalidArgumentError` if there is no array of that name, or a name is needed; `SetupError` if the
    package for such a file is missing; `CheckpointError` if it is damaged, not a plain file, or holds Python objects;
    later, if it has changed, for a slice; `OSError` if it can't be read.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/x.npy", np.arange(6.0))
    ...     open_array(f"{folder}/x.npy")[2:4].tolist()
    [2.0, 3.0]
    """
    path = os.fspath(path)
    path = path if "://" in path else os.path.abspath(path)  # even if the program changes its working folder later
    kind = os.path.splitext(path.rstrip("/"))[1]
    if kind in (".h5", ".hdf5"):
        return open_hdf5(path, name)
    if kind == ".zarr":
        return open_zarr(path, name)
    try:
        return chosen(path, arrays_in(path), name)
    except CheckpointError as error:
        if kind in (".npy", ".npz", ".safetensors") or not os.path.isfile(path):
            raise
        raise CheckpointError(
            f"`path` (={quoted(path)}) must end in .npy, .npz, .safetensors, .h5, .hdf5 or .zarr, and be a file of "
            f"that kind: {error}"
        ) from None


def read(source: Any, box: Box | None, halo: Halo | None = None) -> np.ndarray[Any, Any]:
    """Read a box of an array, and nothing else of it.

    **Arguments:**

    - `source`: the result of `open_array`, or the path of a file with one array; a numpy array or memory map, an h5py
      dataset, a Zarr array, or anything with `shape`, `dtype` and slices that numpy can convert (netCDF4, xarray,
      torch), of which one thread of the process reads at a time (`dj.data.one_reader`). Chunks on disk affect the time,
      not the result.
    - `box`: a range `(start, stop)` for each dimension; this worker's is `spec.box` of a `TensorSpec`. None, the box of
      a worker without a part, gives a zero-volume array.
    - `halo`: additional entries to read, `(left, right)` for each dimension; clipped at the array's boundary.

    **Returns:** a numpy array in the dtype of the source's slices (in this machine's byte order), which for packed data
    isn't the one that the source declares; masked entries are NaN. If nothing is to be read, one element tells the
    dtype. Not collective.

    **Raises:** `InvalidArgumentError` if the box or the halo don't fit the array, or entries are masked in a dtype
    without NaN; `CheckpointError` if the file is damaged or has changed; `OSError`.

    >>> x = np.arange(12).reshape(3, 4)
    >>> read(x, ((1, 3), (0, 2))).tolist(), read(x, ((1, 3), (0, 2)), halo=((1, 1), (1, 1))).shape
    ([[4, 5], [8, 9]], (3, 3))
    """
    array = open_array(source) if isinstance(source, str | os.PathLike) else source
    with reader_of(array):
        return _read(array, box, halo)


def _read(array: Any, box: Box | None, halo: Halo | None) -> np.ndarray[Any, Any]:
    check_array("source", array)
    shape = tuple(array.shape)
    if box is None:
        return np.zeros(0, slice_dtype("source", array))
    region = with_halo(_checked_box(box, shape), halo, shape)
    if isinstance(array, ArrayInFile):
        return array.read(region)
    if 0 in box_shape(region):
        return np.zeros(box_shape(region), slice_dtype("source", array))
    _check_mapped(array)
    return np.ascontiguousarray(sliced("source", array, region)).reshape(box_shape(region))


def check_array(name: str, array: Any) -> None:
    """Reject a value that is not an array."""
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        raise InvalidTypeError(f"`{name}` (={quoted(array)}) must be an array, or the path of a file with one.")


def with_halo(box: Box, halo: Halo | None, shape: Sequence[int]) -> Box:
    """Return a box with its halo, clipped at the boundary of an array of `shape`.

    >>> with_halo(((2, 4), (0, 3)), ((1, 1), (2, 2)), (5, 3))
    ((1, 5), (0, 3))
    """
    if halo is None:
        return box
    try:
        widths = [(operator.index(left), operator.index(right)) for left, right in halo]
    except (TypeError, ValueError):
        raise InvalidTypeError(
            f"`halo` (={quoted(halo)}) must hold two integers, left and right, per dimension."
        ) from None
    if len(widths) != len(shape) or any(width < 0 for pair in widths for width in pair):
        raise InvalidArgumentError(
            f"`halo` (={quoted(halo)}) must hold widths of 0 or more for each of the {len(shape)} dimensions."
        )
    return tuple(
        (max(0, start - left), min(n, stop + right)) if start < stop else (start, stop)
        for (start, stop), (left, right), n in zip(box, widths, shape, strict=True)
    )


def _checked_box(box: Any, shape: tuple[int, ...]) -> Box:
    try:
        ranges = tuple((operator.index(start), operator.index(stop)) for start, stop in box)
    except (TypeError, ValueError):
        raise InvalidTypeError(f"`box` (={quoted(box)}) must hold a range (start, stop) for each dimension.") from None
    if len(ranges) != len(shape) or not all(
        0 <= start <= stop <= n for (start, stop), n in zip(ranges, shape, strict=False)
    ):
        raise InvalidArgumentError(f"`box` (={quoted(box)}) is not a box of an array of shape {shape}.")
    return ranges


def _check_mapped(array: Any) -> None:
    """Reject a memory map whose file has become shorter: reading it would end the process by SIGBUS."""
    memory = array
    while isinstance(memory, np.ndarray):
        memory = memory.base
    if isinstance(memory, mmap.mmap) and not memory.closed and memory.size() < len(memory):
        raise CheckpointError(
            f"{getattr(array, 'filename', None) or 'A file'} has been truncated while it is a memory map: it has "
            f"{memory.size()} bytes."
        )


@dataclass(frozen=True)
class ArrayInFile:
    """An array in a file, sliced like numpy's; integers and slices read only what is needed, in rows.

    - `file`, `name`: the file, and the array's name in it.
    - `is_fortran`: whether it is column-major.
    - `offset`: the first byte in the file; None if the array is compressed, in a member of a zip file.
    """

    file: PlainFile
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int | None
    is_fortran: bool = False

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        return len(np.broadcast_to(0, self.shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self.read(tuple((0, n) for n in self.shape)).astype(dtype or self.dtype, copy=False)

    def __getitem__(self, index: Any) -> Any:
        if (place := box_of_index(index, self.shape)) is not None:
            return self.read(place[0])[place[1]]
        like = np.broadcast_to(np.empty((), self.dtype), self.shape)[index]  # reject what numpy rejects
        rows, *rest = index if isinstance(index, tuple) else (index,)
        if np.ndim(rows) == 1 and not isinstance(rows, str) and box_of_index((0, *rest), self.shape) is not None:
            rows_read = np.empty(like.shape, like.dtype)
            for n, row in enumerate(np.arange(len(self))[rows]):
                rows_read[n] = self[(row, *rest)]
            return rows_read
        return np.asarray(self)[index]

    def read(self, box: Box, pause: Pause = lambda: None) -> np.ndarray[Any, Any]:
        """Read a box of the array; `pause` is called between pieces.

        **Raises:** `OSError` if the file can't be read, `CheckpointError` if it is too short or has changed.
        """
        self.file.check()
        into = np.empty(box_shape(box), self.dtype, order="F" if self.is_fortran else "C")
        shape, part, dest = self.shape, box, into
        if self.is_fortran:
            shape, part, dest = shape[::-1], box[::-1], into.T
        place = tuple((0, length) for length in dest.shape)
        first = self.offset

        def read(start: int, view: memoryview) -> None:
            pause()
            read_exactly(self.file.descriptor, [view], (first or 0) + start)

        with damage_in_words(self.file.path, self.name):
            if first is None:
                member = f"{self.name}.npy"
                with self.file.stream() as file, zipfile.ZipFile(file) as archive, archive.open(member) as stream:
                    _npy_header(stream)
                    fill(_reader_of(stream, pause), shape, part, dest, place)
            else:
                fill(read, shape, part, dest, place)
        self.file.check()
        return into.astype(self.dtype.newbyteorder("="), copy=False)


def arrays_in(path: str) -> dict[str, ArrayInFile]:
    """Return the arrays in a safetensors, npz or npy file, by name, which is "" in an npy file.

    **Raises:** `CheckpointError` if it is none of these, `OSError` if it can't be read.
    """
    file = PlainFile(path)
    with damage_in_words(path), file.stream() as stream:
        begin = stream.read(6)
        stream.seek(0)
        if begin == _NPY:
            return {"": _npy(file, "", stream, 0, file.size)}
        if begin[:4] == _ZIP:
            return _npz(file, stream)
        return {
            name: _array(file, name, tensor.shape, dtype_named(tensor.dtype), tensor.offset, False)
            for name, tensor in read_header(file).items()
        }


def _npz(file: PlainFile, plain: IO[bytes]) -> dict[str, ArrayInFile]:
    arrays = {}
    with zipfile.ZipFile(plain) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            with archive.open(member) as stream:
                if stream.read(6) != _NPY:
                    raise CheckpointError(
                        f"{file.path} is not an npz file: its member {quoted(member.filename)} is not an array."
                    )
            if member.compress_type != zipfile.ZIP_STORED:
                with archive.open(member) as stream:
                    arrays[name] = _npy(file, name, stream, None, member.file_size)
                continue
            plain.seek(member.header_offset + 26)  # the header of a member, and the lengths of its parts
            lengths = plain.read(4)
            begin = member.header_offset + 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
            plain.seek(begin)
            arrays[name] = _npy(file, name, plain, begin, min(begin + member.file_size, file.size))
    return arrays


def _npy(file: PlainFile, name: str, stream: IO[bytes], begin: int | None, end: int) -> ArrayInFile:
    """Read a header; `begin`, `end`: the bytes of the array with its header in the file, or in a compressed stream."""
    shape, is_fortran, dtype = _npy_header(stream)
    if dtype.hasobject:
        raise CheckpointError(f"{file.path} holds Python objects under {quoted(name)}, not numbers.")
    if stream.tell() + prod(integers([*shape])) * dtype.itemsize > end:
        raise ValueError(f"{quoted(name)} is too short for its shape, {quoted(shape)}")
    return _array(file, name, shape, dtype, None if begin is None else stream.tell(), is_fortran)


def _array(
    file: PlainFile, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int | None, is_fortran: bool
) -> ArrayInFile:
    """Return an array that numpy supports; `ValueError` for too many dimensions, for instance."""
    if np.broadcast_to(np.empty((), dtype), shape).dtype != dtype:
        raise ValueError(f"{quoted(name)} is of dtype {brief(str(dtype))}, whose elements are arrays")
    return ArrayInFile(file, name, shape, dtype, offset, is_fortran)


_one_parses = threading.Lock()
"""Numpy parses a header as Python, which Python before 3.11.8 can't do in two of dj.simulate's threads at once."""


def _npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version} is unknown")
    read: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with _one_parses:
        shape, is_fortran, dtype = read(stream)
    return shape, is_fortran and len(shape) > 1, dtype


def _reader_of(stream: IO[bytes], pause: Pause) -> Callable[[int, memoryview], None]:
    """Return a function that reads bytes of the rest of a stream, at ascending positions."""
    at = 0

    def read(start: int, into: memoryview) -> None:
        nonlocal at
        while at < start:
            pause()
            skipped = len(stream.read(min(start - at, 2**20)))
            if not skipped:
                raise EOFError
            at += skipped
        while into:
            pause()
            piece = stream.read(min(len(into), 2**20))
            if not piece:
                raise EOFError
            into[: len(piece)] = piece
            into, at = into[len(piece) :], at + len(piece)

    return read
