"""Arrays in files of other programs, safetensors, npz and npy, of which any box can be read."""

from __future__ import annotations

import errno
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import IO, Any

import numpy as np

from distdl_jax.checkpoint.disk import open_to_read, read_exactly
from distdl_jax.checkpoint.hyperslabs import fill
from distdl_jax.checkpoint.progress import Pause
from distdl_jax.checkpoint.strict_json import integers
from distdl_jax.checkpoint.tensor_file import dtype_named, read_header
from distdl_jax.errors import CheckpointError
from distdl_jax.plans.decomposition import Box, box_shape

_ZIP = b"PK\x03\x04"
_NPY = b"\x93NUMPY"


@dataclass(frozen=True)
class ArrayInFile:
    """An array in a file.

    - `path`, `name`: the file, and what the array is called in it.
    - `shape`, `dtype`: its own. `is_fortran`: whether its first dimension is the one that lies together.
    - `offset`: its first byte in the file; None where it is compressed, in a member of a zip file.
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
        """What is in a box of it; few bytes besides are held. `pause` is called between two pieces.

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
                        fill(_reading_on(stream, pause), shape, part, dest, place)
                else:
                    fill(read, shape, part, dest, place)
            except (EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
                text = f"{self.path} is damaged: {self.name!r} can't be read to its end. {error}"
                raise CheckpointError(text) from None
        return into.astype(self.dtype.newbyteorder("="), copy=False)


def arrays_in(path: str) -> dict[str, ArrayInFile]:
    """The arrays in a safetensors, npz or npy file, by name; that of an npy file is called "".

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
    """A few of the names."""
    names = sorted(names)
    return (", ".join(map(repr, names[:8])) or "nothing") + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@contextmanager
def _damage_in_words(path: str) -> Iterator[None]:
    """Raise what readers of zip files and of numpy's headers raise, which is anything, as damage to the file."""
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
    """Read a header; `begin`, `end`: where the array with its header lies in its file, or in a compressed stream."""
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


def _reading_on(stream: IO[bytes], pause: Pause) -> Callable[[int, memoryview], None]:
    """Reads bytes of what is left of a stream; what is asked for ascends."""
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
