"""The file operations for checkpoints, and the folders of checkpoints in the folder of a run.

path/
  step-0000000100/            complete: it got this name when everything in it was on disk
  step-0000000100.1/          the same step, saved once more: it counts in place of the first
  .step-0000000200.5f3a91/    being written, being removed, or left by a job that was killed
  step-0000000300.abandoned-5f3a91/    complete: a run has gone back to an earlier step, and on from there

Several jobs may use it at once: a requeued job starts while the previous one is ending. A folder changes owners by one
operation, its rename. A writer completes a checkpoint by a rename, and a job that removes a folder renames it before
its first file is deleted. So only one of the two succeeds, and the other's rename fails.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

from distdl_jax.errors import CheckpointError, InvalidArgumentError, InvalidTypeError
from distdl_jax.text import quoted

_COMPLETE = re.compile(r"step-(\d{10,})(?:\.(\d+))?", re.ASCII)
_UNFINISHED = re.compile(r"\.step-(\d{10,})\.[0-9a-f]+", re.ASCII)


def _fallocate() -> Any:
    """Return Linux's own call: Python's posix_fallocate writes into every page if the file system has none."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call


_FALLOCATE = _fallocate()
_KEEP_SIZE = 1


class Disk:
    """The file system of this machine; tests use others, which fail. Methods raise `OSError`."""

    def make_folders(self, path: str) -> None:
        """Make a folder and its missing parents, durably."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            with suppress(FileExistsError):
                self.make_folder(folder)
            self.sync_folder(os.path.dirname(folder))

    def make_folder(self, path: str) -> None:
        """Make a new folder."""
        os.mkdir(path)

    def create(self, path: str) -> int:
        """Make a new file, and open it."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def open(self, path: str) -> int:
        """Open an existing file for writing."""
        return os.open(path, os.O_WRONLY)

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write part of `data` from byte `offset` on, and return the number of bytes."""
        return os.pwrite(descriptor, data, offset)

    def reserve(self, descriptor: int, nbytes: int) -> None:
        """Reserve space for a file, if the file system can: faster, and a full disk is noticed early."""
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
        """Rename a file or a folder; the name must be free."""
        if os.path.lexists(to):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), to)
        os.rename(path, to)

    def replace(self, path: str, to: str) -> None:
        """Rename a file, replacing one with that name."""
        os.replace(path, to)

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.remove(path)

    def remove_folder(self, path: str) -> None:
        """Remove a folder and its contents; not durably, and only partly if that fails."""
        shutil.rmtree(path, ignore_errors=True)


disk: ContextVar[Disk] = ContextVar("disk", default=Disk())  # noqa: B039  it has no state
"""The disk of this thread's worker."""


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Name the file in the errors of operations on its descriptor, which don't contain it."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, path) from error


