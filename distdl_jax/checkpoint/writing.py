"""One checkpoint on its way to disk: planned by all workers together, written by each alone, completed by the first.

Between the first and the last step workers say what they have done in small files (notes) in the folder itself, so that
a checkpoint can be written and completed in threads, which can't agree on anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Event
from typing import Any, NamedTuple

import numpy as np

from distdl_jax.checkpoint.agreement import checked_path
from distdl_jax.checkpoint.checksums import checksums, crc32
from distdl_jax.checkpoint.contents import Leaves, Own, Placeholders, agree_on_contents
from distdl_jax.checkpoint.disk import Disk, disk, naming, write_all, write_file
from distdl_jax.checkpoint.folders import begin_folder, complete_folder, written_in
from distdl_jax.checkpoint.layout import (
    CHECKSUMS,
    MANIFEST,
    Block,
    Checksums,
    Leaf,
    Manifest,
    block_of,
    chunk_of,
    chunks,
    said_of,
    worker_file,
    worker_note,
)
from distdl_jax.checkpoint.progress import Pause
from distdl_jax.checkpoint.tensor_file import Tensor, bytes_of, laid_out
from distdl_jax.errors import CheckpointError
from distdl_jax.plans.decomposition import box_shape
from distdl_jax.validation import checked_integer
from distdl_jax.world import World

PIECE = 2**23
"""Bytes that are written in one go at most."""

UNSYNCED = 2**28
"""Bytes after which a file is synced while it is written, so that no sync takes long by itself."""


class Plan(NamedTuple):
    """What all workers have agreed on: the leaves, by path and form, the folder of the run, the step, and the name of
    the checkpoint's folder as long as it is written."""

    leaves: Leaves
    path: str
    step: int
    unfinished: str


class _Unfinished:
    """A file that is being written."""

    def __init__(self, its: Disk, path: str, size: int, pause: Pause) -> None:
        self._disk, self._pause = its, pause
        self._descriptor = its.create(path)
        self._unsynced = 0
        try:
            its.reserve(self._descriptor, size)
        except BaseException:
            self.close()
            raise

    def write_block(self, block: np.ndarray[Any, Any], tensor: Tensor, chunk: int) -> list[int]:
        """Write a block at its place; the checksums of its chunks."""
        data, sums = bytes_of(block), list[int]()
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            sums += checksums(piece, chunk)
            self.write(piece, tensor.offset + start)
        return sums

    def write(self, data: memoryview, offset: int) -> None:
        """Write, and sync where much has been written since the last time."""
        write_all(self._disk, self._descriptor, data, offset)
        self._unsynced += len(data)
        if self._unsynced >= UNSYNCED:
            self.sync()
        self._pause()

    def sync(self) -> None:
        """Return when all of it is on disk."""
        self._disk.sync(self._descriptor)
        self._unsynced = 0

    def close(self) -> None:
        """Close it."""
        self._disk.close(self._descriptor)


