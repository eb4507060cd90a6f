"""Restore a checkpoint: every worker reads what overlaps the blocks that it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array

from distdl_jax.checkpoint.agreement import checked_path, this_host, together
from distdl_jax.checkpoint.block_reader import Files, read_leaf
from distdl_jax.checkpoint.disk import open_to_read
from distdl_jax.checkpoint.folders import Folder, folders_in
from distdl_jax.checkpoint.layout import MANIFEST, Form, Leaf, Manifest
from distdl_jax.checkpoint.leaves import as_leaf, empty_block, stored_box
from distdl_jax.checkpoint.progress import Pause, together_for_long
from distdl_jax.checkpoint.save import world_of_specs
from distdl_jax.errors import CheckpointError, InvalidArgumentError, PlanError
from distdl_jax.spec_trees import is_spec, match, specs_by_path
from distdl_jax.tensors import TensorSpec
from distdl_jax.transports.open_world import world_of
from distdl_jax.validation import checked_integer


def restore(path: str | os.PathLike[str], specs: Any, step: int | None = None) -> Any:
    """This worker's blocks of what was saved in `path`, by any number of workers on any partitions.

    **Arguments:**

    - `path`: the folder that was given to `save`. All workers must see it.
    - `specs`: a pytree of the structure of what was saved, with a `TensorSpec` for each leaf: of the shape that was
      saved, and on any partition of these workers. None leaves out what is there, a leaf or a whole subtree.
    - `step`: which step. Default: the last one that is complete.

    **Returns:** a pytree of the structure of `specs`, with this worker's block of each leaf, in the dtype that was
    saved, and to the bit; random keys as such. None where `specs` has None. Where this worker has no block it is
    zero-volume: of the shape that this worker saved, where as many workers did, else `(0,)`.

    Collective over all workers of the world. Each reads only chunks of files that hold some of what it needs, of 8 KiB
    to a MiB, and holds a few MiB besides its blocks.

    **Raises,** on all workers: `CheckpointError` where there is no such checkpoint, a file can't be read, or is damaged
    (checksums are compared; the message names the file, the leaf and the block); `PlanError` where the leaves or their
    shapes are not what `specs` says.
    """
    world = world_of_specs(specs)

    def arguments() -> tuple[str, int | None]:
        return checked_path(path), None if step is None else checked_integer("step", step, 0)

    def choose(told: dict[int, Any]) -> tuple[str, bytes]:
        for worker, theirs in sorted(told.items()):
            if theirs != told[0]:
                raise PlanError(
                    f"`path` and `step` must be the same on all workers, but are {told[0]} on worker 0 and {theirs} on "
                    f"worker {worker}."
                )
        folder = os.path.join(told[0][0], _chosen(*told[0]).name)
        with _read_from(folder), open(open_to_read(os.path.join(folder, MANIFEST), in_folder=True), "rb") as manifest:
            return folder, manifest.read()

    folder, text = together(world, "the choice of a checkpoint", arguments, choose)
    needs: list[_Need | None] = []
    structure = jax.tree.structure(specs, is_leaf=is_spec)

    def prepared() -> None:
        needs.extend(_needs(Manifest.from_json(text, os.path.join(folder, MANIFEST)), specs))
        with _read_from(folder):
            os.stat(folder)

    def read(pause: Pause) -> None:
        with _read_from(folder):
            leaves.extend(_read(folder, needs, pause))

    purpose = f"the reading of {os.path.basename(folder)}"
    together(world, purpose, prepared)
    leaves: list[Array | None] = []
    together_for_long(world, purpose, read)
    return jax.tree.unflatten(structure, leaves)


@contextmanager
def _read_from(folder: str) -> Iterator[None]:
    """Say in a sentence that a checkpoint is gone that is read."""
    try:
        yield
    except FileNotFoundError:
        if os.path.isdir(folder):
            raise
        raise CheckpointError(
            f"{folder}, which worker 0 has found, is not there on {this_host()}: it was removed while it was read (a "
            "Manager keeps fewer steps, say), or `path` is not in a file system that all workers see."
        ) from None


def steps(path: str | os.PathLike[str]) -> list[int]:
    """The steps of which `path` holds complete checkpoints, in ascending order; none where there is no such folder.

    All workers get the same list. Collective over all of them.

    >>> steps("/no/such/folder")
    []
    """
    world = world_of(())
    assert world is not None
    purpose = "the steps of checkpoints"
    found: list[int] = together(world, purpose, lambda: checked_path(path), lambda told: _steps(told[0]))
    return found


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """The last step of which `path` holds a complete checkpoint; None where there is none.

    All workers get the same answer. Collective over all of them.

    >>> latest_step("/no/such/folder") is None
    True
    """
    return max(steps(path), default=None)


def _steps(path: str) -> list[int]:
    return sorted({folder.step for folder in folders_in(path)})


def _chosen(path: str, step: int | None) -> Folder:
    found = folders_in(path)
    if not found:
        raise CheckpointError(f"{path} holds no complete checkpoint.")
    of_step = [folder for folder in found if folder.step == step] if step is not None else found
    if not of_step:
        steps = _steps(path)
        named = ", ".join(map(str, steps[-20:]))
        raise InvalidArgumentError(
            f"`step` (={step}) is none of those of which {path} holds checkpoints: "
            f"{'... ' if len(steps) > 20 else ''}{named}."
        )
    return of_step[-1]


class _Need(NamedTuple):
    """A leaf that is to be restored: what messages call it, its spec, what is on disk, and the shape of a placeholder;
    None for nothing."""

    name: str
    spec: TensorSpec
    leaf: Leaf
    placeholder: tuple[int, ...]


def _needs(manifest: Manifest, specs: Any) -> list[_Need | None]:
    """What is to be read for each leaf of `specs`.

    **Raises:** `PlanError` where that is not what was saved.
    """
    wanted = {jax.tree_util.keystr(path): spec for path, spec in specs_by_path(specs).items()}
    saved = {leaf.path: leaf for leaf in manifest.leaves}
    of_leaf, without = match(saved, wanted)
    if without:
        raise PlanError(
            f"`specs{without[0]}` has no leaf in the checkpoint of step {manifest.step}. It holds "
            f"{_some(saved, wanted)}."
        )
    if left := [path for path in saved if path not in of_leaf]:
        raise PlanError(
            f"The checkpoint of step {manifest.step} also holds {_some(left, ())}, for which `specs` has no "
            "TensorSpec. None in its place leaves it out."
        )
    for path, above in of_leaf.items():
        if path != above and wanted[above] is not None:
            raise PlanError(
                f"`specs{above}` is one spec, but {[*of_leaf.values()].count(above)} leaves were saved below it, "
                f"tree{path} first: restore needs a spec for each leaf."
            )
    for path, spec in wanted.items():
        if spec is not None:
            _check_shape(path, spec, saved[path])
    return [
        None if spec is None else _need(manifest, f"specs{path}", spec, saved[path]) for path, spec in wanted.items()
    ]


def _need(manifest: Manifest, name: str, spec: TensorSpec, leaf: Leaf) -> _Need:
    world = spec.partition.world
    saved = leaf.placeholders.get(world.rank) if manifest.workers == world.size else None
    return _Need(name, spec, leaf, spec.known_placeholder or saved or (0,))


def _some(paths: Any, known: Any) -> str:
    """A few of the paths, those that are not known first."""
    order = sorted(paths, key=lambda path: path in known)
    text = ", ".join(f"tree{path}" for path in order[:5]) or "nothing"
    return text + (f" and {len(order) - 5} more" if len(order) > 5 else "")


def _check_shape(path: str, spec: TensorSpec, leaf: Leaf) -> None:
    form = leaf.form
    of_element = () if form.key is None else _key_data(path, form)
    shape = form.shape[: len(form.shape) - len(of_element)]
    if shape != spec.global_shape:
        kind = f"random keys of shape {shape}" if form.key is not None else f"of shape {shape}"
        raise PlanError(f"`specs{path}` says the global shape {spec.global_shape}, but what was saved is {kind}.")


def _key_data(path: str, form: Form) -> tuple[int, ...]:
    """Return the shape of the data of one of the random keys in a leaf."""
    try:
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=form.key)))
    except ValueError as error:
        raise CheckpointError(
            f"`specs{path}` holds random keys of {form.key!r}, unknown to this JAX: {error}"
        ) from None
    if (form.dtype, form.shape[-data.ndim :]) != (data.dtype.name, data.shape):
        raise CheckpointError(f"`specs{path}` holds random keys of {form.key!r}, but not their data: it is damaged.")
    return tuple(data.shape)


def _read(folder: str, needs: Sequence[_Need | None], pause: Pause) -> Iterator[Array | None]:
    """This worker's block of every leaf, one after the other."""
    with Files(folder) as files:
        for need in needs:
            if need is None:
                yield None
                continue
            form = need.leaf.form
            box = stored_box(need.spec.box, form)
            make = partial(empty_block, form, box, len(need.spec.global_shape), need.placeholder)
            yield as_leaf(need.name, form, make() if box is None else read_leaf(files, need.leaf, box, make, pause))
