"""Plain files of other programs, which may be forged or damaged, and may change while they are read; and their JSON."""

from __future__ import annotations

import errno
import json
import os
import stat
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from distdl_jax.errors import CheckpointError, DistDLError, InvalidArgumentError
from distdl_jax.text import brief, quoted

LARGEST_TEXT = 2**30
"""Maximum bytes of a manifest, or of the metadata of a Zarr store."""


def open_to_read(path: str, *, in_folder: bool = False) -> int:
    """Open a regular file; `in_folder`: no symbolic link, which may lead out of its folder.

    **Raises:** `CheckpointError` for anything else: opening a pipe would wait for ever.
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
    """Return the error for a path that is not a file."""
    return CheckpointError(f"{path} is not a file, but a folder, a pipe or a device.")


def read_exactly(descriptor: int, into: Sequence[memoryview], offset: int) -> None:
    """Fill views, in order, with the bytes of a file from `offset` on; `EOFError` if it ends before."""
    missing = sum(map(len, into)) - os.preadv(descriptor, into, offset)
    if not missing:
        return
    for view in into:
        while view:
            count = os.preadv(descriptor, [view], offset)
            if not count:
                raise EOFError
            view, offset = view[count:], offset + count


class PlainFile:
    """A regular file that must not change while its arrays are read.

    It is kept open, and read at given positions, so replacing it by another file with its name has no effect, nor have
    threads and forks. If it is unpickled it is opened by name. With `by_name` it is not kept open, but read by another
    package.
    """

    def __init__(
        self, path: str, stamp: tuple[int, int] | None = None, *, in_folder: bool = False, by_name: bool = False
    ) -> None:
        self.path = path
        self.descriptor = open_to_read(path, in_folder=in_folder)
        self._of: int | str = path if by_name else self.descriptor
        self._stamp = stamp or _stamp(self.descriptor)
        close = weakref.finalize(self, os.close, self.descriptor)
        if by_name:
            close()
            self.check_text(self.size)
        if stamp:
            self.check()

    @property
    def size(self) -> int:
        """The number of its bytes."""
        return self._stamp[0]

    def check(self) -> None:
        """Reject a file that has been changed since it was opened."""
        try:
            is_same = _stamp(self._of) == self._stamp
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise CheckpointError(
                f"{self.path} has been changed since it was opened: its content may belong to neither the old nor the "
                "new one. Write a new file, and rename it when it is complete."
            )

    def check_name(self) -> None:
        """Reject a file that was replaced by another one, which other workers may have read."""
        try:
            is_same = os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise CheckpointError(
                f"{self.path} has been replaced by another file, or removed, while the workers read it."
            )

    def check_text(self, nbytes: int) -> None:
        """Reject a text (a manifest, a header) that is too long to be one, before reading it."""
        if nbytes > LARGEST_TEXT:
            raise CheckpointError(f"{self.path} is damaged: {nbytes} bytes of text are more than {LARGEST_TEXT}.")

    def text(self, nbytes: int, start: int = 0) -> bytes:
        """Return bytes of text; `EOFError` if the file ends before."""
        self.check_text(nbytes)
        content = bytearray(nbytes)
        read_exactly(self.descriptor, [memoryview(content)], start)
        return bytes(content)

    def stream(self) -> IO[bytes]:
        """Open the file again, for a reader with a separate position; reject another file with its name."""
        self.check_name()
        return open(open_to_read(self.path), "rb")

    def __reduce__(self) -> tuple[Any, ...]:
        return PlainFile, (self.path, self._stamp)


def _stamp(of: int | str) -> tuple[int, int]:
    """Return the size of a file, and when it was last written."""
    status = os.stat(of)
    return status.st_size, status.st_mtime_ns


@contextmanager
def damage_in_words(path: str, name: str | None = None, *others: type[Exception]) -> Iterator[None]:
    """Report the exceptions of packages that read a file, except `others`, as damage to it.

    **Raises:** `CheckpointError`, which names the file and the array; `OSError` if the file system is the cause.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (DistDLError, *others)):
            raise
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # of a position before the file
            if error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, path) from None
        array = "" if name is None else f" {quoted(name)} can't be read:"
        text = brief(str(error).rstrip(".")) or type(error).__name__
        raise CheckpointError(f"{path} is damaged, or not what its name says:{array} {text}.") from None


def chosen(path: str, arrays: Mapping[str, Any], name: str | None) -> Any:
    """Return the array of that name, or the only one."""
    if name is None and len(arrays) == 1:
        return next(iter(arrays.values()))
    if name is None or name not in arrays:
        raise InvalidArgumentError(
            f"`name` (={quoted(name)}) must be the name of an array in {path}. It holds {some(arrays)}."
        )
    return arrays[name]


def some(names: Iterable[str]) -> str:
    """Return a few of the names, for messages."""
    names = sorted(names)
    return (", ".join(brief(repr(name), 100) for name in names[:8]) or "nothing") + (
        f" and {len(names) - 8} more" if len(names) > 8 else ""
    )


# --- JSON: anything unexpected raises `ValueError`, and nothing else ---

LARGEST = 2**63 - 1
"""The largest offset, size or length."""


def parsed(text: bytes) -> Any:
    """Return the value of a text: UTF-8, with unique names in each object, and without NaN."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_once_each, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def fields(value: Any, *names: str) -> list[Any]:
    """Return the values of an object that has exactly these names."""
    if not isinstance(value, dict) or value.keys() != {*names}:
        raise ValueError(f"{quoted(value)} is not an object of {', '.join(names)}")
    return [value[name] for name in names]


def integer(value: Any, least: int = 0, most: int = LARGEST) -> int:
    """Return an integer that lies in a range."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{quoted(value)} is not an integer from {least} to {most}")
    return value


def integers(value: Any) -> tuple[int, ...]:
    """Return a list of integers of 0 or more."""
    return tuple(integer(number) for number in typed(value, list))


def typed(value: Any, kind: type) -> Any:
    """Return a value of exactly this type."""
    if type(value) is not kind:
        raise ValueError(f"{quoted(value)} is not a {kind.__name__}")
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object has a name twice")
    return values


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")
