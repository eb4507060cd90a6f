"""What is in the folder of a checkpoint: the names of its files, and its manifest. Text and integers only.

step-0000000100/
  manifest.json             which box of which leaf lies where, and checksums
  worker-00000.safetensors  the blocks that worker 0 wrote
"""

from __future__ import annotations

import json
import re
import reprlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

from distdl_jax.checkpoint.hyperslabs import ROW
from distdl_jax.checkpoint.strict_json import fields, integer, integers, parsed, typed
from distdl_jax.checkpoint.tensor_file import dtype_named, is_storable
from distdl_jax.errors import CheckpointError
from distdl_jax.plans.decomposition import Box, box_shape

FORMAT = "distdl_jax.checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
CHECKSUMS = "distdl_jax.crc32"
"""The tensor of a file that holds the checksums of its blocks; leaves have no such name."""

CHUNKS = 2**13, 2**20
"""Bytes of a block that share a checksum, at least and at most."""


_WORKER_FILE = re.compile(r"worker-\d{5,}\.safetensors", re.ASCII)
_LARGEST_PLACEHOLDER = 2**31


def worker_file(worker: int) -> str:
    """The file that a worker writes its blocks to."""
    return f"worker-{worker:05d}.safetensors"


def worker_note(worker: int) -> str:
    """The file, gone once the checkpoint is complete, in which a worker says that its own is on disk."""
    return f"worker-{worker:05d}.json"


def chunk_of(shape: Sequence[int], itemsize: int) -> int:
    """How many bytes of a block of `shape` are to share a checksum: the least that has to be read to know that some of
    them are sound.

    An eighth of the shortest stretch of which parts are read on their own, so that who needs a part of each reads
    little more; a power of two.

    >>> chunk_of((1000, 2**14), 4), chunk_of((64, 64, 3, 3), 4), chunk_of((2**24,), 4), chunk_of((), 4)
    (8192, 16384, 1048576, 1048576)
    """
    stretches = (prod(shape[d:]) * itemsize for d in reversed(range(len(shape))))
    eighth = next((nbytes for nbytes in stretches if nbytes > ROW), 8 * CHUNKS[1]) // 8
    return min(max(1 << eighth.bit_length() - 1, CHUNKS[0]), CHUNKS[1])


