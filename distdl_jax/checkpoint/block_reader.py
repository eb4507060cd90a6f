"""Parts of blocks, read from files, with the checksums of what is read."""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from typing import Any

import numpy as np

from distdl_jax.checkpoint.disk import read_exactly
from distdl_jax.checkpoint.layout import CHUNK, Block, volume
from distdl_jax.checkpoint.slabs import fill
from distdl_jax.errors import CheckpointError
from distdl_jax.plans.decomposition import Box, box_shape, intersect

_OPEN_FILES = 32


class Files:
    """The files of a folder, opened as they are needed; the longest unused is closed where there are many."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._descriptors: OrderedDict[str, int] = OrderedDict()

    def path(self, name: str) -> str:
        """Where a file is."""
        return os.path.join(self.folder, name)

    def descriptor(self, name: str) -> int:
        """The descriptor of a file; it may be closed when another file is asked for."""
        if name not in self._descriptors:
            if len(self._descriptors) == _OPEN_FILES:
                os.close(self._descriptors.popitem(last=False)[1])
            self._descriptors[name] = os.open(self.path(name), os.O_RDONLY)
        self._descriptors.move_to_end(name)
        return self._descriptors[name]

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
        self._last: tuple[int, memoryview] = (-1, memoryview(b""))

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""
        stop = start + len(into)
        for number in range(start // CHUNK, -(-stop // CHUNK)):
            first, last = number * CHUNK, min((number + 1) * CHUNK, self._nbytes)
            if start <= first and last <= stop:
                self._check(number, into[first - start : last - start])
                continue
            if self._last[0] != number:
                chunk = memoryview(bytearray(last - first))
                self._check(number, chunk)
                self._last = number, chunk
            low, high = max(first, start), min(last, stop)
            into[low - start : high - start] = self._last[1][low - first : high - first]

    def _check(self, number: int, into: memoryview) -> None:
        block = self._block
        try:
            read_exactly(self._files.descriptor(block.file), into, block.offset + number * CHUNK)
        except EOFError:
            problem = "it ends too early"
        else:
            if zlib.crc32(into) == block.crc32[number]:
                return
            problem = "the checksum does not fit"
        ranges = " x ".join(f"{start}:{stop}" for start, stop in block.box) or "()"
        raise CheckpointError(
            f"{self._files.path(block.file)} is damaged in the block {ranges} of the leaf {self._leaf or 'tree'}: "
            f"{problem} (of the bytes from {block.offset + number * CHUNK} on). Another step may be sound."
        )


def read_part(files: Files, leaf: str, block: Block, wanted: Box, into: np.ndarray[Any, Any]) -> int:
    """Fill what `into`, the block of `wanted`, shares with a block of a file; how many elements that is.

    At most a slab and a chunk of the file are held besides.
    """
    shared = intersect(block.box, wanted)
    if not (count := volume(shared)):
        return 0
    itemsize = into.dtype.itemsize
    shape = box_shape(block.box)
    chunks = _Chunks(files, leaf, block, volume(block.box) * itemsize)
    part = _relative(shared, block.box)
    place = _relative(shared, wanted)
    at: Any = (*(slice(start, stop) for start, stop in place), ...)
    dest = into[at]
    fill(chunks.read, shape, part, dest)
    return count


def _relative(box: Box, to: Box) -> Box:
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(box, to, strict=True))
