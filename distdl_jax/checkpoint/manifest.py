"""The folder of a checkpoint: the names of its files, and its manifest. Only text and integers.

step-0000000100/
  manifest.json             the file and position of each leaf's boxes, and checksums
  worker-00000.safetensors  the blocks that worker 0 wrote
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

from distdl_jax.errors import CheckpointError
from distdl_jax.partitions.formats.boxes_in_files import ROW
from distdl_jax.partitions.formats.plain_files import fields, integer, integers, parsed, typed
from distdl_jax.partitions.formats.safetensors import dtype_named, is_storable
from distdl_jax.plans.decomposition import Box, box_shape
from distdl_jax.text import brief, quoted

try:
    from zlib_ng.zlib_ng import crc32  # in a fraction of the time
except ImportError:
    from zlib import crc32

FORMAT = "distdl_jax.checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
CHECKSUMS = "distdl_jax.crc32"
"""The tensor in a file with the checksums of its blocks; no leaf has this name."""

CHUNKS = 2**13, 2**20
"""Bytes of a block that share a checksum, minimum and maximum."""


_WORKER_FILE = re.compile(r"worker-\d{5,}\.safetensors", re.ASCII)
_LARGEST_PLACEHOLDER = 2**31


def worker_file(worker: int) -> str:
    """Return the name of the file to which a worker writes its blocks."""
    return f"worker-{worker:05d}.safetensors"


def worker_note(worker: int) -> str:
    """Return the name of the file, removed at the end, which tells that a worker's own is on disk."""
    return f"worker-{worker:05d}.json"


def chunk_of(shape: Sequence[int], itemsize: int) -> int:
    """Return how many bytes of a block of `shape` share a checksum: the least to read in order to trust any.

    It is a power of two, an eighth of the shortest contiguous range that is read in parts, so that a worker that needs
    a part of each range reads little more.

    >>> chunk_of((1000, 2**14), 4), chunk_of((64, 64, 3, 3), 4), chunk_of((2**24,), 4), chunk_of((), 4)
    (8192, 16384, 1048576, 1048576)
    """
    stretches = (prod(shape[d:]) * itemsize for d in reversed(range(len(shape))))
    eighth = next((nbytes for nbytes in stretches if nbytes > ROW), 8 * CHUNKS[1]) // 8
    return min(max(1 << eighth.bit_length() - 1, CHUNKS[0]), CHUNKS[1])


def checksums(data: memoryview, chunk: int) -> list[int]:
    """Return the CRC-32 of each `chunk` bytes, and of the rest.

    >>> checksums(memoryview(b"123456789abc"), 9) == [0xCBF43926, crc32(b"abc")]
    True
    """
    return [crc32(data[start : start + chunk]) for start in range(0, len(data), chunk)]


