"""Restore a checkpoint: every worker reads the chunks of files that overlap its blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from distdl_jax.checkpoint.agreement import together
from distdl_jax.checkpoint.contents import as_leaf, empty_block, stored_box
from distdl_jax.checkpoint.disk import Folder, checked_path, folders_in, later_folders, this_host
from distdl_jax.checkpoint.manifest import MANIFEST, Block, Form, Manifest, SavedLeaf, checksums, chunks, crc32, volume
from distdl_jax.checkpoint.writing import world_of_specs
from distdl_jax.errors import CheckpointError, InvalidArgumentError, PlanError
from distdl_jax.partitions.formats.boxes_in_files import Pause, fill
from distdl_jax.partitions.formats.plain_files import PlainFile, read_exactly
from distdl_jax.partitions.formats.safetensors import dtype_named
from distdl_jax.partitions.spec_trees import like_specs, match, specs_by_path
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.decomposition import Box, box_shape, intersect
from distdl_jax.text import brief, quoted
from distdl_jax.transports.open_world import world_of
from distdl_jax.transports.progress import Progress, bytes_shown
from distdl_jax.transports.world import World
from distdl_jax.validation import check_same, checked_integer

_OPEN_FILES = 32


def restore(path: str | os.PathLike[str], specs: Any, step: int | None = None) -> Any:
    """Return this worker's blocks of a checkpoint in `path`, saved by any number of workers on any partitions.

    **Arguments:**

    - `path`: the folder passed to `save`. All workers must see it.
    - `specs`: a pytree with the structure of the saved one, with a `TensorSpec` for each leaf: of the saved shape, on
      any partition of these workers. None omits a leaf or a whole subtree.
    - `step`: the step to restore. Default: the last complete one.

    **Returns:** a pytree with the structure of `specs`, with this worker's block of each leaf, in the saved dtype, bit
    for bit; random keys as such. None if `specs` has None. If this worker has no block it is zero-volume: of the shape
    that this worker saved, if the number of workers is the same, otherwise `(0,)`.

    Collective over all workers of the world. Each reads only chunks of files that overlap its blocks, of 8 KiB to a
    MiB, and needs a few MiB in addition to its blocks.

    **Raises,** on all workers: `CheckpointError` if there is no such checkpoint, a file can't be read, or is damaged
    (checksums are compared; the message names the file, the leaf and the block); `PlanError` if the leaves or their
    shapes don't match `specs`.

    >>> import tempfile, jax.numpy as jnp, distdl_jax as dj
    >>> specs = {"w": dj.TensorSpec((3,), dj.Partition().grid([1]))}
    >>> with tempfile.TemporaryDirectory() as path:
    ...     dj.checkpoint.save(path, {"w": jnp.arange(3.0)}, specs, step=7)
    ...     restore(path, specs)["w"].tolist()
    [0.0, 1.0, 2.0]
    """
    return restore_and_place(path, specs, step)[0]


def restore_and_place(path: Any, specs: Any, step: int | None) -> tuple[Any, int, dict[Folder, int]]:
    """Return the result of `restore`, the step that it chooses, and the checkpoints of higher steps."""
    world = world_of_specs(specs)

    def arguments(_: Pause) -> dict[str, Any]:
        return {"path": checked_path(path), "step": None if step is None else checked_integer("step", step, 0)}

    def choose(given: Mapping[int, Mapping[str, Any]]) -> tuple[int, dict[Folder, int], str, bytes]:
        check_same(given)
        # Before the choice: what another job completes in between is not among the later ones.
        later = {} if given[0]["step"] is None else later_folders(**given[0])
        chosen = _chosen(**given[0])
        folder = os.path.join(given[0]["path"], chosen.name)
        with _read_from(folder):
            manifest = PlainFile(os.path.join(folder, MANIFEST), in_folder=True)
            return chosen.step, later, folder, manifest.text(manifest.size)

    chosen_step, later, folder, text = together(world, "the choice of a checkpoint", arguments, choose)
    needs: list[_Need | None] = []

    def prepare(_: Pause) -> None:
        needs.extend(_needs(Manifest.from_json(text, os.path.join(folder, MANIFEST)), specs))
        with _read_from(folder):
            os.stat(folder)

    leaves: list[Array | None] = []

    def read(pause: Pause) -> None:
        with _read_from(folder):
            leaves.extend(_read(world, folder, needs, pause))

    label = f"the reading of {os.path.basename(folder)}"
    together(world, label, prepare)
    together(world, label, read)
    return like_specs(specs, leaves), chosen_step, later


@contextmanager
def _read_from(folder: str) -> Iterator[None]:
    """Raise an explanation if a checkpoint is gone while it is read."""
    try:
        yield
    except FileNotFoundError:
        if os.path.isdir(folder):
            raise
        raise CheckpointError(
            f"{folder}, which worker 0 has found, is not there on {this_host()}: it was removed while it was read (for "
            "instance by a Manager that keeps fewer steps), or `path` is not on a file system that all workers see."
        ) from None


def steps(path: str | os.PathLike[str]) -> list[int]:
    """Return the steps of the complete checkpoints in `path`, ascending; none if there is no such folder.

    All workers get the same list. Collective over all of them.

    **Arguments:**

    - `path`: the folder of the checkpoints of a run, as passed to `save`.

    **Returns:** a list of the numbers of the steps.

    **Raises:** `CheckpointError`, on all workers, if the folder can't be read.

    >>> steps("/no/such/folder")
    []
    """
    world = world_of(())
    assert world is not None
    all_steps: list[int] = together(
        world, "the steps of checkpoints", lambda _: checked_path(path), lambda paths: _steps(paths[0])
    )
    return all_steps


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """Return the last step with a complete checkpoint in `path`; None if there is none.

    All workers get the same answer. Collective over all of them.

    **Arguments:**

    - `path`: the folder of the checkpoints of a run, as passed to `save`.

    **Returns:** the number of the step, or None.

    **Raises:** `CheckpointError`, on all workers, if the folder can't be read.

    >>> latest_step("/no/such/folder") is None
    True
    """
    return max(steps(path), default=None)


def _steps(path: str) -> list[int]:
    return sorted({folder.step for folder in folders_in(path)})


def _chosen(path: str, step: int | None) -> Folder:
    folders = folders_in(path)
    if not folders:
        raise CheckpointError(f"{path} has no complete checkpoint.")
    candidates = [folder for folder in folders if folder.step == step] if step is not None else folders
    if not candidates:
        steps = _steps(path)
        named = ", ".join(map(str, steps[-20:]))
        raise InvalidArgumentError(
            f"`step` (={step}) is not a step with a checkpoint in {path}: {'... ' if len(steps) > 20 else ''}{named}."
        )
    return candidates[-1]


class _Need(NamedTuple):
    """A leaf to restore: its name in messages, its spec, the leaf on disk, and the shape of a placeholder."""

    name: str
    spec: TensorSpec
    leaf: SavedLeaf
    placeholder: tuple[int, ...]


def _needs(manifest: Manifest, specs: Any) -> list[_Need | None]:
    """Return the data to read for each leaf of `specs`; None for nothing.

    **Raises:** `PlanError` if that is not what was saved.
    """
    spec_by_path = {jax.tree_util.keystr(path): spec for path, spec in specs_by_path(specs).items()}
    saved = {leaf.path: leaf for leaf in manifest.leaves}
    # A spec in place of a subtree holds for the leaves below it, as everywhere; but each leaf has a shape of its own.
    spec_path_of, without = match(saved, spec_by_path)
    if without:
        raise PlanError(
            f"`specs{brief(without[0])}` has no leaf in the checkpoint of step {manifest.step}. It holds "
            f"{_some(saved, spec_by_path)}."
        )
    if left := [path for path in saved if path not in spec_path_of]:
        raise PlanError(
            f"The checkpoint of step {manifest.step} also holds {_some(left, ())}, for which `specs` has no "
            "TensorSpec. None in its place omits it."
        )
    for path, above in spec_path_of.items():
        if path != above and spec_by_path[above] is not None:
            raise PlanError(
                f"`specs{brief(above)}` is one spec, but {[*spec_path_of.values()].count(above)} leaves were saved "
                f"below it, tree{brief(path)} first: restore needs a spec for each leaf."
            )
    needs: list[_Need | None] = []
    for path, spec in spec_by_path.items():
        if spec is None:
            needs.append(None)
            continue
        leaf, world = saved[path], spec.partition.world
        _check_shape(path, spec, leaf)
        # The shapes of placeholders are known of the workers that saved, which have other ranks in another world.
        placeholder = leaf.placeholders.get(world.rank) if manifest.workers == world.size else None
        needs.append(_Need(f"specs{path}", spec, leaf, spec.known_placeholder or placeholder or (0,)))
    return needs


def _some(paths: Any, known: Any) -> str:
    """Return a few of the paths, the unknown ones first."""
    order = sorted(paths, key=lambda path: path in known)
    text = ", ".join(f"tree{brief(path, 150)}" for path in order[:5]) or "nothing"
    return text + (f" and {len(order) - 5} more" if len(order) > 5 else "")


def _check_shape(path: str, spec: TensorSpec, leaf: SavedLeaf) -> None:
    form = leaf.form
    key_shape = () if form.key is None else _key_data(path, form)
    shape = form.shape[: len(form.shape) - len(key_shape)]
    if shape != spec.global_shape:
        kind = "random keys " * (form.key is not None) + f"of shape {quoted(shape)}"
        raise PlanError(f"`specs{brief(path)}` has the global shape {spec.global_shape}, but the saved leaf is {kind}.")


def _key_data(path: str, form: Form) -> tuple[int, ...]:
    """Return the shape of the data of one of the random keys in a leaf."""
    try:
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=form.key)))
    except ValueError as error:
        raise CheckpointError(
            f"`specs{path}` holds random keys of {quoted(form.key)}, unknown to this JAX: {brief(str(error))}"
        ) from None
    if (form.dtype, form.shape[-data.ndim :]) != (data.dtype.name, data.shape):
        raise CheckpointError(
            f"`specs{path}` holds random keys of {quoted(form.key)}, but not their data: it is damaged."
        )
    return tuple(data.shape)


def _read(world: World, folder: str, needs: Sequence[_Need | None], pause: Pause) -> Iterator[Array | None]:
    """Yield this worker's block of every leaf."""
    boxes = [None if need is None else stored_box(need.spec.box, need.leaf.form) for need in needs]
    pairs = [(need.leaf.form.dtype, box) for need, box in zip(needs, boxes, strict=True) if need and box is not None]
    size = sum(dtype_named(dtype).itemsize * volume(box) for dtype, box in pairs)
    files = Files(folder)
    with bytes_shown(world, f"{os.path.basename(folder)}, read by worker 0", size) as shown:
        for need, box in zip(needs, boxes, strict=True):
            if need is None:
                yield None
                continue
            make = partial(empty_block, need.leaf.form, box, len(need.spec.global_shape), need.placeholder)
            block = make() if box is None else read_leaf(files, need.leaf, box, make, pause, shown)
            yield as_leaf(need.name, need.leaf.form, block)


