"""Save a checkpoint, and wait until it is on disk."""

from __future__ import annotations

import os
from typing import Any

import jax

from distdl_jax.checkpoint.progress import together_for_long
from distdl_jax.checkpoint.writing import Writing, begin
from distdl_jax.errors import DistDLError, InvalidArgumentError
from distdl_jax.partition import check_partitions
from distdl_jax.spec_trees import specs_by_path
from distdl_jax.world import World


def save(path: str | os.PathLike[str], tree: Any, specs: Any, step: int = 0) -> None:
    """Save the blocks of every leaf, each worker its own, as a checkpoint that any number of workers can read.

    `dj.checkpoint.restore(path, specs)` reads it, on any other partition too. Complete or not there at all: it gets
    its name, `path/step-0000000100`, once all of it is on disk, and whatever happens before leaves the checkpoints
    of other steps, and an earlier one of the same step, as they are.

    **Arguments:**

    - `path`: the folder that holds the checkpoints of a run, a folder for each step. It is made where it is missing.
      All workers must see it: the file system is a shared one, where they are on several hosts.
    - `tree`: this worker's pytree of blocks: parameters, an optimiser's state, running statistics, random keys (also
      typed ones), numbers. Arrays of float16 to float64, bfloat16, complex64 and complex128, integers and booleans;
      zero-volume arrays where this worker holds nothing.
    - `specs`: a pytree of `TensorSpec` of the same structure, as for `dj.gather`: of a random key it is that of the
      array of keys, mostly `TensorSpec((), P, replicated=True)`. None leaves out what is there. Of copies the first
      is written, and they must be equal.
    - `step`: 0 or more. A step that was saved before is replaced, once the new one is complete.

    Collective over all workers of the world.

    **Raises,** on all workers: `PlanError` where a block does not have the shape that its spec says, or the workers'
    trees differ; `InvalidArgumentError` where a leaf has no spec, or a spec no leaf; `CheckpointError` where any of
    them can't write (the disk is full, say), or another job has removed what is being written.

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
    purpose = f"the writing of the checkpoint of step {writing.step}"
    try:
        together_for_long(world, purpose, writing.write, lambda told: writing.complete())
    except Exception as error:
        if world.rank == 0:
            writing.abandon()
        raise not_saved(writing.step, error) from error


def not_saved(step: int, error: Exception) -> Exception:
    """What is raised where a checkpoint could not be written because of an error."""
    text = f"The checkpoint of step {step} could not be saved; those before it are as they were. {error}"
    return type(error)(text) if isinstance(error, DistDLError) else error


def world_of_specs(specs: Any) -> World:
    """The world of the partitions of a pytree of specs.

    **Raises:** `InvalidTypeError`, `InvalidArgumentError` where one is no spec, or there is none.
    """
    partitions = {
        f"the partition of specs{jax.tree_util.keystr(path)}": spec.partition
        for path, spec in specs_by_path(specs).items()
        if spec is not None
    }
    if not partitions:
        raise InvalidArgumentError(f"`specs` (={specs!r}) must hold a TensorSpec at least.")
    check_partitions(**partitions)
    world: World = next(iter(partitions.values())).world
    return world
