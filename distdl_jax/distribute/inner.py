"""The inner door: a plain function between layers, of an array of which the workers have blocks.

The workers learn the whole shape from their blocks, and distribute the function as one of whole arrays. A function that
can't be one, because it closes over a block or moves data itself, is called on each block, if it mixes no entries of a
dimension that is split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.distribute.digests import combined
from distdl_jax.distribute.doors import is_floating
from distdl_jax.distribute.function import Distributed
from distdl_jax.distribute.interpreter import as_weak
from distdl_jax.distribute.layouts import Cut, Mesh, axes_in, trimmed, uncut
from distdl_jax.distribute.meanings import BLOCKS
from distdl_jax.distribute.mixing import counts_along, mixing, same_operations
from distdl_jax.distribute.movements import Movements
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.distribute.views import View
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import owned_grid, zero_volume_shape
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.functional.repartition import plan_repartition
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.planning import planning_world
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.source_lines import function_name
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.agreement import MovesDataError, agree, shape_dtype_of
from distdl_jax.transports.world import Workers

Results = Literal["blocks", "terms", "sums as terms"]

ON_BLOCKS: Any = object()
"""In place of a result: the function is to be called on each worker's block."""

_MOVES_DATA = "moves data"
_NOT_OF_WHOLE_ARRAYS = "not of whole arrays"


@dataclass(frozen=True)
class InnerDoor:
    """A plain function of an array on `P`.

    If the array has more dimensions, the leading ones are whole; if it has fewer, the rest of P must be of one worker.

    - `target`: the partition that takes the result, if it is known.
    - `results`: how they are given: as "blocks"; as "terms", with a sum over the workers that don't cut them, for a
      layer that adds up; or "sums as terms", where a sum is the last that is computed.
    - `is_of_blocks`: whether the function is one of blocks, which is only checked.
    - `takes_as_given`: whether P is certain of the result only, and of the array the default.

    A number is this worker's term: the sum of all workers' terms is the value. A result of as many dimensions as
    `target` is given on it. Others stay as they fall if nothing had to move; otherwise those of as many dimensions as P
    are given on P.
    """

    function: Callable[[Any], Any]
    P: Partition
    target: Partition | None = None
    results: Results = "blocks"
    is_of_blocks: bool = False
    takes_as_given: bool = False

    def __call__(self, x: Array, team: Workers) -> Any:
        """Return this worker's part of the results, given its block `x`; or `ON_BLOCKS`.

        Collective among the workers of `team`, which holds those of P; others in it get placeholders.
        """
        world, name = self.P.world, function_name(self.function)
        label = f"functions of blocks on {self.P.describe()}"
        shapes = agree(world, team, label, lambda: shape_dtype_of("x", x))
        counts = self._counts(shapes)
        if counts is None:
            return ON_BLOCKS
        whole = _OfBlocks.of(self._on(counts), shapes, bool(getattr(jax.typeof(x), "weak_type", False)))
        own = whole if isinstance(whole, str) else (whole.digest, self._stays(whole, x, shapes))
        others = agree(world, team, f"the program of {name}", lambda: own)
        on_P = {others[worker] for worker in self.P.ranks}
        if _MOVES_DATA in on_P:
            return ON_BLOCKS
        digests = {each if isinstance(each, str) else each[0] for each in on_P}
        if len(digests) > 1 or _NOT_OF_WHOLE_ARRAYS in others.values():
            self._check_on_blocks(x, team)
            return ON_BLOCKS
        assert not isinstance(whole, str)
        if all(stays for _, stays in on_P):
            return ON_BLOCKS
        return whole.applied(x, shapes)

    def _stays(self, whole: _OfBlocks, x: Array, shapes: ShapeDtypes) -> bool:
        """Say whether the function is called on blocks as they are.

        It is, too, if the array may be split otherwise, so that nothing moves, and the result is on P.
        """
        is_open = self.takes_as_given and self.P.active
        if not is_open or (not whole.dry_run()[0] and whole.falls_on(self.P)):
            return whole.stays_on_blocks(x)
        for counts in set(permutations(self.P.shape)) - {self.P.shape}:
            turned = _OfBlocks.of(replace(self, P=self.P.grid(counts)), shapes, False)
            if not isinstance(turned, str) and not turned.dry_run()[0] and turned.falls_on(self.P):
                return True
        return whole.stays_on_blocks(x)

    def _counts(self, shapes: ShapeDtypes) -> tuple[int, ...] | None:
        """Return the number of workers along each dimension of the array; None if it isn't split, or doesn't fit."""
        dims = len(shapes[self.P.ranks[0]].shape)
        counts = None if self.takes_as_given and dims != self.P.dim else counts_along(self.P, dims)
        return None if counts is None or max(counts, default=1) == 1 else counts

    def _on(self, counts: Sequence[int]) -> InnerDoor:
        """Return the same for an array split in these numbers."""
        return self if tuple(counts) == self.P.shape else replace(self, P=self.P.grid(counts))

    def _check_on_blocks(self, x: Array, team: Workers) -> None:
        """Reject, on all workers, a function that can't be one of whole arrays, and mixes a split dimension."""
        name, raised = function_name(self.function), list[Exception]()

        def contribute() -> None:
            if not self.P.active:
                return
            try:
                text = mixing(self.function, x, self.P, may_be_partial=self.results != "blocks")
            except Exception as error:
                raised.append(error)
                raise PlanError(f"{name} raised {type(error).__name__}: {error}") from error
            if text is not None:
                raise InvalidArgumentError(text)

        try:
            agree(self.P.world, team, f"{name} on blocks of {self.P.describe()}", contribute)
        except PlanError:
            if raised:
                raise raised[0] from None
            raise

    def planned(self, x: ShapeDtypes) -> ShapeDtypes | None:
        """Return all workers' blocks of the result; None if each is what the function makes of the block before."""
        if any(worker not in x for worker in self.P.ranks):
            return None
        world = planning_world(self.P.world.size, self.P.ranks[0])

        def there(P: Partition | None) -> Any:
            return None if P is None else world.grid(P.shape, P.ranks)

        counts = self._counts(x)
        if counts is None or self.is_of_blocks:
            return None
        door = replace(self._on(counts), target=there(self.target))
        whole = _OfBlocks.of(replace(door, P=there(door.P)), x, False)
        return None if isinstance(whole, str) else whole.blocks_afterwards(x)