class Files:
    """The files of a folder, opened on demand; if many are open, the least recently used is closed."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.file: Callable[[str], PlainFile] = lru_cache(_OPEN_FILES)(
            lambda name: PlainFile(os.path.join(folder, name), in_folder=True)
        )

    def path(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self._folder, name)


class _Chunks:
    """The bytes of one block, read in whole chunks, each of which is compared with its checksum."""

    def __init__(self, files: Files, leaf: str, block: Block, nbytes: int) -> None:
        self._files, self._leaf, self._block, self._nbytes = files, leaf, block, nbytes
        self._checksums = self._read_checksums()
        self._last: tuple[int, memoryview] = -1, memoryview(b"")  # a chunk that was partly needed

    def _read_checksums(self) -> list[int]:
        place = self._block.checksums
        data = memoryview(bytearray(4 * chunks(self._nbytes, self._block.chunk)))
        self._read_exactly(data, place.offset)
        if crc32(data) != place.crc32:
            raise self._damaged("the checksum of its checksums does not match", place.offset)
        numbers: list[int] = np.frombuffer(data, "<u4").tolist()
        return numbers

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""
        chunk, stop = self._block.chunk, start + len(into)
        while start < stop:
            number, skipped = divmod(start, chunk)
            whole = (stop if stop == self._nbytes else stop - stop % chunk) - start
            if not skipped and whole > 0:
                self._read_chunks(into[:whole], number)
                count = whole
            else:
                if self._last[0] != number:
                    fresh = memoryview(bytearray(min(chunk, self._nbytes - number * chunk)))
                    self._read_chunks(fresh, number)
                    self._last = number, fresh
                count = min(stop - start, chunk - skipped)
                into[:count] = self._last[1][skipped : skipped + count]
            into, start = into[count:], start + count

    def _read_chunks(self, into: memoryview, first: int) -> None:
        """Fill `into` with whole chunks from number `first` on, and compare their checksums."""
        offset = self._block.offset + first * self._block.chunk
        self._read_exactly(into, offset)
        sums = checksums(into, self._block.chunk)
        expected = self._checksums[first : first + len(sums)]
        if sums != expected:
            wrong = next(n for n, (crc, other) in enumerate(zip(sums, expected, strict=True)) if crc != other)
            raise self._damaged("the checksum does not match", offset + wrong * self._block.chunk)

    def _read_exactly(self, into: memoryview, offset: int) -> None:
        try:
            read_exactly(self._files.file(self._block.file).descriptor, [into], offset)
        except EOFError:
            raise self._damaged("it ends too early", offset) from None

    def _damaged(self, problem: str, offset: int) -> CheckpointError:
        return _damaged(self._files, self._leaf, self._block, f"{problem} (of the bytes from {offset} on)")


def _damaged(files: Files, leaf: str, block: Block, problem: str) -> CheckpointError:
    ranges = " x ".join(f"{start}:{stop}" for start, stop in block.box) or "()"
    return CheckpointError(
        f"{files.path(block.file)} is damaged in the block {ranges} of the leaf {brief(leaf) or 'tree'}: {problem}. "
        "Another step may be intact."
    )


def read_leaf(
    files: Files,
    leaf: SavedLeaf,
    part: Box,
    make: Callable[[], np.ndarray[Any, Any]],
    pause: Pause,
    shown: Progress[Any],
) -> Any:
    """Return the block `part` of a leaf, in the memory returned by `make`, from the blocks in files that overlap it.

    At most a slab and a chunk more are in memory. `pause` is called between two reads; `shown` shows their bytes.
    """
    itemsize = dtype_named(leaf.form.dtype).itemsize
    needed = [block for block in leaf.blocks if volume(intersect(block.box, part))]
    for block in needed:
        if block.end(itemsize) > files.file(block.file).size:
            raise _damaged(files, leaf.path, block, "it ends too early")
    into = make()
    left = 0  # bytes of a block that are still to be shown; rows that are read whole have more
    for block in needed:
        source = _Chunks(files, leaf.path, block, volume(block.box) * itemsize)

        def read(start: int, view: memoryview, source: _Chunks = source) -> None:
            nonlocal left
            pause()
            source.read(start, view)
            shown.advance(min(left, len(view)))
            left -= min(left, len(view))

        shared = intersect(block.box, part)
        left = volume(shared) * itemsize
        fill(read, box_shape(block.box), _relative(shared, block.box), into, _relative(shared, part))
    return into


def _relative(box: Box, to: Box) -> Box:
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(box, to, strict=True))
