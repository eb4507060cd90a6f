"""Save a checkpoint: planned by all workers together, written by each separately, completed by the first.

Between the first and the last step workers report in small files (notes) in the folder itself, so that a checkpoint can
be written and completed in threads, which can't agree on anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any, NamedTuple

import jax
import numpy as np

from distdl_jax.checkpoint.agreement import together
from distdl_jax.checkpoint.contents import Leaves, OwnBlock, Placeholders, agree_on_contents
from distdl_jax.checkpoint.disk import (
    Disk,
    Folder,
    abandon_later,
    begin_folder,
    checked_path,
    complete_folder,
    disk,
    naming,
    write_all,
    write_file,
    written_in,
)
from distdl_jax.checkpoint.manifest import (
    CHECKSUMS,
    MANIFEST,
    Block,
    Checksums,
    Manifest,
    SavedLeaf,
    block_from_json,
    block_to_json,
    checksums,
    chunk_of,
    chunks,
    crc32,
    worker_file,
    worker_note,
)
from distdl_jax.errors import CheckpointError, DistDLError, InvalidArgumentError
from distdl_jax.partitions.formats.boxes_in_files import Pause
from distdl_jax.partitions.formats.plain_files import LARGEST, LARGEST_TEXT
from distdl_jax.partitions.formats.safetensors import bytes_of, laid_out
from distdl_jax.partitions.partition import check_partitions
from distdl_jax.partitions.spec_trees import specs_by_path
from distdl_jax.plans.decomposition import box_shape
from distdl_jax.text import quoted
from distdl_jax.transports.progress import Progress, bytes_shown
from distdl_jax.transports.world import World
from distdl_jax.validation import checked_integer

PIECE = 2**23
"""The maximum number of bytes in one write."""

UNSYNCED = 2**28
"""The number of bytes after which a file is synced while it is written, so that no single sync takes long."""


class SavePlan(NamedTuple):
    """The agreement of all workers: the leaves, the folder of the run, the step, and the unfinished folder's name."""

    leaves: Leaves
    path: str
    step: int
    unfinished: str


class ManagerRun(NamedTuple):
    """The run of a Manager, which may go back to an earlier step.

    - `last`: the last step that it has restored or saved, if any.
    - `abandoned`: the checkpoints of higher steps at its last restore, with their times.
    - `begins`: whether it saves its first step, with which unfinished leftovers of killed jobs are removed.
    """

    last: int | None
    abandoned: Mapping[Folder, int]
    begins: bool


class UnfinishedFile:
    """A file being written, by its descriptor; `shown` shows the progress."""

    def __init__(self, target: Disk, descriptor: int, pause: Pause, shown: Progress[Any]) -> None:
        self.descriptor = descriptor
        self._disk, self._pause, self._shown = target, pause, shown
        self._unsynced = 0

    @classmethod
    @contextmanager
    def opened(
        cls, target: Disk, path: str, opens: Callable[[str], int], pause: Pause, shown: Progress[Any]
    ) -> Iterator[UnfinishedFile]:
        """Inside, write to a file that the disk's method `opens` has opened; at the end all of it is on disk."""
        with naming(path), shown:
            file = cls(target, opens(path), pause, shown)
            try:
                yield file
                file.sync()
            finally:
                target.close(file.descriptor)

    def write(self, data: memoryview, offset: int, chunk: int | None = None) -> list[int]:
        """Write in pieces, and sync if much has been written; return the checksums of chunks of `chunk` bytes."""
        sums: list[int] = []
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            sums += checksums(piece, chunk) if chunk else []
            write_all(self._disk, self.descriptor, piece, offset + start)
            self._unsynced += len(piece)
            if self._unsynced >= UNSYNCED:
                self.sync()
            self._shown.advance(len(piece))
            self._pause()
        return sums

    def sync(self) -> None:
        """Return when all of it is on disk."""
        self._disk.sync(self.descriptor)
        self._unsynced = 0


