"""The folders of checkpoints in the folder of a run: how they are begun, completed, found and removed.

path/
  step-0000000100/            complete: it got this name when everything in it was on disk
  step-0000000100.1/          the same step, saved once more: it counts in place of the first
  .step-0000000200.5f3a91/    being written, being removed, or left by a job that was killed

Several jobs may work there at once: a job that was requeued begins while the one before is ending. A folder changes
hands by one operation, its rename. A writer completes a checkpoint by a rename, and whoever removes a folder gives it a
new name before the first of its files goes. So of the two one has it, and the rename of the other one fails.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from distdl_jax.checkpoint.agreement import this_host
from distdl_jax.checkpoint.disk import Disk
from distdl_jax.errors import CheckpointError

_COMPLETE = re.compile(r"step-(\d{10,})(?:\.(\d+))?", re.ASCII)
_UNFINISHED = re.compile(r"\.step-(\d{10,})\.[0-9a-f]+", re.ASCII)


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
    found = [match for name in names if (match := _COMPLETE.fullmatch(name))]
    folders = [(Folder(int(match[1]), int(match[2] or 0)), match[0]) for match in found]
    return sorted(folder for folder, name in folders if folder.name == name)


def folders_in(path: str) -> list[Folder]:
    """Return the complete checkpoints in a folder, in ascending order; none where there is no such folder."""
    try:
        with os.scandir(path) as entries:
            return complete_folders(entry.name for entry in entries if entry.is_dir())
    except FileNotFoundError:
        return []


def begin_folder(its: Disk, path: str, step: int, tidy: bool) -> str:
    """Make the folder in which a checkpoint is written, and return its name.

    What killed jobs have left of that step is removed; of all steps, where `tidy` is set.
    """
    its.make_folders(path)
    for name in os.listdir(path):
        if (match := _UNFINISHED.fullmatch(name)) and (tidy or int(match[1]) == step):
            remove_folder(its, path, name)
    unfinished = _unfinished(step)
    its.make_folder(os.path.join(path, unfinished))
    return unfinished


def complete_folder(its: Disk, path: str, unfinished: str, step: int) -> None:
    """Give a folder the name of a complete checkpoint, for good, and remove the checkpoints of that step before it."""
    before = [folder.again for folder in complete_folders(os.listdir(path)) if folder.step == step]
    folder = Folder(step, max(before, default=-1) + 1)
    while True:
        try:
            its.rename(os.path.join(path, unfinished), os.path.join(path, folder.name))
            break
        except OSError as error:  # another job has just completed the same step
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            folder = Folder(step, folder.again + 1)
    its.sync_folder(path)
    with suppress(OSError):  # what can't be removed does no harm
        for other in folders_in(path):
            if other.step == step and other.again < folder.again:
                remove_folder(its, path, other.name)


def remove_folder(its: Disk, path: str, name: str) -> None:
    """Remove a checkpoint, complete or not, by its name first; a later one does where that fails, or is cut short."""
    (step,) = (int(match[1]) for form in (_COMPLETE, _UNFINISHED) if (match := form.fullmatch(name)))
    gone = os.path.join(path, _unfinished(step))
    with suppress(OSError):
        its.rename(os.path.join(path, name), gone)
        its.remove_folder(gone)


@contextmanager
def written_in(folder: str) -> Iterator[None]:
    """Say in a sentence that the folder of a checkpoint, or a file in it, is gone while it is written."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{error.filename or folder}, which is being written, is not there on {this_host()}: another job that "
            "saves to the same place has removed it, or `path` is not in a file system that all workers see."
        ) from error


def _unfinished(step: int) -> str:
    return f".step-{step:010d}.{secrets.token_hex(4)}"
