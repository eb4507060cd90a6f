"""Sums over whole tensors, from blocks: what norms and inner products are made of."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.agreement.agree import agree
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.partition import Partition, check_workers
from distdl_jax.primitives import all_sum_reduce
from distdl_jax.primitives.collectives import accumulation_dtype
from distdl_jax.spec_trees import check_shape, leaves_with_specs, specs_by_path
from distdl_jax.tensors import TensorSpec


class Block(NamedTuple):
    """A leaf of a pytree of blocks: its path, this worker's block, and whose block of what that is."""

    path: str
    block: Array
    spec: TensorSpec


class Whole:
    """The whole tensors of which pytrees of this worker's arrays are the blocks.

    - `purpose`: what asks for sums over them, as errors and reports name it.
    - `specs`: a pytree of `TensorSpec`.
    - `partition`: the workers that call it, at least those of all specs. Default: all of the world.
    """

    def __init__(self, purpose: str, specs: Any, partition: Partition | None) -> None:
        specs_by_path(specs)
        check_workers("partition", partition)
        self._purpose = purpose
        self._specs = specs
        self._partition = partition

    @property
    def workers(self) -> Partition:
        """Those that sum, and get the sums."""
        return Partition() if self._partition is None else self._partition

    def leaves(self, tree: Any) -> list[Block]:
        """Return the leaves of a pytree of blocks; those that optax masks are left out."""
        masked = getattr(sys.modules.get("optax"), "MaskedNode", ())
        found = []
        for path, value, spec in leaves_with_specs(tree, self._specs, masked=masked):
            if spec is None:
                raise InvalidTypeError(
                    f"`specs` must have a TensorSpec for each leaf of the tree, but has None at {path or 'its top'}."
                )
            found.append(Block(path, value if hasattr(value, "dtype") else jnp.asarray(value), spec))
        return found

    def dtypes(self, *trees: Any) -> list[np.dtype]:
        """The dtype of each leaf of the first of `trees`, as those hold it that hold a block of it.

        Checks all of them on all workers; where one worker's leaf is not as its spec says, all raise.
        """

        def check() -> list[np.dtype]:
            for tree in trees:
                for path, block, spec in self.leaves(tree):
                    if spec.box is not None:
                        check_shape(f"tree{path}", jnp.shape(block), spec, spec.local_shape)
            return [np.dtype(jnp.result_type(block)) for _, block, _ in self.leaves(trees[0])]

        workers = self.workers
        specs = [spec for spec in jax.tree.leaves(self._specs) if isinstance(spec, TensorSpec)]
        if missing := {worker for spec in specs for worker in spec.partition.ranks} - set(workers.ranks):
            raise InvalidArgumentError(
                f"`partition` ({workers.describe()}) must hold the workers of all specs, but lacks {min(missing)}."
            )
        if not workers.active:
            return check()
        told = agree(workers.world, workers.ranks, f"{self._purpose} on {workers.describe()}", check)
        owners = [spec.partition.ranks[0] for _, _, spec in self.leaves(trees[0])]
        return [told[owner][number] for number, owner in enumerate(owners)]

    def sums(self, of_block: Callable[..., Array], *trees: Any) -> list[Array]:
        """For each leaf, what `of_block` makes of its blocks, added up over the whole tensor: one message for all.

        `of_block` gets a block of each of `trees`, half precisions in float32, and returns real numbers, 0 of nothing,
        in the same shape for all leaves.
        """
        dtypes = [accumulation_dtype(_real(dtype)) for dtype in self.dtypes(*trees)]
        if not dtypes:
            return []
        parts = []
        for of_leaf in zip(*map(self.leaves, trees), strict=True):
            counted = of_leaf[0].spec.counts
            blocks = (leaf.block if counted else jnp.zeros(0, leaf.block.dtype) for leaf in of_leaf)
            parts.append(of_block(*map(widened, blocks)).astype(jnp.result_type(*dtypes)))
        return list(all_sum_reduce(jnp.stack(parts), self.workers, axes_keep=()))

    def inner(self, x: Any, y: Any) -> Array:
        """The real part of the inner product of two pytrees, a scalar: the sum of conj(x) y over all their elements."""
        numbers = self.sums(lambda a, b: jnp.sum(jnp.real(jnp.conj(a) * b)), x, y)
        return functools.reduce(jnp.add, numbers, jnp.zeros(()))

    def norm(self, tree: Any) -> Array:
        """The Euclidean norm of a pytree, a scalar."""
        return square_root(functools.reduce(jnp.add, self.sums(squares, tree), jnp.zeros(())))


def check_params(name: str, params: Any) -> None:
    """Refuse no parameters, for `dj.optim.<name>`."""
    if params is None:
        raise InvalidArgumentError(f"`params` (=None) must be this worker's parameters: {name} compares with them.")


def widened(block: Any) -> Array:
    """A block in the dtype in which it is summed."""
    block = jnp.asarray(block)
    return block.astype(accumulation_dtype(np.dtype(block.dtype)))


def squares(x: Array, axis: Sequence[int] | None = None) -> Array:
    """The sum of |x|^2 along `axis`, which keep their places; along all dimensions, a scalar, where it is None."""
    absolute = jnp.real(x * jnp.conj(x)) if jnp.iscomplexobj(x) else x * x
    return jnp.sum(absolute, axis=axis, keepdims=axis is not None)


def square_root(x: Array) -> Array:
    """The root, whose derivative at 0 is 0; at NaN it is NaN."""
    at_zero = x == 0
    return jnp.where(at_zero, 0, jnp.sqrt(jnp.where(at_zero, 1, x)))


def _real(dtype: np.dtype) -> np.dtype:
    return np.dtype(jnp.finfo(dtype).dtype) if jnp.issubdtype(dtype, jnp.inexact) else np.dtype(jnp.result_type(float))