def save(path: str | os.PathLike[str], tree: Any, specs: Any, step: int = 0) -> None:
    """Save the blocks of every leaf, each worker its own, as a checkpoint that any number of workers can read.

    `dj.checkpoint.restore(path, specs)` reads it, on any other partition, too. It is atomic: it gets its name,
    `path/step-0000000100`, once all of it is on disk, and an earlier failure leaves the checkpoints of other steps, and
    an earlier one of the same step, unchanged.

    **Arguments:**

    - `path`: the folder for the checkpoints of a run, with a folder for each step. It is created if missing. All
      workers must see it: on several hosts, it must be on a shared file system.
    - `tree`: this worker's pytree of blocks: parameters, an optimiser's state, running statistics, random keys (also
      typed ones), numbers. Arrays of float16 to float64, bfloat16, complex64 and complex128, integers and booleans;
      zero-volume arrays if this worker holds nothing.
    - `specs`: a pytree of `TensorSpec` of the same structure, as for `dj.gather`; for a random key it describes the
      array of keys, usually `TensorSpec((), P, replicated=True)`. None omits a leaf. Among copies the first is written;
      they must be equal.
    - `step`: 0 or more, below 2**63. A previously saved step is replaced, once the new one is complete.

    Collective over all workers of the world.

    **Raises,** on all workers: `PlanError` if a block does not have the shape of its spec, or the workers' trees
    differ; `InvalidArgumentError` if a leaf has no spec, or a spec no leaf; `CheckpointError` if any of them can't
    write (for instance because the disk is full), or another job has removed the unfinished checkpoint.

    >>> import tempfile, jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> specs = {"w": dj.TensorSpec((3,), P), "step": dj.TensorSpec((), P, replicated=True)}
    >>> with tempfile.TemporaryDirectory() as path:
    ...     save(path, {"w": jnp.arange(3.0), "step": 7}, specs, step=7)
    ...     dj.checkpoint.restore(path, specs)["w"].tolist()
    [0.0, 1.0, 2.0]
    """
    world = world_of_specs(specs)
    finish(world, begin(path, step, tree, specs, world))


def finish(world: World, writing: Writing) -> None:
    """Write this worker's part of a checkpoint, and complete it. Collective in the world."""
    label = f"the writing of the checkpoint of step {writing.step}"
    try:
        together(world, label, writing.write, lambda _: writing.complete())
    except Exception as error:
        if world.rank == 0:
            writing.abandon()
        raise not_saved(writing.step, error) from error


def not_saved(step: int, error: Exception) -> Exception:
    """Return the error that a checkpoint could not be written because of `error`."""
    text = f"The checkpoint of step {step} could not be saved; earlier ones are unchanged. {error}"
    return type(error)(text) if isinstance(error, DistDLError) else error


def world_of_specs(specs: Any) -> World:
    """Return the world of the partitions of a pytree of specs.

    **Raises:** `InvalidTypeError`, `InvalidArgumentError` if one is not a spec, or there is none.
    """
    partitions = {
        f"the partition of specs{jax.tree_util.keystr(path)}": spec.partition
        for path, spec in specs_by_path(specs).items()
        if spec is not None
    }
    if not partitions:
        raise InvalidArgumentError(f"`specs` (={quoted(specs)}) must have at least one TensorSpec.")
    check_partitions(**partitions)
    world: World = next(iter(partitions.values())).world
    return world


