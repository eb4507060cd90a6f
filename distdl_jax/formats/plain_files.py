"""Plain files of other programs, which may be forged or damaged, and may change while they are read."""

from __future__ import annotations

import errno
import io
import os
import stat
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from distdl_jax.errors import CheckpointError, DistDLError, InvalidArgumentError

_LARGEST_PIECE = 2**30
"""Bytes of a header, an index or a manifest, at most: what claims more is not read."""


def open_to_read(path: str, *, in_folder: bool = False) -> int:
    """Open a regular file; `in_folder`: and no symbolic link, which may lead out of its folder.

    **Raises:** `CheckpointError` for anything else: a pipe would be waited for for ever.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (os.O_NOFOLLOW if in_folder else 0))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a symbolic link, which is not followed.") from None
        if error.errno == errno.ENXIO:  # a socket
            raise no_file(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise no_file(path)
    return descriptor


def no_file(path: str) -> CheckpointError:
    """Return the error for what is read as a file, and is none."""
    return CheckpointError(f"{path} is no file, but a folder, a pipe or a device.")


def read_exactly(descriptor: int, into: Sequence[memoryview], offset: int) -> None:
    """Fill views, one after the other, with the bytes of a file from `offset` on; `EOFError` where it ends before."""
    missing = sum(map(len, into)) - os.preadv(descriptor, into, offset)
    if not missing:
        return
    for view in into:
        while view:
            count = os.preadv(descriptor, [view], offset)
            if not count:
                raise EOFError
            view, offset = view[count:], offset + count


def read_text(path: str) -> bytes:
    """Return the content of a file of text in the folder of a checkpoint, which no symbolic link stands for."""
    with open(open_to_read(path, in_folder=True), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > _LARGEST_PIECE:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes, and none has more than {_LARGEST_PIECE}.")
        return file.read()


class PlainFile:
    """A regular file that has to stay as it is while arrays of it are read.

    It is kept open, and read at given places: a file that gets its name does not matter, nor do threads and forks.
    Where it is unpickled it is opened by its name. With `by_name` it is one of metadata, not kept open, that another
    package reads.
    """

    def __init__(self, path: str, *, by_name: bool = False) -> None:
        self.path = path
        self.descriptor = open_to_read(path)
        self._of: int | str = path if by_name else self.descriptor
        self._stamp = _stamp(self.descriptor)
        close = weakref.finalize(self, os.close, self.descriptor)
        if by_name:
            close()
            if self.size > _LARGEST_PIECE:
                raise CheckpointError(f"{path} is damaged: it has {self.size} bytes, more than {_LARGEST_PIECE}.")

    @property
    def size(self) -> int:
        """The number of its bytes."""
        return self._stamp[0]

    def check(self) -> None:
        """Refuse a file that has been changed since it was opened."""
        try:
            is_same = _stamp(self._of) == self._stamp
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise CheckpointError(
                f"{self.path} has been changed since it was opened: what is read may belong to neither the old nor the "
                "new one. Write a new file, and rename it when it is complete."
            )

    def check_name(self) -> None:
        """Refuse a file in whose place there is another one, of which other workers may have read."""
        if not os.path.samestat(os.stat(self.path), os.fstat(self.descriptor)):
            raise CheckpointError(f"{self.path} has been replaced by another file while the workers read it.")

    def stream(self) -> io.BufferedReader:
        """Return a stream of its bytes with a place of its own."""
        return io.BufferedReader(_Stream(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.path, self._stamp)


def _reopened(path: str, stamp: tuple[int, int]) -> PlainFile:
    file = PlainFile(path)
    file._stamp = stamp
    file.check()
    return file


def _stamp(of: int | str) -> tuple[int, int]:
    """Return the size of a file, and when it was last written."""
    found = os.stat(of)
    return found.st_size, found.st_mtime_ns


class _Stream(io.RawIOBase):
    def __init__(self, file: PlainFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        place = (0, self._at, self._file.size)[whence] + offset
        if place < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = place
        return place

    def readinto(self, into: Any) -> int:
        if len(into) > _LARGEST_PIECE:
            raise ValueError(f"an index of {len(into)} bytes is not read")
        count = os.preadv(self._file.descriptor, [into], self._at)
        self._at += count
        return count


@contextmanager
def damage_in_words(path: str, name: str | None = None, *others: type[Exception]) -> Iterator[None]:
    """Raise what the packages that read a file raise, but for `others`, as damage to it.

    **Raises:** `CheckpointError`, which names the file and the array; `OSError` where the file system is to blame.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (DistDLError, *others)):
            raise
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # of a place before the file
            if error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, path) from None
        array = "" if name is None else f" {name!r} can't be read:"
        text = str(error).rstrip(".") or type(error).__name__
        raise CheckpointError(f"{path} is damaged, or not what its name says:{array} {text}.") from None


def chosen(path: str, arrays: Mapping[str, Any], name: str | None) -> Any:
    """Return the array of that name, or the only one."""
    if name is None and len(arrays) == 1:
        return next(iter(arrays.values()))
    if name is None or name not in arrays:
        raise InvalidArgumentError(f"`name` (={name!r}) must be that of an array in {path}. It holds {some(arrays)}.")
    return arrays[name]


def some(names: Iterable[str]) -> str:
    """Return a few of the names, for messages."""
    names = sorted(names)
    return (", ".join(map(repr, names[:8])) or "nothing") + (f" and {len(names) - 8} more" if len(names) > 8 else "")