def chunks(nbytes: int, chunk: int) -> int:
    """How many checksums a block has.

    >>> chunks(0, 8), chunks(1, 8), chunks(8, 8), chunks(9, 8)
    (0, 1, 1, 2)
    """
    return -(-nbytes // chunk)


class Checksums(NamedTuple):
    """Where the checksums of a block's chunks are in its file, 32 bits each, and what their own is."""

    offset: int
    crc32: int


@dataclass(frozen=True)
class Block:
    """One block of a leaf, row-major and little-endian, in one file.

    - `box`: which part of the leaf it is. `offset`: the byte of the file that it begins at.
    - `chunk`: how many bytes of it share a checksum (CRC-32), the last one having what is left.
    """

    box: Box
    file: str
    offset: int
    chunk: int
    checksums: Checksums

    def end(self, itemsize: int) -> int:
        """Return how many bytes its file has at least, from the bytes of an element."""
        nbytes = volume(self.box) * itemsize
        return max(self.offset + nbytes, self.checksums.offset + 4 * chunks(nbytes, self.chunk))


@dataclass(frozen=True)
class Form:
    """What a leaf is made of, apart from its blocks.

    - `shape`: of the whole, as it is stored: of random keys, with the dimensions of their data.
    - `dtype`: numpy's name of it. `weak`: whether JAX lets other dtypes decide, as those of Python numbers.
    - `key`: the implementation of random keys; None for numbers.
    """

    shape: tuple[int, ...]
    dtype: str
    weak: bool = False
    key: str | None = None


@dataclass(frozen=True)
class Leaf:
    """A leaf: `path` is where it stands in its tree, as `jax.tree_util.keystr` writes it.

    `placeholders`: the shapes of what workers held in place of a part, by world rank, where these were not `(0,)`.
    """

    path: str
    form: Form
    blocks: tuple[Block, ...]
    placeholders: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says: the step, the sizes of the files in bytes, the leaves, and the number of workers."""

    step: int
    files: Mapping[str, int]
    leaves: tuple[Leaf, ...]
    workers: int

    def to_json(self) -> str:
        """The text of the file. Its checksum is that of the compact JSON of the rest, with sorted keys."""
        said: dict[str, Any] = {"step": self.step, "files": dict(self.files), "workers": self.workers}
        said["leaves"] = [
            {
                "path": leaf.path,
                **asdict(leaf.form),
                "blocks": [said_of(block) for block in leaf.blocks],
                "placeholders": {str(worker): list(shape) for worker, shape in leaf.placeholders.items()},
            }
            for leaf in self.leaves
        ]
        return json.dumps({"format": FORMAT, "version": VERSION, "crc32": _crc_of(said), "checkpoint": said}) + "\n"

    @classmethod
    def from_json(cls, text: bytes, where: str) -> Manifest:
        """Return the manifest in a text; `where` is what messages call it.

        All that a reader relies on is checked: that blocks lie in the files, and files in the folder; that the blocks
        of a leaf cover it, and don't overlap.

        **Raises:** `CheckpointError` where it is none, is damaged, or of a version that is not known.
        """
        try:
            outer = parsed(text)
        except ValueError as error:
            raise CheckpointError(f"{where} is damaged: it is not JSON any more ({error}).") from None
        if not isinstance(outer, dict) or outer.get("format") != FORMAT:
            raise CheckpointError(f'{where} is no manifest of a checkpoint: its "format" is not {FORMAT!r}.')
        if (version := outer.get("version")) != VERSION:
            raise CheckpointError(
                f"{where} is of version {reprlib.repr(version)}, and this distdl_jax reads version {VERSION}."
            )
        try:
            if outer.get("crc32") != _crc_of(outer.get("checkpoint")):
                raise ValueError("its checksum does not fit")
            step, said_files, workers, leaves = fields(outer["checkpoint"], "step", "files", "workers", "leaves")
            files = {_file(name): integer(size) for name, size in typed(said_files, dict).items()}
            found = tuple(_leaf(leaf, files) for leaf in typed(leaves, list))
            if len({leaf.path for leaf in found}) < len(found):
                raise ValueError("it has a leaf twice")
            return cls(integer(step), files, found, integer(workers, 1))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{where} is damaged: {error}.") from None


def block_of(said: Any) -> Block:
    """Return a block, from what JSON makes of it; `ValueError` where that is none."""
    box, file, offset, chunk, its_checksums = fields(said, "box", "file", "offset", "chunk", "checksums")
    of_checksums = fields(its_checksums, *Checksums._fields)
    ranges = [(start, stop) for start, stop in map(integers, typed(box, list))]
    if any(start >= stop for start, stop in ranges):
        raise ValueError(f"{reprlib.repr(box)} is no box with elements")
    its = Checksums(*map(integer, of_checksums))
    return Block(tuple(ranges), typed(file, str), integer(offset), integer(chunk, 1, CHUNKS[1]), its)


def volume(box: Box) -> int:
    """The number of elements in a box."""
    return prod(box_shape(box))


def _file(name: Any) -> str:
    if not _WORKER_FILE.fullmatch(typed(name, str)):
        raise ValueError(f"{reprlib.repr(name)} is no name of a file in the folder of a checkpoint")
    return str(name)


def _leaf(said: Any, files: Mapping[str, int]) -> Leaf:
    names = ("path", "shape", "dtype", "weak", "key", "blocks", "placeholders")
    path, shape, dtype, weak, key, said_blocks, said_shapes = fields(said, *names)
    if not is_storable(typed(dtype, str)):
        raise ValueError(f"{reprlib.repr(dtype)} is no dtype of a leaf")
    form = Form(integers(shape), dtype, typed(weak, bool), key if key is None else typed(key, str))
    placeholders = {int(worker): integers(shape) for worker, shape in typed(said_shapes, dict).items()}
    if any(0 not in shape or max(shape) > _LARGEST_PLACEHOLDER for shape in placeholders.values()):
        raise ValueError("a placeholder has elements")
    blocks = tuple(map(block_of, typed(said_blocks, list)))
    for block in blocks:
        if block.file not in files or block.end(dtype_named(dtype).itemsize) > files[block.file]:
            raise ValueError(f"a block of the leaf {path or 'tree'} is in no file")
    if not _is_cut(form.shape, [block.box for block in blocks]):
        raise ValueError(f"its blocks do not cover the leaf {path or 'tree'}")
    return Leaf(typed(path, str), form, blocks, placeholders)


def _is_cut(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether boxes are those that cuts along the dimensions make of a tensor, without those of no elements.

    >>> _is_cut((4, 3), [((0, 2), (0, 3)), ((2, 4), (0, 3))]), _is_cut((4,), [((0, 3),), ((2, 4),)]), _is_cut((), [()])
    (True, False, True)
    """
    if not prod(shape):
        return not boxes
    if any(len(box) != len(shape) for box in boxes):
        return False
    along = [sorted({box[d] for box in boxes}) for d in range(len(shape))]
    whole = all(
        [0, *(stop for _, stop in its)] == [*(start for start, _ in its), n]
        for its, n in zip(along, shape, strict=True)
    )
    return whole and prod(map(len, along)) == len(boxes) == len({*boxes})


def said_of(block: Block) -> dict[str, Any]:
    """What JSON makes of a block."""
    return asdict(block) | {"checksums": block.checksums._asdict()}


def _crc_of(said: Any) -> int:
    return zlib.crc32(json.dumps(said, sort_keys=True, separators=(",", ":")).encode())
