"""HDF5 and Zarr: arrays read by other packages, and watched for changes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np

from distdl_jax.errors import CheckpointError, SetupError
from distdl_jax.partitions.formats.boxes_in_files import box_of_index
from distdl_jax.partitions.formats.plain_files import PlainFile, chosen, damage_in_words, no_file
from distdl_jax.plans.decomposition import Box
from distdl_jax.text import brief, quoted

_METADATA = "zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"

_MOST_SOFT_LINKS = 16
"""In one path, as in HDF5 itself: they may form a ring."""


@dataclass(frozen=True)
class WatchedArray:
    """An array read by another package, sliced by its rules; its other attributes are available, too.

    - `path`, `name`: the file, and the array's name in it.
    - `array`: the package's own object.
    - `files`: the files that must not change.
    - `chunk_files`: the files with a given box.
    """

    path: str
    name: str
    array: Any
    files: tuple[PlainFile, ...]
    chunk_files: Callable[[Box], Iterable[str]] = lambda box: ()

    def __getitem__(self, index: Any) -> Any:
        place = box_of_index(index, self.array.shape)
        for path in () if place is None else self.chunk_files(place[0]):
            with suppress(FileNotFoundError):  # it has fill values
                if not stat.S_ISREG(os.stat(path).st_mode):
                    raise no_file(path)
        self._check()
        with damage_in_words(self.path, self.name, IndexError, TypeError):
            values = self.array[index]
        self._check()
        return values

    def _check(self) -> None:
        for file in self.files:
            file.check()

    def __len__(self) -> int:
        return len(self.array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self[...], dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.array, name)


def open_hdf5(path: str, name: str | None) -> WatchedArray:
    """Open a data set of an HDF5 file that has no links to files outside of its folder."""
    h5py = _package("h5py", "hdf5")
    file = PlainFile(path)
    datasets: dict[str, Any] = {}
    with damage_in_words(path, name):
        content = h5py.File(path, "r", locking="best-effort")
        # This visits each data set once, by one of its names.
        content.visititems(lambda at, value: datasets.update({at: value}) if isinstance(value, h5py.Dataset) else None)
        file.check_name()
        name = name and name.strip("/")
        if name and isinstance(named := _by_links(h5py, content, name.encode()), h5py.Dataset):
            datasets[name] = named
        array = chosen(path, datasets, name)
        _check_sources(h5py, array, set())
    return WatchedArray(path, array.name, array, (file,))


def _by_links(h5py: Any, content: Any, name: bytes) -> Any:
    """Return what hard and soft links lead to, in this file; None if there is nothing. h5py would follow all links."""
    here, parts, followed = content, name.split(b"/")[::-1], 0
    while parts:
        part = parts.pop()
        if part in (b"", b"."):
            continue
        if not isinstance(here, h5py.Group) or not here.id.links.exists(part):
            return None
        kind = here.id.links.get_info(part).type
        if kind == h5py.h5l.TYPE_HARD:
            here = here[part]
        elif kind == h5py.h5l.TYPE_SOFT and followed < _MOST_SOFT_LINKS:
            target, followed = here.id.links.get_val(part), followed + 1
            parts += target.split(b"/")[::-1]
            here = content if target.startswith(b"/") else here
        else:
            return None
    return here


def _check_sources(h5py: Any, array: Any, seen: set[tuple[str, str]]) -> None:
    """Reject numbers in files outside of its folder, or in missing ones (replaced by fill values)."""
    path = os.path.abspath(array.file.filename)
    folder = os.path.join(os.path.dirname(path), "")
    sources = [(source.file_name, source.dset_name) for source in array.virtual_sources()] if array.is_virtual else []
    for file_name, name in [*sources, *((file_name, None) for file_name, *_ in array.external or ())]:
        other = path if file_name == "." else os.path.normpath(os.path.join(folder, file_name))
        if name is None or not other.startswith(folder):
            raise CheckpointError(
                f"{path} has numbers of {quoted(array.name)} in {brief(file_name)}, which may be any file on this "
                "machine. If you trust it, open it with h5py, and pass the data set."
            )
        if (other, name) not in seen:
            seen.add((other, name))
            PlainFile(other)
            with h5py.File(other, "r", locking="best-effort") as file:
                _check_sources(h5py, file[name], seen)


def open_zarr(path: str, name: str | None) -> WatchedArray:
    """Open a Zarr array of numbers, in a folder or a zip file, without anything that runs code when a chunk is read."""
    zarr = _package("zarr", "zarr")
    is_folder = os.path.isdir(path)
    files = [*_metadata(path)] if is_folder else [PlainFile(path)] if "://" not in path else []
    with damage_in_words(path, name):
        array = zarr.open(zarr.storage.ZipStore(path, mode="r") if files and not is_folder else path, mode="r")
        if not hasattr(array, "dtype"):
            for entry in os.scandir(path) if is_folder else ():
                if entry.is_dir():
                    [*_metadata(entry.path)]
            array = chosen(path, dict(array.arrays()), name)
            files = [*_metadata(os.path.join(path, array.path))] if is_folder else files
        metadata = array.metadata.to_dict()
        pipeline = [metadata.get(key) for key in ("filters", "compressor", "codecs")]
        if array.dtype.hasobject or "pickle" in str(pipeline).lower():
            raise CheckpointError(
                f"{path} holds Python objects under {quoted(array.path)}, not numbers: reading them may run arbitrary "
                "code."
            )

    def chunk_files(box: Box) -> Iterator[str]:
        with suppress(NotImplementedError):  # zarr, where a dimension has chunks of several lengths: not watched
            lengths = array.shards or array.chunks
            ranges = (range(start // n, -(-stop // n)) for (start, stop), n in zip(box, lengths, strict=True))
            for place in product(*ranges) if is_folder else ():
                yield os.path.join(path, array.path, array.metadata.encode_chunk_key(place))

    watched = tuple(file for file in files if not file.path.endswith((".zattrs", ".zgroup", ".zmetadata")))
    return WatchedArray(path, array.path, array, watched, chunk_files)


def _metadata(folder: str) -> Iterator[PlainFile]:
    """Yield the metadata files of a Zarr folder; reject one that is not a plain file."""
    for name in _METADATA:
        if os.path.lexists(path := os.path.join(folder, name)):
            yield PlainFile(path, by_name=True)


def _package(name: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise SetupError(f"Reading this file requires {name}: pip install 'distdl_jax[{extra}]' ({error}).") from None
