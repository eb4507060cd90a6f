"""What is in the folder of a checkpoint: the names of its files, and its manifest. Text and integers only.

step-0000000100/
  manifest.json             which box of which leaf lies where, and checksums
  worker-00000.safetensors  the blocks that worker 0 wrote
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

from distdl_jax.checkpoint.slabs import ROW
from distdl_jax.errors import CheckpointError
from distdl_jax.plans.decomposition import Box, box_shape

FORMAT = "distdl_jax.checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
CHECKSUMS = "distdl_jax.crc32"
"""The tensor of a file that holds the checksums of its blocks; leaves have no such name."""

CHUNKS = 2**13, 2**20
"""Bytes of a block that share a checksum, at least and at most."""


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
    - `checksums`: where these are, or, in version 1, what they are.
    """

    box: Box
    file: str
    offset: int
    chunk: int
    checksums: Checksums | tuple[int, ...]


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
    """What `manifest.json` says: the step, the sizes of the files in bytes, the leaves, and the number of workers; None
    where it was written before that was in it."""

    step: int
    files: Mapping[str, int]
    leaves: tuple[Leaf, ...]
    workers: int | None

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
    def from_json(cls, text: str | bytes, where: str) -> Manifest:
        """The manifest in a text; `where` is what messages call it.

        **Raises:** `CheckpointError` where it is none, is damaged, or of a version that is not known.
        """
        try:
            outer = json.loads(text)
            is_one = outer.get("format") == FORMAT
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{where} is damaged: it is not JSON any more ({error}).") from None
        if not is_one:
            raise CheckpointError(f'{where} is no manifest of a checkpoint: its "format" is not {FORMAT!r}.')
        if outer.get("version") not in range(1, VERSION + 1):
            raise CheckpointError(
                f"{where} is of version {outer.get('version')}, and this distdl_jax reads versions 1 to {VERSION}."
            )
        said = outer.get("checkpoint")
        if outer.get("crc32") != _crc_of(said):
            raise CheckpointError(f"{where} is damaged: its checksum does not fit.")
        leaves = tuple(_leaf(leaf, said.get("chunk")) for leaf in said["leaves"])
        return cls(said["step"], said["files"], leaves, said.get("workers"))


def block_of(said: Mapping[str, Any], chunk: int | None = None) -> Block:
    """A block, from what JSON makes of it. `chunk`: that of version 1, the same for all blocks."""
    box = tuple((start, stop) for start, stop in said["box"])
    if chunk is not None:
        return Block(box, said["file"], said["offset"], chunk, tuple(said["crc32"]))
    return Block(box, said["file"], said["offset"], said["chunk"], Checksums(**said["checksums"]))


def volume(box: Box) -> int:
    """The number of elements in a box."""
    return prod(box_shape(box))


def _leaf(said: Mapping[str, Any], chunk: int | None) -> Leaf:
    form = Form(tuple(said["shape"]), said["dtype"], said["weak"], said["key"])
    placeholders = {int(worker): tuple(shape) for worker, shape in said.get("placeholders", {}).items()}
    return Leaf(said["path"], form, tuple(block_of(block, chunk) for block in said["blocks"]), placeholders)


def said_of(block: Block) -> dict[str, Any]:
    """What JSON makes of a block."""
    assert isinstance(block.checksums, Checksums)
    return asdict(block) | {"checksums": block.checksums._asdict()}


def _crc_of(said: Any) -> int:
    return zlib.crc32(json.dumps(said, sort_keys=True, separators=(",", ":")).encode())