class Writing:
    """A checkpoint that this worker takes part in writing; made by `begin`."""

    def __init__(self, world: World, plan: Plan, own: Sequence[Own], placeholders: Placeholders) -> None:
        self._world, self._plan, self._own = world, plan, list(own)
        self._placeholders = placeholders
        self.disk = disk.get()
        self._folder = os.path.join(plan.path, plan.unfinished)

    @property
    def step(self) -> int:
        """Which step it is of."""
        return self._plan.step

    def write(self, pause: Pause) -> None:
        """Write this worker's file, and the note that it is on disk. `pause` is called between two pieces."""
        note: dict[str, Any] = {"file": None, "bytes": 0, "blocks": []}
        name = worker_file(self._world.rank)
        with written_in(self._folder):
            if self._own:
                with naming(os.path.join(self._folder, name)):
                    note = self._write_file(name, pause)
            self._own = []
            note["placeholders"] = list(self._placeholders.items())
            name = os.path.join(self._folder, worker_note(self._world.rank))
            write_file(self.disk, name + ".part", json.dumps(note).encode())
            self.disk.rename(name + ".part", name)  # who looks for it finds all of it

    def _write_file(self, name: str, pause: Pause) -> dict[str, Any]:
        shapes = [box_shape(own.box) for own in self._own]
        names = [self._plan.leaves[own.leaf][0] for own in self._own]
        steps = [chunk_of(shape, own.itemsize) for own, shape in zip(self._own, shapes, strict=True)]
        counts = [chunks(own.nbytes, step) for own, step in zip(self._own, steps, strict=True)]
        contents = {its: (own.form.dtype, shape) for its, own, shape in zip(names, self._own, shapes, strict=True)}
        head, tensors, size = laid_out(contents | {CHECKSUMS: ("uint32", (sum(counts),))})
        blocks = []
        file = _Unfinished(self.disk, os.path.join(self._folder, name), size, pause)
        try:
            file.write(memoryview(head), 0)
            sums_at = tensors[CHECKSUMS].offset
            for its, own, step, count in zip(names, self._own, steps, counts, strict=True):
                sums = bytes_of(np.array(file.write_block(own.block(), tensors[its], step), "<u4"))
                file.write(sums, sums_at)
                block = Block(own.box, name, tensors[its].offset, step, Checksums(sums_at, crc32(sums)))
                blocks.append({"leaf": own.leaf, **said_of(block)})
                sums_at += 4 * count
            file.sync()
        finally:
            file.close()
        return {"file": name, "bytes": size, "blocks": blocks}

    def _missing_notes(self) -> list[int]:
        with written_in(self._folder):
            names = set(os.listdir(self._folder))
        return [worker for worker in range(self._world.size) if worker_note(worker) not in names]

    def complete(self) -> None:
        """Make a complete checkpoint of what all workers have written; the first worker does that."""
        with written_in(self._folder):
            manifest = self._manifest()
            for worker in range(self._world.size):
                self.disk.remove(os.path.join(self._folder, worker_note(worker)))
            write_file(self.disk, os.path.join(self._folder, MANIFEST), manifest.to_json().encode())
            self.disk.sync_folder(self._folder)
            complete_folder(self.disk, self._plan.path, self._plan.unfinished, self.step)

    def _manifest(self) -> Manifest:
        """Put the notes of all workers together."""
        leaves = self._plan.leaves
        files: dict[str, int] = {}
        blocks: list[list[Block]] = [[] for _ in leaves]
        placeholders: list[dict[int, tuple[int, ...]]] = [{} for _ in leaves]
        for worker in range(self._world.size):
            with open(os.path.join(self._folder, worker_note(worker)), "rb") as note:
                said = json.load(note)
            for leaf, shape in said["placeholders"]:
                placeholders[leaf][worker] = tuple(shape)
            if said["file"] is None:
                continue
            files[said["file"]] = said["bytes"]
            for each in said["blocks"]:
                blocks[each.pop("leaf")].append(block_of(each))
            if (found := os.stat(os.path.join(self._folder, said["file"])).st_size) != said["bytes"]:
                raise CheckpointError(f"{said['file']} should have {said['bytes']} bytes, and has {found}.")
        return Manifest(
            self.step,
            files,
            tuple(
                Leaf(path, form, tuple(its), shapes)
                for (path, form), its, shapes in zip(leaves, blocks, placeholders, strict=True)
            ),
            self._world.size,
        )

    def wait_for_all(self, cancelled: Event) -> bool:
        """Wait until all workers' files are on disk; False where that is no longer waited for."""
        pause = 0.002
        while self._missing_notes():
            if cancelled.wait(pause):
                return False
            pause = min(2 * pause, 0.1)
        return True

    def abandon(self) -> None:
        """Remove what there is of it, where that can be done."""
        with suppress(OSError):
            self.disk.remove_folder(self._folder)


def begin(
    path: Any, step: Any, tree: Any, specs: Any, world: World, *, copied: bool = False, tidy: bool = False
) -> Writing:
    """The beginning of a checkpoint: what it is to hold, and its folder. Collective in the world.

    `copied`: this worker's blocks are copied to the host, so that what happens to its arrays from then on does not
    matter. `tidy`: what killed jobs have left in `path` is removed.
    """

    def arguments() -> dict[str, Any]:
        return {"path": checked_path(path), "step": checked_integer("step", step, 0)}

    def decide(leaves: Leaves, given: Mapping[str, Any]) -> Plan:
        return Plan(leaves, **given, unfinished=begin_folder(disk.get(), **given, tidy=tidy))

    plan, own, placeholders = agree_on_contents(
        world, "the beginning of a checkpoint", tree, specs, arguments, decide, copied=copied
    )
    return Writing(world, plan, own, placeholders)