class Writing:
    """A checkpoint that this worker helps to write; made by `begin`."""

    def __init__(self, world: World, plan: SavePlan, own: Sequence[OwnBlock], placeholders: Placeholders) -> None:
        self._world, self._plan, self._own = world, plan, list(own)
        self._placeholders = placeholders
        self.disk = disk.get()
        self._folder = os.path.join(plan.path, plan.unfinished)

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self._plan.step

    def write(self, pause: Pause) -> None:
        """Write this worker's file, and the note that it is on disk. `pause` is called between two pieces."""
        note: dict[str, Any] = {"file": None, "bytes": 0, "blocks": []}
        name = worker_file(self._world.rank)
        with written_in(self._folder):
            if self._own:
                note = self._write_file(name, pause)
            self._own = []
            note["placeholders"] = list(self._placeholders.items())
            name = os.path.join(self._folder, worker_note(self._world.rank))
            write_file(self.disk, name + ".part", json.dumps(note).encode())
            self.disk.rename(name + ".part", name)  # so that a reader finds all of it

    def _write_file(self, name: str, pause: Pause) -> dict[str, Any]:
        shapes = [box_shape(own.box) for own in self._own]
        names = [self._plan.leaves[own.leaf][0] for own in self._own]
        steps = [chunk_of(shape, own.itemsize) for own, shape in zip(self._own, shapes, strict=True)]
        counts = [chunks(own.nbytes, step) for own, step in zip(self._own, steps, strict=True)]
        contents = {leaf: (own.form.dtype, shape) for leaf, own, shape in zip(names, self._own, shapes, strict=True)}
        head, tensors, size = laid_out(contents | {CHECKSUMS: ("uint32", (sum(counts),))})
        blocks = []
        shown = bytes_shown(self._world, f"checkpoint of step {self.step}, written by worker 0", size)
        path = os.path.join(self._folder, name)
        with UnfinishedFile.opened(self.disk, path, self.disk.create, pause, shown) as file:
            self.disk.reserve(file.descriptor, size)
            file.write(memoryview(head), 0)
            sums_at = tensors[CHECKSUMS].offset
            for leaf, own, chunk, count in zip(names, self._own, steps, counts, strict=True):
                sums = bytes_of(np.array(file.write(bytes_of(own.block()), tensors[leaf].offset, chunk), "<u4"))
                file.write(sums, sums_at)
                block = Block(own.box, name, tensors[leaf].offset, chunk, Checksums(sums_at, crc32(sums)))
                blocks.append({"leaf": own.leaf, **block_to_json(block)})
                sums_at += 4 * count
        return {"file": name, "bytes": size, "blocks": blocks}

    def _missing_notes(self) -> list[int]:
        with written_in(self._folder):
            names = set(os.listdir(self._folder))
        return [worker for worker in range(self._world.size) if worker_note(worker) not in names]

    def complete(self) -> None:
        """On the first worker, make a complete checkpoint of the files of all workers."""
        with written_in(self._folder):
            manifest = self._manifest().to_json().encode()
            if len(manifest) > LARGEST_TEXT:
                raise CheckpointError(f"Its manifest would have {len(manifest)} bytes, more than {LARGEST_TEXT}.")
            for worker in range(self._world.size):
                self.disk.remove(os.path.join(self._folder, worker_note(worker)))
            write_file(self.disk, os.path.join(self._folder, MANIFEST), manifest)
            self.disk.sync_folder(self._folder)
            complete_folder(self.disk, self._plan.path, self._plan.unfinished, self.step)

    def _manifest(self) -> Manifest:
        """Combine the notes of all workers."""
        leaves = self._plan.leaves
        files: dict[str, int] = {}
        blocks: list[list[Block]] = [[] for _ in leaves]
        placeholders: list[dict[int, tuple[int, ...]]] = [{} for _ in leaves]
        for worker in range(self._world.size):
            with open(os.path.join(self._folder, worker_note(worker)), "rb") as note:
                report = json.load(note)
            for leaf, shape in report["placeholders"]:
                placeholders[leaf][worker] = tuple(shape)
            if report["file"] is None:
                continue
            files[report["file"]] = report["bytes"]
            for block in report["blocks"]:
                blocks[block.pop("leaf")].append(block_from_json(block))
            # A full disk may shorten a file without an error at the time of writing.
            if (size := os.stat(os.path.join(self._folder, report["file"])).st_size) != report["bytes"]:
                raise CheckpointError(f"{report['file']} should have {report['bytes']} bytes, but has {size}.")
        return Manifest(
            self.step,
            files,
            tuple(
                SavedLeaf(path, form, tuple(leaf_blocks), shapes)
                for (path, form), leaf_blocks, shapes in zip(leaves, blocks, placeholders, strict=True)
            ),
            self._world.size,
        )

    def wait_for_all(self, cancelled: Event) -> bool:
        """Wait until all workers' files are on disk; return False if the wait was cancelled."""
        pause = 0.002
        while self._missing_notes():
            if cancelled.wait(pause):
                return False
            pause = min(2 * pause, 0.1)
        return True

    def abandon(self) -> None:
        """Remove the folder, if possible."""
        with suppress(OSError):
            self.disk.remove_folder(self._folder)


def begin(path: Any, step: Any, tree: Any, specs: Any, world: World, run: ManagerRun | None = None) -> Writing:
    """Start a checkpoint: agree on its contents, and make its folder. Collective in the world.

    With a `run`, blocks are copied to the host, so that the arrays may be changed or deleted.
    """

    def arguments() -> dict[str, Any]:
        return {"path": checked_path(path), "step": checked_integer("step", step, 0, LARGEST)}

    def decide(leaves: Leaves, given: Mapping[str, Any]) -> SavePlan:
        if run is not None:
            abandon_later(disk.get(), **given, last=run.last, abandoned=run.abandoned)
        return SavePlan(
            leaves, **given, unfinished=begin_folder(disk.get(), **given, tidy=run is not None and run.begins)
        )

    plan, own, placeholders = agree_on_contents(
        world, "the beginning of a checkpoint", tree, specs, arguments, decide, copied=run is not None
    )
    return Writing(world, plan, own, placeholders)