def chunks(nbytes: int, chunk: int) -> int:
    """Return the number of checksums of a block.

    >>> chunks(0, 8), chunks(1, 8), chunks(8, 8), chunks(9, 8)
    (0, 1, 1, 2)
    """
    return -(-nbytes // chunk)


class Checksums(NamedTuple):
    """The place of the checksums of a block's chunks in its file, 32 bits each, and their own checksum."""

    offset: int
    crc32: int


@dataclass(frozen=True)
class Block:
    """One block of a leaf, row-major and little-endian, in one file.

    - `box`: its part of the leaf. `offset`: its first byte in the file.
    - `chunk`: how many bytes share a checksum (CRC-32); the last one covers the rest.
    """

    box: Box
    file: str
    offset: int
    chunk: int
    checksums: Checksums

    def end(self, itemsize: int) -> int:
        """Return the minimum size of its file, given the bytes of an element."""
        nbytes = volume(self.box) * itemsize
        return max(self.offset + nbytes, self.checksums.offset + 4 * chunks(nbytes, self.chunk))


@dataclass(frozen=True)
class Form:
    """The shape and kind of a leaf's elements.

    - `shape`: of the whole tensor, as stored: for random keys, with the dimensions of their data.
    - `dtype`: numpy's name. `weak`: whether other dtypes take precedence in JAX, as for Python numbers.
    - `key`: the implementation of random keys; None for numbers.
    """

    shape: tuple[int, ...]
    dtype: str
    weak: bool = False
    key: str | None = None


@dataclass(frozen=True)
class SavedLeaf:
    """A leaf: its path in the tree, in the form of `jax.tree_util.keystr`, its form and blocks.

    `placeholders`: the shapes of workers' placeholders other than `(0,)`, by world rank.
    """

    path: str
    form: Form
    blocks: tuple[Block, ...]
    placeholders: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`: the step, the sizes of the files in bytes, the leaves, the number of workers."""

    step: int
    files: Mapping[str, int]
    leaves: tuple[SavedLeaf, ...]
    workers: int

    def to_json(self) -> str:
        """Return the text of the file. Its checksum is of the compact JSON of the rest, with sorted keys."""
        content: dict[str, Any] = {"step": self.step, "files": dict(self.files), "workers": self.workers}
        content["leaves"] = [
            {
                "path": leaf.path,
                **asdict(leaf.form),
                "blocks": [block_to_json(block) for block in leaf.blocks],
                "placeholders": {str(worker): list(shape) for worker, shape in leaf.placeholders.items()},
            }
            for leaf in self.leaves
        ]
        return (
            json.dumps({"format": FORMAT, "version": VERSION, "crc32": _crc_of(content), "checkpoint": content}) + "\n"
        )

    @classmethod
    def from_json(cls, text: bytes, where: str) -> Manifest:
        """Return the manifest in a text, which messages call `where`.

        Readers rely on these checks: blocks are in files, and files in the folder; the blocks of a leaf cover it, and
        don't overlap.

        **Raises:** `CheckpointError` if it is not a manifest, is damaged, or of an unknown version.
        """
        try:
            outer = parsed(text)
        except ValueError as error:
            raise CheckpointError(f"{where} is damaged: it is not valid JSON ({error}).") from None
        if not isinstance(outer, dict) or outer.get("format") != FORMAT:
            raise CheckpointError(f'{where} is not a manifest of a checkpoint: its "format" is not {FORMAT!r}.')
        # Before the checksum: a later version may compute it otherwise, and deserves its own sentence.
        if (version := outer.get("version")) != VERSION:
            raise CheckpointError(
                f"{where} is of version {quoted(version)}, but this distdl_jax reads version {VERSION}."
            )
        try:
            if outer.get("crc32") != _crc_of(outer.get("checkpoint")):
                raise ValueError("its checksum does not match")
            step, sizes, workers, leaves = fields(outer["checkpoint"], "step", "files", "workers", "leaves")
            files = {_file(name): integer(size) for name, size in typed(sizes, dict).items()}
            manifest_leaves = tuple(_leaf(leaf, files) for leaf in typed(leaves, list))
            if len({leaf.path for leaf in manifest_leaves}) < len(manifest_leaves):
                raise ValueError("it has a leaf twice")
            return cls(integer(step), files, manifest_leaves, integer(workers, 1))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{where} is damaged: {error}.") from None


def block_from_json(value: Any) -> Block:
    """Return a block from its JSON; `ValueError` if it is invalid."""
    box, file, offset, chunk, place = fields(value, "box", "file", "offset", "chunk", "checksums")
    sums = Checksums(*map(integer, fields(place, *Checksums._fields)))
    ranges = [(start, stop) for start, stop in map(integers, typed(box, list))]
    if any(start >= stop for start, stop in ranges):
        raise ValueError(f"{quoted(box)} is not a box with elements")
    return Block(tuple(ranges), typed(file, str), integer(offset), integer(chunk, 1, CHUNKS[1]), sums)


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(box_shape(box))


def _file(name: Any) -> str:
    if not _WORKER_FILE.fullmatch(typed(name, str)):
        raise ValueError(f"{quoted(name)} is not the name of a file in the folder of a checkpoint")
    return str(name)


def _leaf(value: Any, files: Mapping[str, int]) -> SavedLeaf:
    names = ("path", "shape", "dtype", "weak", "key", "blocks", "placeholders")
    path, shape, dtype, weak, key, json_blocks, shapes = fields(value, *names)
    if not is_storable(typed(dtype, str)):
        raise ValueError(f"{quoted(dtype)} is not a dtype of a leaf")
    form = Form(integers(shape), dtype, typed(weak, bool), key if key is None else typed(key, str))
    name = brief(typed(path, str)) or "tree"
    placeholders = {int(worker): integers(shape) for worker, shape in typed(shapes, dict).items()}
    if any(0 not in shape or max(shape) > _LARGEST_PLACEHOLDER for shape in placeholders.values()):
        raise ValueError("a placeholder has elements")
    blocks = tuple(map(block_from_json, typed(json_blocks, list)))
    for block in blocks:
        if block.file not in files or block.end(dtype_named(dtype).itemsize) > files[block.file]:
            raise ValueError(f"a block of the leaf {name} is in no file")
    if not _is_cut(form.shape, [block.box for block in blocks]):
        raise ValueError(f"its blocks do not cover the leaf {name}")
    return SavedLeaf(path, form, blocks, placeholders)


def _is_cut(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether boxes are the nonempty pieces of a tensor cut along its dimensions.

    >>> _is_cut((4, 3), [((0, 2), (0, 3)), ((2, 4), (0, 3))]), _is_cut((4,), [((0, 3),), ((2, 4),)]), _is_cut((), [()])
    (True, False, True)
    """
    if not prod(shape):
        return not boxes
    if any(len(box) != len(shape) for box in boxes):
        return False
    along = [sorted({box[d] for box in boxes}) for d in range(len(shape))]
    whole = all(
        [0, *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), n]
        for ranges, n in zip(along, shape, strict=True)
    )
    return whole and prod(map(len, along)) == len(boxes) == len({*boxes})


def block_to_json(block: Block) -> dict[str, Any]:
    """Return a block as JSON."""
    return asdict(block) | {"checksums": block.checksums._asdict()}


def _crc_of(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
