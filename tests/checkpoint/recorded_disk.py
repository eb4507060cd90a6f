"""Disks for tests: one that fails, one that writes little at a time, and one that remembers what a crash would leave.

What a file system promises is little: a file's content is on disk after its sync, names are after that of their folder,
and a rename happens or doesn't. Everything else may be there after a crash, or not, in any mixture.
"""

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from distdl_jax.checkpoint.disk import Disk, disk

OPERATIONS = (
    *("make_folder", "create", "open", "reserve", "write", "sync", "close"),
    *("sync_folder", "rename", "replace", "remove", "remove_folder"),
)


class Operation(NamedTuple):
    """One operation: on which file or folder, and what it did to it."""

    kind: str
    path: str
    to: str = ""
    data: bytes = b""
    offset: int = 0


class disk_used:
    def __init__(self, its: Disk) -> None:
        self._its = its

    def __enter__(self) -> None:
        self._token = disk.set(self._its)

    def __exit__(self, *_: object) -> None:
        disk.reset(self._token)


class FailingDisk(Disk):
    """Its n-th operation, or its n-th of one kind, counted over all workers, raises; the others do what they should.
    0: none does."""

    def __init__(self, fails_at: int = 0, kind: str = "") -> None:
        self._fails_at, self._kind = fails_at, kind
        self.count = 0
        self.failed = ""
        self._lock = threading.Lock()

    def _next(self, kind: str, path: object = None) -> None:
        if self._kind not in ("", kind):
            return
        with self._lock:
            self.count += 1
            if self.count == self._fails_at:
                self.failed = kind
                raise OSError(28, "No space left on device", path if isinstance(path, str) else None)


def _counted(kind: str):  # type: ignore[no-untyped-def]
    def operation(self: FailingDisk, *arguments: object) -> object:
        if kind == "close":
            getattr(Disk, kind)(self, *arguments)  # a descriptor is closed even where close fails
            return self._next(kind)
        self._next(kind, arguments[0])  # errors of paths name them, those of descriptors don't
        return getattr(Disk, kind)(self, *arguments)

    return operation


for _kind in OPERATIONS:
    setattr(FailingDisk, _kind, _counted(_kind))


class Killed(BaseException):
    """The end of a job that was killed: nothing of it runs any more."""


class KilledDisk(FailingDisk):
    """Its job is killed at the n-th operation, and does nothing after it."""

    def _next(self, kind: str, path: object = None) -> None:
        self.count += 1
        if self.count >= self._fails_at:
            raise Killed


class ShortDisk(Disk):
    """Writes seven bytes at a time at most."""

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        return super().write(descriptor, data[:7], offset)


class RecordedDisk(Disk):
    """Does what it should, and keeps a record of it."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def _record(self, *operation: object) -> None:
        self.operations.append(Operation(*operation))  # type: ignore[arg-type]

    def create(self, path: str) -> int:
        with self._lock:
            descriptor = super().create(path)
            self._paths[descriptor] = path
            self._record("create", path)
            return descriptor

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        with self._lock:
            self._record("write", self._paths[descriptor], "", bytes(data), offset)
            return super().write(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        with self._lock:
            self._record("sync", self._paths[descriptor])

    def close(self, descriptor: int) -> None:
        with self._lock:
            super().close(descriptor)

    def sync_folder(self, path: str) -> None:
        with self._lock:
            self._record("sync_folder", path)

    def remove_folder(self, path: str) -> None:
        with self._lock:
            for name in sorted(os.listdir(path)):
                self._record("remove", os.path.join(path, name))
            super().remove_folder(path)
            self._record("remove", path)


def _recorded(kind: str):  # type: ignore[no-untyped-def]
    def operation(self: RecordedDisk, *paths: str) -> None:
        with self._lock:
            getattr(Disk, kind)(self, *paths)
            self._record(kind, *paths)

    return operation


for _kind in ("make_folder", "rename", "remove"):
    setattr(RecordedDisk, _kind, _recorded(_kind))


class _Node:
    def __init__(self, is_folder: bool) -> None:
        self.is_folder = is_folder
        self.names: dict[str, _Node] = {}
        self.names_on_disk: dict[str, _Node] = {}
        self.content = self.content_on_disk = b""


def after_a_crash(operations: Iterable[Operation], root: Path, into: Path, kept: str) -> None:
    """Make in `into` what a crash after these operations in `root` may leave.

    `kept`: "synced": only what was synced. "names": all names, and of files only what was synced. "half": all names,
    and half of what was not synced.
    """
    top = _Node(True)

    def find(path: str) -> tuple[_Node, str]:
        parts = Path(path).relative_to(root).parts
        node = top
        for part in parts[:-1]:
            node = node.names[part]
        return node, parts[-1] if parts else ""

    def at(path: str) -> _Node:
        folder, name = find(path)
        return folder.names[name] if name else folder

    for operation in operations:
        match operation.kind:
            case "make_folder" | "create":
                folder, name = find(operation.path)
                folder.names[name] = _Node(operation.kind == "make_folder")
            case "write":
                file = at(operation.path)
                start, data = operation.offset, operation.data
                content = file.content.ljust(start, b"\0")
                file.content = content[:start] + data + content[start + len(data) :]
            case "sync":
                file = at(operation.path)
                file.content_on_disk = file.content
            case "sync_folder":
                folder = at(operation.path)
                folder.names_on_disk = dict(folder.names)
            case "rename":
                folder, name = find(operation.path)
                node = folder.names.pop(name)
                folder, name = find(operation.to)
                folder.names[name] = node
            case "remove":
                folder, name = find(operation.path)
                del folder.names[name]

    def put(node: _Node, path: Path) -> None:
        if node.is_folder:
            path.mkdir(exist_ok=True)
            for name, inner in (node.names_on_disk if kept == "synced" else node.names).items():
                put(inner, path / name)
            return
        content = node.content_on_disk
        if kept == "half":
            content = node.content[: (len(node.content) + len(content)) // 2]
        path.write_bytes(content)

    put(top, into)
