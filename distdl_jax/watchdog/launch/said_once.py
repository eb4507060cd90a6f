"""An error that several workers of a host raise is printed by the first of them, and the others are counted.

They meet in a file, not over MPI: a worker that has raised may have no MPI yet, or be in the middle of a call, and its
partners may be dead. Whatever fails here, a worker prints its error itself. Nothing waits for longer than a second.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from distdl_jax.watchdog.error_text import comparable
from distdl_jax.watchdog.launch import supervised
from distdl_jax.watchdog.launch.launcher import common_launch, local_size

COUNTED = 0.3
"""Seconds in which workers that raise the same are counted, after the first; no more if all of the host have come."""

LONGEST = 1.0
"""Seconds that the others wait for the first one, which ends the job."""

STALE = 10.0
"""Age in seconds of a file that a killed worker has left."""

_job = ""


def set_job(name: str) -> None:
    """Set the name of this worker's job, which all its workers have agreed on, unless it has one already."""
    global _job
    _job = _job or name


class SaidOnce:
    """One error of worker `rank`; `text` is the same for equal errors.

    `is_first`: whether this worker is to print it, as the first of its host, or as one whose output is its own.
    """

    def __init__(self, text: str, rank: int) -> None:
        self._rank = rank
        self._path: Path | None = None
        self.is_first = True
        with contextlib.suppress(Exception):  # no place for a file, or no descriptor left
            self._path = _meeting_place(text)
            self.is_first = self._path is None or not self._join(self._path)

    def _join(self, path: Path) -> bool:
        """Return whether another worker has come first, and counts this one."""
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.lstat().st_mtime > STALE:
                path.unlink()
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return False
        except FileExistsError:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
            try:
                if os.fstat(file).st_uid != os.getuid():
                    raise PermissionError(path) from None
                os.write(file, f"{self._rank}\n".encode())
            finally:
                os.close(file)
            return True

    def end(self) -> str:
        """Return a line about the others; unless this worker is the first, wait for that one to end the job."""
        if self._path is None:
            return ""
        limit = time.monotonic() + (COUNTED if self.is_first else LONGEST)
        others: list[int] = []
        with contextlib.suppress(OSError):
            while time.monotonic() < limit:
                others = _others(self._path)
                if self.is_first and sum(1 + len(_others(path)) for path in _files()) >= local_size():
                    break  # all have come, with this error or another one
                time.sleep(0.01)
        if not self.is_first:
            return ""
        return same_text(others, "" if len(others) >= local_size() - 1 else f" as worker {self._rank}")


def remove_files() -> None:
    """Remove the files of this job on this host, by the worker that ends it: the others may be killed at any moment."""
    with contextlib.suppress(Exception):
        for path in _files():
            path.unlink()


def _files() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"distdl_jax-{_digest(_job_here())}-*"))


def _others(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()]


def same_text(workers: Iterable[int], of: str = "") -> str:
    """Return the line about other workers that have raised the same; empty if there are none.

    >>> same_text([3, 1, 2]), same_text([5]), same_text([0, 2, 3])
    ('Workers 1-3 raised the same.\\n', 'Worker 5 raised the same.\\n', 'Workers 0, 2-3 raised the same.\\n')
    """
    runs: list[list[int]] = []
    for worker in sorted(set(workers)):
        if runs and worker == runs[-1][1] + 1:
            runs[-1][1] = worker
        else:
            runs.append([worker, worker])
    if not runs:
        return ""
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"Worker{'' if listed.isdecimal() else 's'} {listed} raised the same{of}.\n"


def _meeting_place(text: str) -> Path | None:
    """Return the file of an error; None for a worker that is alone, or whose stderr isn't the launcher's."""
    # A file, or /dev/null on all workers but one: the others' output is no place for this worker's error.
    mode = os.fstat(2).st_mode
    is_launchers = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(2)
    if local_size() == 1 or sys.stderr is not sys.__stderr__ or not is_launchers:
        return None
    return Path(tempfile.gettempdir()) / f"distdl_jax-{_digest(_job_here())}-{_digest(comparable(text))}"


def _job_here() -> str:
    """Return a name that the workers of this job on this host have in common: before the first partition, of their
    launcher."""
    return _job or f"{os.getuid()} {supervised.launcher_process()} {common_launch()}"


def _digest(text: str) -> str:
    return sha256(text.encode(errors="replace")).hexdigest()[:16]
