"""Global tensors and the local blocks that stand for them: specs, gather and scatter of whole pytrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.partition import Partition
from distdl_jax.plans.decomposition import Box, balanced_box, box_shape, checked_integers, index_of
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.primitives import repartition
from distdl_jax.primitives.handshake import handshake


@dataclass(frozen=True, init=False)
class TensorSpec:
    """What a distributed tensor is as a whole.

    - `global_shape`: of the whole tensor, n_0 x ... x n_{D-1}.
    - `partition`: a partition of D dimensions; its workers hold the balanced blocks, all others zero-volume arrays.
    """

    global_shape: tuple[int, ...]
    partition: Partition

    def __init__(self, global_shape: Sequence[int], partition: Partition) -> None:
        if not isinstance(partition, Partition):
            raise InvalidTypeError(f"`partition` (={partition!r}) must be a partition.")
        if partition.size == 0:
            raise InvalidArgumentError("`partition` has no workers, so none can hold a block.")
        shape = checked_integers("global_shape", global_shape)
        if any(n < 0 for n in shape):
            raise InvalidArgumentError(f"`global_shape` (={shape}) must not hold negative lengths.")
        if len(shape) != partition.dim:
            raise InvalidArgumentError(
                f"`global_shape` (={shape}) must have as many dimensions as `partition` "
                f"({shape_text(partition.shape)})."
            )
        # The fields, in the form in which equal ones are equal.
        vars(self).update(global_shape=shape, partition=partition)

    @property
    def box(self) -> Box | None:
        """The ranges of the whole tensor that this worker's block covers; None where it holds none."""
        rank = self.partition.rank
        if rank is None:
            return None
        index = self.partition.index if isinstance(self.partition.index, tuple) else (rank,)
        return balanced_box(self.global_shape, self.partition.shape, index)

    @cached_property
    def block_shapes(self) -> dict[int, tuple[int, ...]]:
        """The shape of the block of each worker of the partition, by world rank."""
        P = self.partition
        boxes = (balanced_box(self.global_shape, P.shape, index_of(rank, P.shape)) for rank in range(P.size))
        return {worker: box_shape(box) for worker, box in zip(P.ranks, boxes, strict=True)}

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this worker's block; `(0,)` where it holds none."""
        return (0,) if self.box is None else box_shape(self.box)


def gather(tree: Any, specs: Any, root: int = 0) -> Any:
    """Bring the blocks of every leaf together on one worker.

    **Arguments:**

    - `tree`: this worker's pytree of blocks: parameters, gradients, activations.
    - `specs`: a pytree of the same structure with a `TensorSpec` for each leaf (`layer.param_specs()`).
    - `root`: the rank in the world of the worker that gets the whole tensors.

    **Returns:** a pytree of the same structure: the global tensors on the root, zero-volume arrays elsewhere.
    Collective over the workers of all partitions in `specs` and the root. Differentiable; works inside jit.

    **Raises:** `PlanError`, on every worker that takes part, where a leaf does not have the shape that its spec says.
    """

    def whole(x: jax.Array, spec: TensorSpec) -> jax.Array:
        on_root = _on_root(spec, root)
        _check_leaf(x, spec.local_shape, spec, spec.partition, on_root)
        return repartition(x, spec.partition, on_root, preserve_batch=False)

    return jax.tree.map(whole, tree, specs)


def scatter(tree: Any, specs: Any, root: int = 0) -> Any:
    """Cut the global tensors that one worker has into the blocks that each worker is to hold.

    The inverse of `gather`. **Arguments:**

    - `tree`: a pytree of global tensors on the root, of zero-volume arrays of the same kinds elsewhere.
    - `specs`: a pytree of the same structure with a `TensorSpec` for each leaf.
    - `root`: the rank in the world of the worker that has the whole tensors.

    **Returns:** this worker's pytree of blocks, zero-volume where it holds none.

    **Raises:** `PlanError`, on every worker that takes part, where a leaf on the root does not have the shape that
    its spec says.
    """

    def cut(x: jax.Array, spec: TensorSpec) -> jax.Array:
        on_root = _on_root(spec, root)
        _check_leaf(x, spec.global_shape, spec, on_root, spec.partition)
        return repartition(x, on_root, spec.partition, preserve_batch=False)

    return jax.tree.map(cut, tree, specs)


def _check_leaf(
    x: jax.Array, expected: tuple[int, ...], spec: TensorSpec, holders: Partition, receivers: Partition
) -> None:
    """Refuse, on all workers that take part, a leaf that has another shape than its spec says."""

    def check() -> None:
        if holders.active and jnp.shape(x) != expected:
            raise PlanError(
                f"A leaf of `tree` has shape {jnp.shape(x)}, but its spec ({shape_text(spec.global_shape)} on "
                f"{shape_text(spec.partition.shape)} workers) says {expected} on this worker."
            )

    team = holders.create_partition_union(receivers)
    if team.active:
        purpose = f"the move of a leaf from {holders.describe()} to {receivers.describe()}"
        handshake(team.world, tuple(sorted(team.ranks)), purpose, check)


def _on_root(spec: TensorSpec, root: int) -> Partition:
    world = spec.partition.world
    if not 0 <= root < world.size:
        raise InvalidArgumentError(f"`root` (={root}) must be a rank of the world, 0 to {world.size - 1}.")
    one = Partition.of_workers(world, (root,))
    return one.create_cartesian_topology_partition((1,) * len(spec.global_shape))


def zero_volume_tensor(batch_size: int | None = None, dtype: DTypeLike = float) -> Array:
    """An array with no elements: what a worker passes, or holds, in place of a tensor that it owns no part of.

    **Arguments:**

    - `batch_size`: the length of the first dimension, where the placeholder is to keep it; else it has one dimension.
    - `dtype`: that of the data that it stands for. Default: JAX's default float.

    **Returns:** an array of shape `(batch_size, 0)`, or `(0,)`.

    >>> zero_volume_tensor(batch_size=4).shape
    (4, 0)
    """
    return jnp.zeros((0,) if batch_size is None else (batch_size, 0), dtype)
