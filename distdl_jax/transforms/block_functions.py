"""Functions of the blocks of several tensors, on the workers of a partition; zero-volume arrays elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import DistDLError, InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import outside, zero_volume_shape
from distdl_jax.functional.plan import BlocksPlan, ShapeDtypes
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.static import Static
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.source_lines import function_name
from distdl_jax.tracing.tie import tie
from distdl_jax.transforms.plain_functions import follow, is_elementwise, refusal
from distdl_jax.transports.agreement import agree
from distdl_jax.validation import check_function


@dataclass(frozen=True)
class BlockFunction(Static):
    """The result of `map_blocks`: a function for all workers, of blocks on P."""

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

    def _check(self, x: Any = None, *others: Any, **options: Any) -> None:
        """Reject a function that mixes a split dimension of its first argument, except by partial sums."""
        split = {d: p for d, p in enumerate(self.P.shape) if p > 1}
        if not split or not hasattr(x, "shape") or len(x.shape) != self.P.dim or is_elementwise(self.fun, self.P.dim):
            return

        @wraps(self.fun)
        def of_first(x: Array) -> Any:
            return self.fun(x, *others, **options)

        text = refusal(follow([of_first], x), split, may_be_partial=True, may_merge=True)
        if text is not None:
            raise InvalidArgumentError(text)

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


def map_blocks(fun: Callable[..., Any], P: Partition) -> BlockFunction:
    """Return a function of blocks on P that all workers can call: `fun` runs only on the workers of P.

    Layers leave a zero-volume array on the workers outside their partition. Arithmetic works on these, but indexing,
    `reshape`, `softmax` and means don't. `map_blocks(fun, P)(x, y, ...)` avoids the `if P.active`:

        on P:       fun(x_w, y_w, ...)
        elsewhere:  a zero-volume array for each array in the result of `fun`, 0 for each scalar

    So a scalar is this worker's part of a loss. On every worker JAX sees a result that depends on all arguments,
    whatever `fun` does with them there, so all workers differentiate in the same way, including with `jax.grad`.

    **Arguments:**

    - `fun`: a function of blocks, which moves no data. It may take and return any pytrees; on all workers of P it must
      return the same tree, dtypes and positions of scalars. Differentiable values should be arguments, not variables in
      its closure. It may return partial sums of its first argument, a block on P; a function that otherwise mixes
      entries along a split dimension, as a softmax would, is rejected, unless it is an `nn.Local`.
    - `P`: the partition of the blocks.

    **Returns:** a function of the same arguments. Blocks are this worker's, zero-volume outside P. Collective in the
    world, if P doesn't have all of its workers: one agreement while tracing, and no message when it runs. It can be
    used in `nn.Sequential`, where it takes and returns one array. Its placeholders have the first dimension of its
    first array.

    **Raises:** errors of `fun`, on all workers, as a `PlanError` if another one raised it; `InvalidArgumentError` if it
    mixes blocks' parts of a dimension; `PlanError` if results differ between the workers of P; `InvalidTypeError` if
    `fun` is not a function or `P` not a partition.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> add_embedding = map_blocks(lambda x, e: x + e[:, :, None], P)
    >>> add_embedding(jnp.ones((2, 3, 5)), jnp.ones((2, 3))).shape
    (2, 3, 5)
    """
    return BlockFunction(fun, P)


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
