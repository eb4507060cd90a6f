"""Functions of the blocks of several tensors, on the workers of a partition; zero-volume arrays elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import DistDLError, PlanError
from distdl_jax.functional.block_checks import outside, zero_volume_shape
from distdl_jax.functional.plan import BlocksPlan, ShapeDtypes
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.static import Static
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.source_lines import function_name
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.agreement import agree
from distdl_jax.validation import check_function


@dataclass(frozen=True)
class BlockFunction(Static):
    """A function for all workers, of blocks on P. Outside of P there are zero-volume arrays, and 0 for numbers."""

    fun: Callable[..., Any]
    P: Partition

    def __post_init__(self) -> None:
        check_function("fun", self.fun)
        check_partitions(P=self.P)

    @property
    def input_partition(self) -> Partition:
        """The partition of the blocks, P."""
        return self.P

    @property
    def output_partition(self) -> Partition:
        """The partition of the result, P too."""
        return self.P

    def __call__(self, *trees: Any, **options: Any) -> Any:
        """Return `fun(*trees, **options)` on the workers of P, and its placeholders on all others."""
        if trace_context.whole_program:
            return self.fun(*trees, **options)
        if trees and not self.P.active and len(getattr(trees[0], "shape", ())) == self.P.dim:
            outside(self.P.world, trees[0])
        anchors = [_anchor(leaf) for leaf in jax.tree.leaves((trees, options)) if _is_traceable(leaf)]
        if self.P.size == self.P.world.size:
            return jax.tree.map(lambda y: tie(y, *anchors), self._applied(trees, options))
        applied, shapes = self._agreed(trees, options)
        if self.P.active:
            return jax.tree.map(lambda y: tie(y, *anchors), applied)
        batch = next((leaf.shape for leaf in jax.tree.leaves((trees, options)) if hasattr(leaf, "shape")), (0,))

        def stand_in(y: ShapeDtype) -> Array:
            return tie(jnp.zeros(_elsewhere(y, batch), y.dtype), *anchors)

        return jax.tree.map(stand_in, shapes, is_leaf=_is_shape)

    def _applied(self, trees: tuple[Any, ...], options: Any) -> Any:
        self._check(*trees, **options)
        return jax.tree.map(jnp.asarray, self.fun(*trees, **options))

    def _check(self, *trees: Any, **options: Any) -> None:
        """Reject what the function must not be called on: nothing."""

    def _agreed(self, trees: Any, options: Any) -> tuple[Any, Any]:
        """Return the result of `fun`, on the workers of P, and its shapes and dtypes on the first of them.

        All workers meet. If `fun` raises on one, that one raises the same, and all others a `PlanError`.
        """
        name, applied = function_name(self.fun), None
        raised: list[Exception] = []

        def contribute() -> Any:
            nonlocal applied
            if not self.P.active:
                return None
            try:
                applied = self._applied(trees, options)
            except DistDLError:
                raise
            except Exception as error:
                raised.append(error)
                raise PlanError(f"{name} raised {type(error).__name__}: {error}") from error
            return jax.tree.map(lambda y: ShapeDtype(y.shape, np.dtype(y.dtype)), applied)

        def decide(contributions: dict[int, Any]) -> Any:
            first, *others = (contributions[worker] for worker in self.P.ranks)
            alike = all(_kinds(other) == _kinds(first) for other in others)
            return first if alike else [contributions[worker] for worker in self.P.ranks], alike

        world = self.P.world
        label = f"map_blocks of {name} on {self.P.describe()}"
        try:
            shapes, alike = agree(world, tuple(range(world.size)), label, contribute, decide)
        except PlanError:
            if raised:
                raise raised[0] from None
            raise
        if not alike:
            listed = "; ".join(f"{of} on worker {worker}" for worker, of in zip(self.P.ranks, shapes, strict=True))
            raise PlanError(
                f"{name} must return the same tree, of arrays with the same dtypes, on all workers of P, and scalars "
                f"on all of them or on none, but it returns {listed}."
            )
        return applied, shapes

    def plan(self, x: ShapeDtypes) -> BlocksPlan:
        """Plan the function of one tensor, whose result is an array: the blocks of all workers afterwards."""

        def applied(block: ShapeDtype) -> ShapeDtype:
            y = jax.eval_shape(self.fun, jax.ShapeDtypeStruct(block.shape, block.dtype))
            return ShapeDtype(tuple(y.shape), np.dtype(y.dtype))

        own = {block: applied(block) for block in {x[worker] for worker in self.P.ranks}}
        first = own[x[self.P.ranks[0]]]
        on_P = set(self.P.ranks)
        blocks = {
            worker: own[block] if worker in on_P else ShapeDtype(_elsewhere(first, block.shape), first.dtype)
            for worker, block in x.items()
        }
        return BlocksPlan(blocks)


def _is_traceable(leaf: Any) -> bool:
    """Say whether a leaf can carry a derivative or a batch: JAX arrays, except random keys."""
    return isinstance(leaf, Array) and isinstance(leaf.dtype, np.dtype)


def _anchor(x: Array) -> Array:
    """Return an empty array that depends on `x`, in JAX's view, and whose cotangent costs nothing."""
    return lax.slice_in_dim(x, 0, 0) if x.ndim else x


def _elsewhere(y: ShapeDtype, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of y's substitute outside P: y's own for a scalar, otherwise a placeholder's."""
    return zero_volume_shape(batch, preserve_batch=True) if y.shape else ()


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, ShapeDtype)


def _kinds(shapes: Any) -> Any:
    """Return what must be equal on all workers of P: the tree, each array's dtype, and whether it is a scalar."""
    leaves, structure = jax.tree.flatten(shapes, is_leaf=_is_shape)
    return structure, [(y.dtype, bool(y.shape)) for y in leaves]
