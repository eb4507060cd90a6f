"""`dj.map_blocks` and `nn.Local`: functions of the blocks of tensors, which run on the workers of a partition only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from distdl_jax.distribute.inner import ON_BLOCKS, InnerDoor
from distdl_jax.distribute.mixing import is_elementwise, mixing
from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.block_checks import outside
from distdl_jax.functional.plan import BlocksPlan, ShapeDtypes
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.static import Static
from distdl_jax.source_lines import function_name
from distdl_jax.tracing.context import trace_context
from distdl_jax.transforms.block_functions import BlockFunction
from distdl_jax.validation import check_function


@dataclass(frozen=True)
class Local(Static):
    """A plain function that applies to each worker's block separately.

    `nn.Sequential`, `nn.Residual` and `dj.map_blocks` take a function as one of the whole array, whose blocks the
    workers have: a sum, a sort or a slice along a split dimension is that of the whole dimension. With
    `nn.Local(function)` each block is meant.

    **Arguments:**

    - `function`: of one or more arrays.

    **Raises:** `InvalidTypeError` if `function` can't be called.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program(function):
    ...     P = dj.Partition().grid([1, 2])
    ...     network = dj.nn.Sequential(dj.nn.Repartition(P, P), function)
    ...     return network(({}, {}), dj.TensorSpec((1, 4), P).block(jnp.array([[1.0, 2.0, 4.0, 8.0]]))).tolist()
    >>> def by_largest(x):
    ...     return x / x.max()
    >>> dj.simulate(2, program, by_largest)
    [[[0.125, 0.25]], [[0.5, 1.0]]]
    >>> dj.simulate(2, program, Local(by_largest))
    [[[0.5, 1.0]], [[0.5, 1.0]]]
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        check_function("function", self.function)

    @property
    def __name__(self) -> str:
        return f"Local({function_name(self.function)})"

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return `function(*args, **options)`."""
        with jax.named_scope("nn.Local"):
            return self.function(*args, **options)


@dataclass(frozen=True)
class MappedBlocks(BlockFunction):
    """The result of `map_blocks`."""

    def __call__(self, *trees: Any, **options: Any) -> Any:
        """Return this worker's part of `fun(*trees, **options)`; placeholders on the workers outside of P."""
        if trace_context.whole_program:
            return self.fun(*trees, **options)
        if self._is_of_one_tensor(trees, options):
            world, x = self.P.world, jnp.asarray(trees[0])
            if not self.P.active:
                outside(world, x)
            team = tuple(self.P.ranks) if self.P.size == world.size else tuple(range(world.size))
            results = self._door(options)(x, team)
            if results is not ON_BLOCKS:
                return results
        return super().__call__(*trees, **options)

    def _is_of_one_tensor(self, trees: tuple[Any, ...], options: Any) -> bool:
        """Say whether the only array is the block of one tensor, so that it is clear what the whole arrays are."""
        P = self.P
        if P.size == 1 or isinstance(self.fun, Local) or is_elementwise(self.fun, P.dim):
            return False
        arrays = jax.tree.leaves((trees, options))
        return len(trees) == len(arrays) == 1 and arrays[0] is trees[0] and hasattr(trees[0], "ndim")

    def _door(self, options: Any) -> InnerDoor:
        return InnerDoor(partial(self.fun, **options) if options else self.fun, self.P, results="sums as terms")

    def _check(self, *trees: Any, **options: Any) -> None:
        """Reject a function of several tensors that mixes a split dimension of the first, except by partial sums."""
        x = trees[0] if trees else None
        is_one = self._is_of_one_tensor(trees, options)  # which is checked already
        if is_one or isinstance(self.fun, Local) or getattr(x, "ndim", None) != self.P.dim or self.P.size == 1:
            return
        if is_elementwise(self.fun, self.P.dim):
            return

        @wraps(self.fun)
        def of_first(x: Array) -> Any:
            return self.fun(x, *trees[1:], **options)

        text = mixing(of_first, x, self.P, may_be_partial=True)
        if text is not None:
            raise InvalidArgumentError(text)

    def plan(self, x: ShapeDtypes) -> BlocksPlan:
        """Plan the function of one tensor, whose result is an array: the blocks of all workers afterwards."""
        if not isinstance(self.fun, Local) and not is_elementwise(self.fun, self.P.dim):
            blocks = self._door({}).planned(x)
            if blocks is not None:
                return BlocksPlan(blocks)
        return super().plan(x)


def map_blocks(fun: Callable[..., Any], P: Partition) -> MappedBlocks:
    """Return a function of blocks on P that all workers can call: `fun` runs only on the workers of P.

    Layers leave a zero-volume array on the workers outside their partition. Arithmetic works on these, but indexing,
    `reshape`, `softmax` and means don't. `map_blocks(fun, P)(x, y, ...)` avoids the `if P.active`:

        on P:       fun(x_w, y_w, ...)
        elsewhere:  a zero-volume array for each array in the result of `fun`, 0 for each number

    If its only array is the block of one tensor, `fun` is a function of the whole tensor, and `dj.distribute` runs it:
    a softmax along a split dimension is that of the whole dimension. A result that is not cut as P cuts is this
    worker's term: the sum of all workers' terms is the result. So a number is this worker's part of a loss, and a sum
    along a split dimension is the sum over the block, for a layer that adds up.

    On every worker JAX sees a result that depends on all arguments, whatever `fun` does with them there, so all workers
    differentiate in the same way, including with `jax.grad`.

    **Arguments:**

    - `fun`: a function that moves no data. It may take and return any pytrees. Differentiable values should be
      arguments, not variables in its closure. With several arrays, which may be blocks or copies, it is called on each
      worker's: there it may return partial sums of its first argument, a block on P, but is rejected if it mixes
      entries along a split dimension otherwise. `dj.distribute` takes a spec for each argument.
    - `P`: the partition of the blocks. `nn.Local(fun)` is called on the blocks, unchecked.

    **Returns:** a function of the same arguments. Blocks are this worker's, zero-volume outside P. Collective in the
    world, if P doesn't have all of its workers: while tracing; a message is sent only if data has to move. It can be
    used in `nn.Sequential`, where it takes and returns one array. Its placeholders have the first dimension of its
    first array.

    **Raises:** errors of `fun`, on all workers, as a `PlanError` if another one raised it; `InvalidArgumentError` if it
    mixes several blocks' parts of a dimension; `PlanError` if it can't be distributed, or results differ between the
    workers of P; `InvalidTypeError` if `fun` is not a function or `P` not a partition.

    >>> import jax, jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> add_embedding = map_blocks(lambda x, e: x + e[:, :, None], P)
    >>> add_embedding(jnp.ones((2, 3, 5)), jnp.ones((2, 3))).shape
    (2, 3, 5)
    >>> def program(fun):
    ...     P = dj.Partition().grid([2])
    ...     return map_blocks(fun, P)(dj.TensorSpec((3,), P).block(jnp.arange(3.0))).tolist()
    >>> dj.simulate(2, program, jnp.cumsum), dj.simulate(2, program, jnp.sum)
    ([[0.0, 1.0], [3.0]], [1.0, 2.0])
    """
    return MappedBlocks(fun, P)
