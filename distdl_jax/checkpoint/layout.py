"""What a checkpoint is on disk: the names of its folders and files, and its manifest. Text and integers only.

path/
  step-0000000100/            complete: it got this name when everything in it was on disk
    manifest.json             which box of which leaf lies where, and checksums
    worker-00000.safetensors  the blocks that worker 0 wrote
  step-0000000100.1/          the same step, saved once more: it counts in place of the first
  .step-0000000200.5f3a91/    being written, or left by a job that was killed
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

from distdl_jax.errors import CheckpointError
from distdl_jax.plans.decomposition import Box, box_shape

FORMAT = "distdl_jax.checkpoint"
VERSION = 1
MANIFEST = "manifest.json"

CHUNK = 2**20
"""Bytes of a block that share a checksum: the least that a reader has to read to know that what it needs is sound."""

_COMPLETE = re.compile(r"step-(\d{10,})(?:\.(\d+))?")
_UNFINISHED = re.compile(r"\.step-(\d{10,})\.[0-9a-f]+")


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

    def unfinished(self, token: str) -> str:
        """What it is called as long as it is being written."""
        return f".step-{self.step:010d}.{token}"


def complete_folders(names: Iterable[str]) -> list[Folder]:
    """The complete checkpoints among the names in a folder, in ascending order.

    >>> complete_folders(["step-0000000012", "step-0000000003.1", ".step-0000000099.ab", "notes"])
    [Folder(step=3, again=1), Folder(step=12, again=0)]
    """
    found = [match for name in names if (match := _COMPLETE.fullmatch(name))]
    return sorted(Folder(int(match[1]), int(match[2] or 0)) for match in found)


def unfinished_folders(names: Iterable[str]) -> dict[str, int]:
    """The names of checkpoints that are not complete, with their steps."""
    return {name: int(match[1]) for name in names if (match := _UNFINISHED.fullmatch(name))}


def worker_file(worker: int) -> str:
    """The file that a worker writes its blocks to."""
    return f"worker-{worker:05d}.safetensors"


def worker_note(worker: int) -> str:
    """The file, gone once the checkpoint is complete, in which a worker says that its own is on disk."""
    return f"worker-{worker:05d}.json"


def chunks(nbytes: int) -> int:
    """How many checksums a block has.

    >>> chunks(0), chunks(1), chunks(CHUNK), chunks(CHUNK + 1)
    (0, 1, 1, 2)
    """
    return -(-nbytes // CHUNK)


@dataclass(frozen=True)
class Block:
    """One block of a leaf, row-major and little-endian, in one file.

    - `box`: which part of the leaf it is. `offset`: the byte of the file that it begins at.
    - `crc32`: the checksum of each `CHUNK` bytes of it, the last of what is left.
    """

    box: Box
    file: str
    offset: int
    crc32: tuple[int, ...]


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
    """A leaf: `path` is where it stands in its tree, as `jax.tree_util.keystr` writes it."""

    path: str
    form: Form
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says: the step, the sizes of the files in bytes, and the leaves."""

    step: int
    files: Mapping[str, int]
    leaves: tuple[Leaf, ...]

    def to_json(self) -> str:
        """The text of the file. Its checksum is that of the compact JSON of the rest, with sorted keys."""
        said = {"step": self.step, "chunk": CHUNK, "files": dict(self.files)}
        said["leaves"] = [
            {"path": leaf.path, **asdict(leaf.form), "blocks": [asdict(block) for block in leaf.blocks]}
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
        if outer.get("version") != VERSION:
            raise CheckpointError(
                f"{where} is of version {outer.get('version')}, and this distdl_jax reads version {VERSION}."
            )
        said = outer.get("checkpoint")
        if outer.get("crc32") != _crc_of(said):
            raise CheckpointError(f"{where} is damaged: its checksum does not fit.")
        if said["chunk"] != CHUNK:
            raise CheckpointError(f"{where} has checksums of {said['chunk']} bytes each, and not of {CHUNK}.")
        return cls(said["step"], said["files"], tuple(_leaf(leaf) for leaf in said["leaves"]))


def block_of(said: Mapping[str, Any]) -> Block:
    """A block, from what JSON makes of it."""
    box = tuple((start, stop) for start, stop in said["box"])
    return Block(box, said["file"], said["offset"], tuple(said["crc32"]))


def volume(box: Box) -> int:
    """The number of elements in a box."""
    return prod(box_shape(box))


def _leaf(said: Mapping[str, Any]) -> Leaf:
    form = Form(tuple(said["shape"]), said["dtype"], said["weak"], said["key"])
    return Leaf(said["path"], form, tuple(map(block_of, said["blocks"])))


def _crc_of(said: Any) -> int:
    return zlib.crc32(json.dumps(said, sort_keys=True, separators=(",", ":")).encode())
