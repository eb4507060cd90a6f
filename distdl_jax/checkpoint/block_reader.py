"""Parts of blocks, read from files, with the checksums of what is read."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distdl_jax.checkpoint.checksums import checksums, crc32
from distdl_jax.checkpoint.disk import open_to_read, read_exactly
from distdl_jax.checkpoint.hyperslabs import fill
from distdl_jax.checkpoint.layout import Block, Leaf, chunks, volume
from distdl_jax.checkpoint.progress import Pause
from distdl_jax.checkpoint.tensor_file import dtype_named
from distdl_jax.errors import CheckpointError
from distdl_jax.plans.decomposition import Box, box_shape, intersect

_OPEN_FILES = 32


class Files:
    """The files of a folder, opened as they are needed; the longest unused is closed where there are many."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._descriptors: OrderedDict[str, int] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def path(self, name: str) -> str:
        """Where a file is."""
        return os.path.join(self.folder, name)

    def descriptor(self, name: str) -> int:
        """The descriptor of a file; it may be closed when another file is asked for."""
        if name not in self._descriptors:
            if len(self._descriptors) == _OPEN_FILES:
                os.close(self._descriptors.popitem(last=False)[1])
            self._descriptors[name] = open_to_read(self.path(name), in_folder=True)
        self._descriptors.move_to_end(name)
        return self._descriptors[name]

    def size(self, name: str) -> int:
        """Return the number of bytes of a file."""
        if name not in self._sizes:
            self._sizes[name] = os.fstat(self.descriptor(name)).st_size
        return self._sizes[name]

    def close(self) -> None:
        """Close all of them."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Chunks:
    """The bytes of one block, by ranges; a chunk is believed only when its checksum fits."""

    def __init__(self, files: Files, leaf: str, block: Block, nbytes: int) -> None:
        self._files, self._leaf, self._block, self._nbytes = files, leaf, block, nbytes
        self._checksums = self._read_checksums()
        self._kept: dict[int, memoryview] = {}

    def _read_checksums(self) -> list[int]:
        its = self._block.checksums
        found = memoryview(bytearray(4 * chunks(self._nbytes, self._block.chunk)))
        self._read_exactly([found], its.offset)
        if crc32(found) != its.crc32:
            raise self._damaged("the checksum of its checksums does not fit", its.offset)
        numbers: list[int] = np.frombuffer(found, "<u4").tolist()
        return numbers

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""
        first, cut = divmod(start, self._block.chunk)
        if not cut and (not len(into) % self._block.chunk or start + len(into) == self._nbytes):
            self._read_chunks([into], first)
        else:
            self._read_cut(start, into)

    def _read_cut(self, start: int, into: memoryview) -> None:
        """The same, where the chunk at one of the ends, or at both, holds more than what is needed."""
        chunk, stop = self._block.chunk, start + len(into)
        first, last = start // chunk, (stop - 1) // chunk
        # Chunks from `low` on and before `high` are whole, and go to their place.
        low = first + (start > first * chunk)
        high = last + (stop == self._end(last))
        ends = dict.fromkeys(n for n in (first, last) if not low <= n < high)
        fresh = {n: memoryview(bytearray(self._end(n) - n * chunk)) for n in ends if n not in self._kept}
        views = [fresh[n] for n in fresh if n < low]
        if low < high:
            views.append(into[low * chunk - start : min(high * chunk, stop) - start])
        views += [fresh[n] for n in fresh if n >= low]
        if views:
            self._read_chunks(views, min([*fresh, *range(low, high)[:1]]))
        for n in ends:
            begin, end = max(n * chunk, start), min((n + 1) * chunk, stop)
            whole = fresh.get(n) or self._kept[n]
            into[begin - start : end - start] = whole[begin - n * chunk : end - n * chunk]
        if last in fresh:
            self._kept = {last: fresh[last]}

    def _end(self, number: int) -> int:
        return min((number + 1) * self._block.chunk, self._nbytes)

    def _read_chunks(self, views: Sequence[memoryview], first: int) -> None:
        """Fill these, one after the other, with whole chunks from number `first` on, and compare their checksums."""
        chunk = self._block.chunk
        offset = self._block.offset + first * chunk
        self._read_exactly(views, offset)
        found = [crc for view in views for crc in checksums(view, chunk)]
        expected = self._checksums[first : first + len(found)]
        if found != expected:
            wrong = next(n for n, (crc, other) in enumerate(zip(found, expected, strict=True)) if crc != other)
            raise self._damaged("the checksum does not fit", offset + wrong * chunk)

    def _read_exactly(self, views: Sequence[memoryview], offset: int) -> None:
        try:
            read_exactly(self._files.descriptor(self._block.file), views, offset)
        except EOFError:
            raise self._damaged("it ends too early", offset) from None

    def _damaged(self, problem: str, offset: int) -> CheckpointError:
        return _damaged(self._files, self._leaf, self._block, f"{problem} (of the bytes from {offset} on)")


def _damaged(files: Files, leaf: str, block: Block, problem: str) -> CheckpointError:
    ranges = " x ".join(f"{start}:{stop}" for start, stop in block.box) or "()"
    return CheckpointError(
        f"{files.path(block.file)} is damaged in the block {ranges} of the leaf {leaf or 'tree'}: {problem}. Another "
        "step may be sound."
    )


def read_leaf(files: Files, leaf: Leaf, wanted: Box, make: Callable[[], np.ndarray[Any, Any]], pause: Pause) -> Any:
    """Return the block of `wanted`, once `make` has made it, filled from the blocks in files that share some of it.

    At most a slab, and chunks at its ends, are held besides. `pause` is called between two reads.
    """
    itemsize = dtype_named(leaf.form.dtype).itemsize
    needed = [block for block in leaf.blocks if volume(intersect(block.box, wanted))]
    for block in needed:
        if block.end(itemsize) > files.size(block.file):
            raise _damaged(files, leaf.path, block, "it ends too early")
    into = make()
    for block in needed:
        bytes_in_file = _Chunks(files, leaf.path, block, volume(block.box) * itemsize)

        def read(start: int, view: memoryview, its: _Chunks = bytes_in_file) -> None:
            pause()
            its.read(start, view)

        shared = intersect(block.box, wanted)
        fill(read, box_shape(block.box), _relative(shared, block.box), into, _relative(shared, wanted))
    return into


def _relative(box: Box, to: Box) -> Box:
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(box, to, strict=True))
