"""`export` and `import_`: one file with the whole tensors, as written and read by other programs."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import jax

from distdl_jax.checkpoint.agreement import together
from distdl_jax.checkpoint.contents import Leaves, agree_on_contents, as_leaf, empty_block
from distdl_jax.checkpoint.disk import Disk, checked_path, disk, naming, write_all, written_in
from distdl_jax.checkpoint.manifest import Form
from distdl_jax.checkpoint.writing import UnfinishedFile, world_of_specs
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.partitions.formats.arrays import ArrayInFile, arrays_in
from distdl_jax.partitions.formats.boxes_in_files import Pause, runs
from distdl_jax.partitions.formats.plain_files import some
from distdl_jax.partitions.formats.safetensors import METADATA, Tensor, bytes_of, is_storable, laid_out
from distdl_jax.partitions.spec_trees import like_specs, specs_by_path
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.decomposition import box_shape
from distdl_jax.text import quoted
from distdl_jax.transports.progress import bytes_shown, progress
from distdl_jax.validation import check_same


def export(path: str | os.PathLike[str], tree: Any, specs: Any) -> None:
    """Write one safetensors file with the whole of every leaf; nothing is gathered, each worker writes its own bytes.

    Any program that reads safetensors can read it, without MPI and without this library. A tensor's name is its path in
    the tree, with dots, as in PyTorch: `tree["conv1"]["weight"]` is `conv1.weight`, and `tree[0]["bias"]` is `0.bias`.
    Complex numbers are pairs of floats, with one more dimension; random keys are stored as their data.

    **Arguments:**

    - `path`: the file. An existing one is replaced once the new one is complete.
    - `tree`, `specs`: this worker's blocks, and a `TensorSpec` for each leaf, as for `dj.checkpoint.save`.

    Collective over all workers of the world.

    **Raises,** on all workers: errors of `dj.checkpoint.save`; `InvalidArgumentError` if two leaves would get the same
    name, or one a name reserved by the format.

    >>> import tempfile, jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> specs = {"conv1": {"weight": dj.TensorSpec((3,), P)}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(f"{folder}/net.safetensors", {"conv1": {"weight": jnp.arange(3)}}, specs)
    ...     import_(f"{folder}/net.safetensors", specs)["conv1"]["weight"].tolist()
    [0, 1, 2]
    """
    world = world_of_specs(specs)
    names = {jax.tree_util.keystr(place): _name(place) for place, _ in jax.tree.leaves_with_path(tree)}
    target = disk.get()

    def decide(leaves: Leaves, given: Mapping[str, Any]) -> tuple[str, str, list[Tensor]]:
        path = given["path"]
        _check_names([leaf for leaf, _ in leaves], names)
        head, tensors, size = laid_out({names[leaf]: (form.dtype, form.shape) for leaf, form in leaves})
        return path, _begin_file(target, path, head, size), [tensors[names[leaf]] for leaf, _ in leaves]

    (to, unfinished, tensors), own, _ = agree_on_contents(
        world, "the beginning of an export", tree, specs, lambda: {"path": checked_path(path)}, decide
    )

    size = sum(own_block.nbytes for own_block in own)

    def opened(pause: Pause = lambda: None) -> AbstractContextManager[UnfinishedFile]:
        shown = bytes_shown(world, f"export to {to}, written by worker 0", size)
        return UnfinishedFile.opened(target, unfinished, target.open, pause, shown)

    def write(pause: Pause) -> None:
        if not own:
            return
        with written_in(unfinished), opened(pause) as file:
            for own_block in own:
                data, tensor = bytes_of(own_block.block()), tensors[own_block.leaf]
                length, starts = runs(own_block.form.shape, own_block.box)
                nbytes = length * tensor.itemsize
                for n, start in enumerate(starts):
                    file.write(data[n * nbytes : (n + 1) * nbytes], tensor.offset + start * tensor.itemsize)

    def complete(_: Any) -> None:
        with written_in(unfinished):
            with opened():
                pass  # the sync at its end is for the header
            target.replace(unfinished, to)
        target.sync_folder(os.path.dirname(to))

    try:
        together(world, f"the export to {to}", write, complete)
    except Exception:
        if world.rank == 0:
            with suppress(OSError):
                target.remove(unfinished)
        raise


def import_(path: str | os.PathLike[str], specs: Any) -> Any:
    """Return this worker's blocks of the tensors in a safetensors, npz or npy file; each worker reads its own part.

    **Arguments:**

    - `path`: the file. All workers must see it.
    - `specs`: a pytree of `TensorSpec` with the tensors' global shapes. Each leaf is looked up by its path, as in
      `export`: `specs["conv1"]["weight"]` gets `conv1.weight`. A single spec, not in a pytree, gets the only array of a
      file. None is left unchanged. Other contents of the file are ignored.

    **Returns:** a pytree with the structure of `specs`, with this worker's block of each, zero-volume if it has none,
    in the file's dtype. It needs little more memory than the blocks; a compressed array (`numpy.savez_compressed`) is
    read from its beginning.

    Collective over all workers of the world.

    **Raises,** on all workers: `PlanError` if the file lacks a tensor or has it in another shape; `CheckpointError`
    if it can't be read.

    >>> import tempfile, numpy as np, distdl_jax as dj
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/x.npy", np.arange(3, dtype="float32"))
    ...     import_(f"{folder}/x.npy", dj.TensorSpec((3,), dj.Partition().grid([1]))).tolist()
    [0.0, 1.0, 2.0]
    """
    world = world_of_specs(specs)
    named_specs = [(_name(place), spec) for place, spec in specs_by_path(specs).items()]

    def common_path(given: dict[int, dict[str, str]]) -> str:
        check_same(given)
        return given[0]["path"]

    file: str = together(world, "the beginning of an import", lambda _: {"path": checked_path(path)}, common_path)
    sources: dict[str, ArrayInFile] = {}
    leaves: list[Any] = []

    def prepare(_: Pause) -> None:
        arrays = arrays_in(file)
        sources.update((name, _found(file, arrays, name, spec)) for name, spec in named_specs if spec is not None)

    def read(pause: Pause) -> None:
        for array in sources.values():
            array.file.check_name()  # now that all workers have opened it, all read the same file
        for name, spec in progress(named_specs, label=f"import from {file}", unit="tensor"):
            leaves.append(None if spec is None else _block(sources[name], name, spec, pause))

    label = f"the import from {file}"
    together(world, label, prepare)
    together(world, label, read)
    return like_specs(specs, leaves)


def _begin_file(target: Disk, path: str, head: bytes, size: int) -> str:
    """Make the file for an export, and return its path; remove leftovers of killed jobs."""
    folder, file = os.path.split(path)
    target.make_folders(folder)
    form = re.compile(rf"\.{re.escape(file)}\.[0-9a-f]{{8}}")
    for name in filter(form.fullmatch, os.listdir(folder)):
        with suppress(OSError):
            target.remove(os.path.join(folder, name))
    # Written beside the target and renamed at the end: a reader never sees half a file, whoever is killed.
    unfinished = os.path.join(folder, f".{file}.{secrets.token_hex(4)}")
    try:
        with naming(unfinished):
            descriptor = target.create(unfinished)
            try:
                write_all(target, descriptor, memoryview(head), 0)
                # A last byte makes the file its whole length, so that workers can write their blocks anywhere in it.
                if size > len(head):
                    write_all(target, descriptor, memoryview(b"\0"), size - 1)
            finally:
                target.close(descriptor)
    except Exception:
        with suppress(OSError):
            target.remove(unfinished)
        raise
    return unfinished


def _name(place: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(place, simple=True, separator=".")


def _check_names(paths: Sequence[str], names: dict[str, str]) -> None:
    leaf_of: dict[str, str] = {}
    for path in paths:
        if names[path] == METADATA:
            raise InvalidArgumentError(
                f"`tree{path}` can't be called {METADATA!r}: this name is reserved in safetensors files."
            )
        if (other := leaf_of.setdefault(names[path], path)) != path:
            raise InvalidArgumentError(
                f"`tree{other}` and `tree{path}` would both be called {quoted(names[path])}; rename a key of `tree`."
            )


def _found(path: str, arrays: dict[str, ArrayInFile], name: str, spec: TensorSpec) -> ArrayInFile:
    array = next(iter(arrays.values())) if not name and len(arrays) == 1 else arrays.get(name)
    if array is None:
        raise PlanError(
            f"{path} has no tensor {quoted(name)}, for which `specs` has a TensorSpec. It holds {some(arrays)}."
        )
    if array.shape != spec.global_shape:
        raise PlanError(f"{quoted(name)} has the shape {array.shape} in {path}, but its spec has {spec.global_shape}.")
    if not is_storable(array.dtype.name):
        raise PlanError(f"{quoted(name)} has dtype {array.dtype} in {path}, which JAX does not support.")
    return array


def _block(array: ArrayInFile, name: str, spec: TensorSpec, pause: Pause) -> Any:
    form = Form(array.shape, array.dtype.name)
    if spec.box is None:
        return as_leaf(name, form, empty_block(form, None, len(array.shape)))
    block = array.read(spec.box, pause)
    assert block.shape == box_shape(spec.box)
    return as_leaf(name, form, block if block.flags.c_contiguous else block.copy(order="C"))
