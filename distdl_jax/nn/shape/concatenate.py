"""Concatenation along a dimension that may be split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import outside, owned_grid
from distdl_jax.functional.halo_exchange import RangesPlan, plan_ranges
from distdl_jax.functional.plan import BlocksPlan, ShapeDtypes, taking_part
from distdl_jax.nn.base.layer import describe
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.static import Static
from distdl_jax.plans.decomposition import balanced_ranges, intersect_ranges
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.shape_dtype import ShapeDtype, listed
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.agreement import exchange_named_shapes
from distdl_jax.transports.world import World
from distdl_jax.validation import checked_axis


@dataclass(frozen=True)
class ConcatenationPlan(BlocksPlan):
    """Movements that fetch, from each tensor, its piece of each worker's block of the output; it may be empty."""

    pieces: tuple[RangesPlan, ...]
    axis: int

    def run(self, world: World, xs: Sequence[Array]) -> Array:
        """Return this worker's block of the output."""
        output = self.output(world.rank)
        own = [plan.run(world, x) for plan, x in zip(self.pieces, xs, strict=True)]
        if output.size == 0:
            return tie(jnp.zeros(output.shape, output.dtype), *own)
        whole = [piece.astype(output.dtype) for piece in own if piece.size]
        y = whole[0] if len(whole) == 1 else jnp.concatenate(whole, axis=self.axis)
        return tie(y, *(piece for piece in own if not piece.size))


@dataclass(frozen=True)
class Concatenate(Static):
    """Concatenate tensors along a dimension that may be split, as in the skips of a U-Net: `cat(a, b)`.

    The output is in balanced blocks on P_x. Along an unsplit dimension there is no communication; otherwise each worker
    fetches its block's missing parts.

    **Arguments:**

    - `P_x`: the partition of all tensors and of the output. Blocks may have any length, the same in all tensors along
      the other dimensions.
    - `axis`: the dimension.

    **Raises:** `InvalidArgumentError`, on every worker, for a dimension that P_x doesn't have.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> Concatenate(P)(jnp.ones((2, 3)), jnp.ones((2, 4))).shape
    (2, 7)
    """

    P_x: Partition
    axis: int = 1

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x)
        checked_axis("axis", self.axis, self.P_x.shape)

    @property
    def input_partition(self) -> Partition:
        """The partition of all tensors and of the output, P_x."""
        return self.P_x

    output_partition = input_partition

    def __call__(self, *xs: Array) -> Array:
        """Return this worker's block of the output, from its blocks of the tensors; outside P_x, the first of them.

        **Raises:** `PlanError`, on every worker of P_x, if blocks don't match.
        """
        if not xs:
            raise InvalidArgumentError("`xs` (=()) must hold one tensor or more.")
        if self.P_x.rank is None:
            placeholders = [outside(self.P_x.world, x, f"xs[{k}]") for k, x in enumerate(xs)]
            return placeholders[0]
        with jax.named_scope("Concatenate"):
            team = tuple(sorted(self.P_x.ranks))
            arrays = {f"xs[{k}]": x for k, x in enumerate(xs)}
            shapes = exchange_named_shapes(self.P_x.world, team, describe(self), arrays)
            if len({len(of_worker) for of_worker in shapes.values()}) > 1:
                raise PlanError(
                    "All workers must pass the same number of tensors, but they pass "
                    f"{[len(shapes[worker]) for worker in team]}."
                )
            blocks = [{worker: of_worker[name] for worker, of_worker in shapes.items()} for name in arrays]
            return self.plan(blocks).run(self.P_x.world, xs)

    def plan(self, xs: Sequence[ShapeDtypes]) -> ConcatenationPlan:
        """Plan from the shapes and dtypes of each tensor's blocks: without communication, equal on every worker.

        **Raises:** `PlanError` if blocks don't match.
        """
        tensors = [taking_part(x, self.P_x.ranks) for x in xs]
        grids = [owned_grid(f"xs[{k}]", self.P_x, x) for k, x in enumerate(tensors)]
        axis = checked_axis("axis", self.axis, self.P_x.shape)
        first = grids[0].ranges
        for k, grid in enumerate(grids):
            for d in (d for d in range(len(first)) if d != axis and grid.ranges[d] != first[d]):
                its, wanted = (listed(tuple(b - a for a, b in ranges)) for ranges in (grid.ranges[d], first[d]))
                raise PlanError(
                    f"`xs[{k}]` (of shape {grid.extent}) must have the blocks of `xs[0]` (of shape {grids[0].extent}) "
                    f"in every dimension but {axis}, but along dimension {d} their lengths are {its}, not {wanted}."
                )
        # The result is balanced again: each tensor gives every worker the part that falls into its range of the whole.
        own = balanced_ranges(sum(grid.extent[axis] for grid in grids), self.P_x.shape[axis])
        pieces, start = [], 0
        for grid, x in zip(grids, tensors, strict=True):
            n = grid.extent[axis]
            inside = [intersect_ranges(block, (start, start + n)) for block in own]
            needed = tuple((a - start, b - start) if a < b else (0, 0) for a, b in inside)
            halos = Halos(grid, (*grid.ranges[:axis], needed, *grid.ranges[axis + 1 :]))
            pieces.append(plan_ranges("concatenate", x, self.P_x, halos))
            start += n
        dtype = jnp.result_type(*(plan.dtype for plan in pieces))
        blocks = {}
        for worker in self.P_x.ranks:
            cell = grids[0].cell_of[worker]
            lengths = [b - a for a, b in grids[0].box(cell)]
            a, b = own[grids[0].index(cell)[axis]]
            blocks[worker] = ShapeDtype((*lengths[:axis], b - a, *lengths[axis + 1 :]), dtype)
        return ConcatenationPlan(blocks, tuple(pieces), axis)