def write_all(target: Disk, descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data`, in as many writes as needed."""
    while data:
        written = target.write(descriptor, data, offset)
        if written < 1:
            raise OSError(f"a write of {len(data)} bytes wrote nothing")
        data, offset = data[written:], offset + written


def write_file(target: Disk, path: str, content: bytes) -> None:
    """Make a file with this content, and return when it is on disk (its name is not, yet)."""
    with naming(path):
        descriptor = target.create(path)
        try:
            write_all(target, descriptor, memoryview(content), 0)
            target.sync(descriptor)
        finally:
            target.close(descriptor)


class Folder(NamedTuple):
    """A complete checkpoint: its step, and how often that step had been saved before."""

    step: int
    again: int

    @property
    def name(self) -> str:
        """
        >>> Folder(100, 0).name, Folder(7, 2).name
        ('step-0000000100', 'step-0000000007.2')
        """
        return f"step-{self.step:010d}" + (f".{self.again}" if self.again else "")


def complete_folders(names: Iterable[str]) -> list[Folder]:
    """Return the complete checkpoints among the names in a folder, in ascending order.

    >>> complete_folders(["step-0000000012", "step-0000000003.1", ".step-0000000099.ab", "notes"])
    [Folder(step=3, again=1), Folder(step=12, again=0)]
    """
    matches = [match for name in names if (match := _COMPLETE.fullmatch(name))]
    folders = [(Folder(int(match[1]), int(match[2] or 0)), match[0]) for match in matches]
    return sorted(folder for folder, name in folders if folder.name == name)


def folders_in(path: str) -> list[Folder]:
    """Return the complete checkpoints in a folder, in ascending order; none if there is no such folder."""
    try:
        with os.scandir(path) as entries:
            return complete_folders(entry.name for entry in entries if entry.is_dir())
    except FileNotFoundError:
        return []


def begin_folder(target: Disk, path: str, step: int, tidy: bool) -> str:
    """Make the folder in which a checkpoint is written, and return its name.

    Leftovers of killed jobs are removed: of that step, or of all steps with `tidy`.
    """
    target.make_folders(path)
    for name in os.listdir(path):
        if (match := _UNFINISHED.fullmatch(name)) and (tidy or int(match[1]) == step):
            remove_folder(target, path, name)
    unfinished = _unfinished(step)
    target.make_folder(os.path.join(path, unfinished))
    return unfinished


def later_folders(path: str, step: int) -> dict[Folder, int]:
    """Return the complete checkpoints of higher steps than `step`, in descending order, with the time of each.

    The time (of the last change, in nanoseconds) distinguishes it from another one that gets the same name later.
    """
    times = {}
    for folder in reversed(folders_in(path)):
        if folder.step > step:
            with suppress(FileNotFoundError):  # another job has just removed it
                times[folder] = os.stat(os.path.join(path, folder.name)).st_mtime_ns
    return times


def abandon_later(target: Disk, path: str, step: int, last: int | None, abandoned: Mapping[Folder, int]) -> None:
    """Set aside the checkpoints that a run has abandoned by going back, before it saves `step`.

    `last`: the last step that the run has restored or saved; `abandoned`: the `later_folders` at its last restore.

    **Raises:** `InvalidArgumentError` if other checkpoints of higher steps exist: those are another run's.
    """
    higher = later_folders(path, step)
    if not higher:
        return
    highest = next(iter(higher)).step
    if last is None or last > step:
        raise InvalidArgumentError(
            f"`step` (={step}) must not be below the last checkpoint in {path}, {highest}: this one would be removed "
            "first, and `restore` would return that one. Use another folder for a new run; to go back to an earlier "
            "step, call this Manager's `restore(specs, step)`, which sets the later ones aside."
        )
    if others := [folder.step for folder, time in higher.items() if abandoned.get(folder) != time]:
        raise InvalidArgumentError(
            f"`step` (={step}) must not be below {others[0]}, a checkpoint in {path} that this Manager has neither "
            "saved, nor found there at its last `restore`: another job saves to this folder, too. Let one of them use "
            "another folder; or go back by this Manager's `restore(specs, step)`, which sets the later ones aside."
        )
    # From the last one down, each durably: wherever this is cut short, no abandoned step lies above a gap.
    for folder, time in later_folders(path, last).items():
        if folder.step != step and abandoned.get(folder) == time:
            name = os.path.join(path, folder.name)
            target.rename(name, f"{name}.abandoned-{secrets.token_hex(4)}")
            target.sync_folder(path)


def complete_folder(target: Disk, path: str, unfinished: str, step: int) -> None:
    """Rename a folder to a complete checkpoint, durably, and remove earlier checkpoints of its step."""
    before = [folder.again for folder in complete_folders(os.listdir(path)) if folder.step == step]
    folder = Folder(step, max(before, default=-1) + 1)
    while True:
        try:
            target.rename(os.path.join(path, unfinished), os.path.join(path, folder.name))
            break
        except OSError as error:  # another job has just completed the same step
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            folder = Folder(step, folder.again + 1)
    target.sync_folder(path)
    with suppress(OSError):  # leftovers do no harm
        for other in folders_in(path):
            if other.step == step and other.again < folder.again:
                remove_folder(target, path, other.name)


def remove_folder(target: Disk, path: str, name: str) -> None:
    """Remove a checkpoint, its name first; if that fails or is cut short, a later call does it."""
    (step,) = (int(match[1]) for form in (_COMPLETE, _UNFINISHED) if (match := form.fullmatch(name)))
    gone = os.path.join(path, _unfinished(step))
    with suppress(OSError):
        target.rename(os.path.join(path, name), gone)
        target.remove_folder(gone)


@contextmanager
def written_in(folder: str) -> Iterator[None]:
    """Raise an explanation if the folder of a checkpoint, or a file in it, is gone while it is written."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{error.filename or folder}, which is being written, is not there on {this_host()}: another job that "
            "saves to the same place has removed it, or `path` is not on a file system that all workers see."
        ) from error


def _unfinished(step: int) -> str:
    return f".step-{step:010d}.{secrets.token_hex(4)}"


def this_host() -> str:
    """Return the name of this machine, for messages."""
    with suppress(OSError):
        return socket.gethostname()
    return "unknown host"


def checked_path(path: Any) -> str:
    """Return the argument `path`, absolute.

    **Raises:** `InvalidTypeError`, `InvalidArgumentError` for an invalid path; `CheckpointError` if it is relative, and
    the working folder is gone.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise InvalidTypeError(
            f"`path` (={quoted(path)}) must be the path of a folder: a string or a pathlib.Path."
        ) from None
    if not text:
        raise InvalidArgumentError("`path` (='') must name a folder; '.' is the working folder.")
    try:
        has_nul = b"\0" in os.fsencode(text)
    except UnicodeEncodeError:
        has_nul = True
    if has_nul:
        raise InvalidArgumentError(f"`path` (={quoted(text)}) must be a valid path, without NUL or lone surrogates.")
    try:
        return os.path.abspath(text)
    except FileNotFoundError:
        raise CheckpointError(
            f"`path` (={quoted(text)}) is relative to the working folder, which has been removed."
        ) from None
