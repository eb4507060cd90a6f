"""The few operations on files that checkpoints are written with. Tests put others in their place, which fail."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from distdl_jax.errors import CheckpointError


def _fallocate() -> Any:
    """Linux's own call: what Python has, posix_fallocate, writes into every page where the file system has none."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call


_FALLOCATE = _fallocate()
_KEEP_SIZE = 1


class Disk:
    """The file system of this machine. Every method raises `OSError` where the operation fails."""

    def make_folders(self, path: str) -> None:
        """Make a folder, and those above it that are not there yet, for good."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            with suppress(FileExistsError):
                self.make_folder(folder)
            self.sync_folder(os.path.dirname(folder))

    def make_folder(self, path: str) -> None:
        """Make a folder that is not there yet."""
        os.mkdir(path)

    def create(self, path: str) -> int:
        """Make a file that is not there yet, and open it."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def open(self, path: str) -> int:
        """Open a file for writing that is there already."""
        return os.open(path, os.O_WRONLY)

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write some of `data` from byte `offset` on; how many bytes of it."""
        return os.pwrite(descriptor, data, offset)

    def reserve(self, descriptor: int, nbytes: int) -> None:
        """Set aside space for a file that is to have so many bytes, where the file system can: writing takes less time
        then, and a full disk is noticed before."""
        if _FALLOCATE is not None and _FALLOCATE(descriptor, _KEEP_SIZE, 0, nbytes):
            error = ctypes.get_errno()
            if error in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise OSError(error, os.strerror(error))

    def sync(self, descriptor: int) -> None:
        """Return when the file's content is on disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def sync_folder(self, path: str) -> None:
        """Return when the names in a folder are on disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with naming(path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: str, to: str) -> None:
        """Give a file or a folder another name, which must be free."""
        if os.path.lexists(to):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), to)
        os.rename(path, to)

    def replace(self, path: str, to: str) -> None:
        """Give a file another name, also one that another file has, which is gone then."""
        os.replace(path, to)

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.remove(path)

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it; not for good, and some of it only where that fails."""
        shutil.rmtree(path, ignore_errors=True)


disk: ContextVar[Disk] = ContextVar("disk", default=Disk())  # noqa: B039  it has no state
"""That of this thread's worker."""


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Name the file in the errors of operations on its descriptor, which don't say which file it is."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, path) from error


def write_all(its: Disk, descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data`, in as many writes as it takes."""
    while data:
        written = its.write(descriptor, data, offset)
        if written < 1:
            raise OSError(f"a write of {len(data)} bytes wrote nothing")
        data, offset = data[written:], offset + written


def write_file(its: Disk, path: str, content: bytes) -> None:
    """Make a file with this content, and return when it is on disk (its name is not, yet)."""
    with naming(path):
        descriptor = its.create(path)
        try:
            write_all(its, descriptor, memoryview(content), 0)
            its.sync(descriptor)
        finally:
            its.close(descriptor)


def open_to_read(path: str, *, in_folder: bool = False) -> int:
    """Open a regular file; `in_folder`: and no symbolic link, which may lead out of its folder.

    **Raises:** `CheckpointError` for anything else: a pipe would be waited for for ever.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (os.O_NOFOLLOW if in_folder else 0))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a symbolic link, which is not followed.") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is no file, but a folder, a pipe or a device.")
    return descriptor


def read_exactly(descriptor: int, into: Sequence[memoryview], offset: int) -> None:
    """Fill these, one after the other, with the bytes of a file from `offset` on; `EOFError` where it ends before."""
    missing = sum(map(len, into)) - os.preadv(descriptor, into, offset)
    if not missing:
        return
    for view in into:
        while view:
            count = os.preadv(descriptor, [view], offset)
            if not count:
                raise EOFError
            view, offset = view[count:], offset + count
