"""Arrays in files of any program that need not fit into memory: safetensors, npz, npy, HDF5 and Zarr."""

from __future__ import annotations

import errno
import lzma
import operator
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import IO, Any

import numpy as np

from distdl_jax.errors import CheckpointError, InvalidArgumentError, InvalidTypeError, SetupError
from distdl_jax.formats.hyperslabs import Pause, fill, open_to_read, read_exactly
from distdl_jax.formats.safetensors import dtype_named, read_header
from distdl_jax.formats.strict_json import integers
from distdl_jax.plans.decomposition import Box, box_shape

Halo = Sequence[tuple[int, int]]

_ZIP = b"PK\x03\x04"
_NPY = b"\x93NUMPY"


def open_array(path: str | os.PathLike[str], name: str | None = None) -> Any:
    """Return an array in a file, of which nothing is read yet: something to `read` from.

    **Arguments:**

    - `path`: an npy file (which becomes a memory map), an npz or a safetensors file, an HDF5 file (`.h5`, `.hdf5`; it
      takes h5py, the extra `hdf5`) or a Zarr array or group (a folder or zip file `.zarr`; it takes zarr, the extra
      `zarr`).
    - `name`: which array of the file; not needed where it holds only one.

    **Returns:** an array that is sliced like numpy's, with `shape` and `dtype`; a slice of it is read.

    **Raises:** `InvalidArgumentError` where there is no array of that name, or a name is needed; `SetupError` where
    the package is missing that reads such a file; `OSError` where it can't be read.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/x.npy", np.arange(6.0))
    ...     open_array(f"{folder}/x.npy")[2:4].tolist()
    [2.0, 3.0]
    """
    path = os.fspath(path)
    kind = os.path.splitext(path.rstrip("/"))[1]
    found: dict[str, Any] = {}
    if kind in (".h5", ".hdf5"):
        h5py = _package("h5py", "hdf5")
        file = h5py.File(path, "r", locking="best-effort")
        file.visititems(lambda at, value: found.update({at: value}) if isinstance(value, h5py.Dataset) else None)
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
    """Read a box of an array, and nothing else of it.

    **Arguments:**

    - `source`: what `open_array` returns, or the path of a file that holds one array; a numpy array or memory map, an
      h5py dataset, a Zarr array, or anything with `shape`, `dtype` and slices. How it is cut into chunks on disk does
      not matter to the result; it does to the time.
    - `box`: a range `(start, stop)` for each dimension; a `TensorSpec` has this worker's (`spec.box`). None, the box of
      a worker that has no part: a zero-volume array comes back.
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
    """Refuse a value that is no array."""
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        raise InvalidTypeError(f"`{name}` (={array!r}) must be an array, or the path of a file that holds one.")


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


@dataclass(frozen=True)
class ArrayInFile:
    """An array in a file.

    - `path`, `name`: the file, and the array's name in it.
    - `is_fortran`: whether it is column-major.
    - `offset`: the first byte in the file; None where the array is compressed, in a member of a zip file.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int | None
    is_fortran: bool = False

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def read(self, box: Box, pause: Pause = lambda: None) -> np.ndarray[Any, Any]:
        """Read a box of the array; `pause` is called between two pieces.

        **Raises:** `OSError` where the file can't be read, `CheckpointError` where it is too short.
        """
        into = np.empty(box_shape(box), self.dtype, order="F" if self.is_fortran else "C")
        shape, part, dest = self.shape, box, into
        if self.is_fortran:
            shape, part, dest = shape[::-1], box[::-1], into.T
        place = tuple((0, length) for length in dest.shape)
        first = self.offset
        with open(open_to_read(self.path), "rb") as file:

            def read(start: int, view: memoryview) -> None:
                pause()
                read_exactly(file.fileno(), [view], (first or 0) + start)

            try:
                if first is None:
                    with zipfile.ZipFile(file) as archive, archive.open(f"{self.name}.npy") as stream:
                        _npy_header(stream)
                        fill(_reader_of(stream, pause), shape, part, dest, place)
                else:
                    fill(read, shape, part, dest, place)
            except (EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
                text = f"{self.path} is damaged: {self.name!r} can't be read to its end. {error}"
                raise CheckpointError(text) from None
        return into.astype(self.dtype.newbyteorder("="), copy=False)


def arrays_in(path: str) -> dict[str, ArrayInFile]:
    """Return the arrays in a safetensors, npz or npy file, by name, which is "" in an npy file.

    **Raises:** `CheckpointError` where it is none of these, `OSError` where it can't be read.
    """
    with open(open_to_read(path), "rb") as file, _damage_in_words(path):
        begin = file.read(6)
        file.seek(0)
        if begin == _NPY:
            return {"": _npy(path, "", file, 0, os.fstat(file.fileno()).st_size)}
        if begin[:4] == _ZIP:
            return _npz(path, file)
    return {
        name: ArrayInFile(path, name, tensor.shape, dtype_named(tensor.dtype), tensor.offset)
        for name, tensor in read_header(path).items()
    }


def some(names: Any) -> str:
    """Return a few of the names, for messages."""
    names = sorted(names)
    return (", ".join(map(repr, names[:8])) or "nothing") + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@contextmanager
def _damage_in_words(path: str) -> Iterator[None]:
    """Raise any exception of the readers of zip files and of numpy's headers as damage to the file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # of a place before the file
            raise
        text = str(error) or type(error).__name__
        raise CheckpointError(f"{path} is damaged, or no file of numpy's: {text}.") from None


def _npz(path: str, file: IO[bytes]) -> dict[str, ArrayInFile]:
    found = {}
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            with archive.open(member) as stream:
                if stream.read(6) != _NPY:
                    raise CheckpointError(f"{path} is no npz file: its member {member.filename!r} is no array.")
            if member.compress_type != zipfile.ZIP_STORED:
                with archive.open(member) as stream:
                    found[name] = _npy(path, name, stream, None, member.file_size)
                continue
            file.seek(member.header_offset + 26)  # the header of a member, and the lengths of what follows it
            lengths = file.read(4)
            begin = member.header_offset + 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
            file.seek(begin)
            found[name] = _npy(path, name, file, begin, min(begin + member.file_size, os.fstat(file.fileno()).st_size))
    return found


def _npy(path: str, name: str, stream: IO[bytes], begin: int | None, end: int) -> ArrayInFile:
    """Read a header; `begin`, `end`: the bytes of the array with its header in the file, or in a compressed stream."""
    shape, is_fortran, dtype = _npy_header(stream)
    if dtype.hasobject:
        raise CheckpointError(f"{path} holds Python objects under {name!r}, and not numbers.")
    if stream.tell() + prod(integers([*shape])) * dtype.itemsize > end:
        raise ValueError(f"{name!r} is too short for its shape, {shape}")
    return ArrayInFile(path, name, shape, dtype, None if begin is None else stream.tell(), is_fortran)


def _npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version} is not known")
    read: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(stream)
    return shape, is_fortran and len(shape) > 1, dtype


def _reader_of(stream: IO[bytes], pause: Pause) -> Callable[[int, memoryview], None]:
    """Return a function that reads bytes of the rest of a stream, at ascending places."""
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