class _OfBlocks(Distributed):
    """A function of whole arrays of which the workers of `door.P` have blocks, whose shapes they know.

    - `grid`: the blocks, balanced or not.
    """

    def __init__(self, door: InnerDoor, grid: ProductGrid, of_block: jax.ShapeDtypeStruct) -> None:
        self.door, self.grid = door, grid
        self.spec = TensorSpec(grid.extent, door.P)
        super().__init__(door.function, (self.spec,), BLOCKS, 2**20)
        shape = self.spec.local_shape if door.P.active else self.spec.shape_on(door.P.ranks[0])
        self.balanced_block = jax.ShapeDtypeStruct(shape, of_block.dtype, weak_type=of_block.weak_type)
        self.traced = self._trace((self.balanced_block,))
        self.digest = combined(self._digests(self.traced))
        self._refuses = False

    @property
    def _outs(self) -> list[Any]:
        return [out.aval for out in self.traced.closed.jaxpr.outvars]

    def with_target(self) -> _OfBlocks:
        """Return the function, on a mesh for the partition that takes its result."""
        target = self.door.target
        if target is not None and any(target.dim == len(out.shape) for out in self._outs):
            self.traced = replace(self.traced, mesh=Mesh([*self.traced.mesh.partitions, target]))
        return self

    @classmethod
    def of(cls, door: InnerDoor, shapes: ShapeDtypes, is_weak: bool) -> _OfBlocks | str:
        """Return the function, or why it is none of whole arrays."""
        first = shapes[door.P.ranks[0]]
        if door.is_of_blocks:
            return _NOT_OF_WHOLE_ARRAYS
        try:
            grid = owned_grid("x", door.P, shapes)
            if any(shapes[worker].dtype != first.dtype for worker in door.P.ranks):
                return _NOT_OF_WHOLE_ARRAYS
            whole = cls(door, grid, jax.ShapeDtypeStruct((), first.dtype, weak_type=is_weak))
        except MovesDataError:
            return _MOVES_DATA
        except Exception:  # it works on blocks, or raises there, too
            return _NOT_OF_WHOLE_ARRAYS
        return whole.with_target()

    def _closed_over(self, x: Any) -> Any:
        # If nothing moves, each worker's derivative is that of its own copy, as without this library.
        return super()._closed_over(x) if self._refuses else x

    # --- what moves ---------------------------------------------------------------------------------------------------

    @property
    def is_balanced(self) -> bool:
        """Whether the blocks are balanced."""
        P = self.door.P
        return self.grid.ranges == ProductGrid.balanced(self.grid.extent, P.shape, P.ranks).ranges

    @property
    def _gathers_at_the_door(self) -> bool:
        """Whether a dimension of length 1 is split: the one worker that has it gives it to the others."""
        return any(n == 1 and p > 1 for n, p in zip(self.grid.extent, self.door.P.shape, strict=True))

    def stays_on_blocks(self, x: Any) -> bool:
        """Say whether the function is called on blocks as they are, balanced or not: it is the same, and nothing moves.

        So what works element by element costs no message on any blocks.
        """
        if self.is_balanced and not self._gathers_at_the_door:
            return False
        if not self.door.P.active:
            return True
        if self.dry_run()[0]:
            return False
        return same_operations(self.traced.closed, self.f, x)

    def dry_run(self) -> tuple[bool, list[Tensor]]:
        """Return whether anything moves, and the results, on shapes alone."""
        movements, found = Movements(self.traced.mesh, notes=True), list[Tensor]()

        def run(x: Any) -> None:
            found.extend(self._evaluated(replace(self.traced, leaves=[x]), movements))
            for y in found:
                if not y.pending:
                    y.at(y.readable())  # a view moves nothing before it is read

        with trace_context.set(anchors=None):
            jax.eval_shape(run, self.balanced_block)
        return movements.requests > self._gathers_at_the_door, found

    def falls_on(self, P: Partition) -> bool:
        """Say whether the results fall on P's grid, or have no dimensions."""
        return all(
            not y.shape or self._numbers(y) == [p if n != 1 else 1 for n, p in zip(y.shape, P.shape, strict=False)]
            for y in self.dry_run()[1]
        )

    def _numbers(self, y: Tensor) -> list[int]:
        return [y.mesh.size(axes) for axes in y.readable()]

    def blocks_afterwards(self, x: ShapeDtypes) -> ShapeDtypes | None:
        """Return all workers' blocks of the result; None if it isn't one array, or nothing moves."""
        moves, results = self.dry_run()
        if len(results) != 1 or not (moves or not self.is_balanced) or self.stays_on_blocks(x[self.door.P.ranks[0]]):
            return None
        (y,) = results
        if not self._is_given_as_terms(y) and (P := self._partition_of(y)) is not None:
            spec = TensorSpec(y.shape, P)
        else:
            cut = self._layout(y, True)[0] if self._is_given_as_terms(y) else y.readable()
            spec = self.traced.mesh.spec_of(y.shape, trimmed(cut, y.shape))
        blocks: Mapping[int, tuple[int, ...]] = spec.block_shapes
        return {
            worker: ShapeDtype(blocks.get(worker, _placeholder(y.shape, of_x.shape)), y.dtype)
            for worker, of_x in x.items()
        }

    # --- running ------------------------------------------------------------------------------------------------------

    def applied(self, x: Array, shapes: ShapeDtypes) -> Any:
        """Return this worker's part of the results."""
        mesh, outs = self.traced.mesh, self._outs
        anchor = lax.slice_in_dim(x, 0, 0) if x.ndim else x
        if mesh.index is None:
            results = [jnp.zeros(_placeholder(out.shape, x.shape), out.dtype) for out in outs]
        else:
            movements = Movements(mesh)
            x = self._balanced(x, shapes, movements)
            closes_over = any(isinstance(c, jax.core.Tracer) and is_floating(c) for c in self.traced.closed.consts)
            self._refuses = closes_over and self.dry_run()[0]
            before = movements.requests + self._gathers_at_the_door
            values = self._evaluated(replace(self.traced, leaves=[x]), movements)
            moved = movements.requests > before or not self.is_balanced
            moved = moved or (any(isinstance(y, View) for y in values) and self.dry_run()[0])
            results = [self._given(n, y, out, moved) for n, (y, out) in enumerate(zip(values, outs, strict=True))]
        # For JAX, all workers' results depend on x, whatever the function makes of it.
        return self.traced.filled([tie(y, anchor) for y in results])

    def _balanced(self, x: Array, shapes: ShapeDtypes, movements: Movements) -> Array:
        if self.is_balanced:
            return x
        P, cut = self.door.P, self.traced.mesh.raw_cut_of(self.spec)
        return movements.run(plan_repartition(shapes, P, P), x, "balance", self.grid.extent, cut, cut)

    def _given(self, n: int, y: Tensor, out: Any, moved: bool) -> Any:
        """Return this worker's part of a result."""
        cut, axes = self._layout(y, moved)
        if self._is_given_as_terms(y):
            return as_weak(y.terms(cut, axes), out)
        if (P := self._partition_of(y)) is not None and (moved or axes or P is self.door.target):
            return self._given_back(n, y, TensorSpec(y.shape, P), out)
        return self._given_back(n, y, BLOCKS, out)

    def _is_given_as_terms(self, y: Tensor) -> bool:
        if not y.shape or self.door.results == "terms":
            return True
        return self.door.results == "sums as terms" and (bool(y.pending) or self._partition_of(y) is None)

    def _partition_of(self, y: Tensor) -> Partition | None:
        target, P = self.door.target, self.door.P
        if target is not None and target.dim == len(y.shape):
            return target
        return P if P.dim == len(y.shape) else None

    def _layout(self, y: Tensor, moved: bool) -> tuple[Cut, frozenset[int]]:
        """Return the cut of a result whose terms are asked for, and the axes along which they are terms."""
        mesh = y.mesh
        cut = uncut(y.shape) if not y.shape else y.cut if y.pending else y.readable()
        if moved and len(y.shape) == self.door.P.dim:
            own = trimmed(mesh.raw_cut_of(TensorSpec(y.shape, self.door.P)), y.shape)
            cut = tuple(() if set(axes) & y.pending else axes for axes in own)
        return cut, mesh.axes - axes_in(cut)


def _placeholder(shape: tuple[int, ...], of_x: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a result outside of P: a number stays one, and is 0."""
    return zero_volume_shape(of_x, preserve_batch=True) if shape else ()
