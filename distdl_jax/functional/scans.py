"""Scans along a split dimension: cumulative sums, and any associative function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import common_dtype, outside, owned_grid
from distdl_jax.functional.calls import function_call
from distdl_jax.functional.halo_exchange import RangesPlan, plan_ranges
from distdl_jax.functional.plan import Plan, ShapeDtypes, taking_part
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.decomposition import ProductGrid, box_shape, ranges_of_sizes
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.text import documented
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.agreement import agree, exchange_shapes, shape_dtype_of
from distdl_jax.transports.world import World
from distdl_jax.validation import check_function, checked_axis, checked_boolean

Tree = TypeVar("Tree")
Leaves = Sequence[Array]


@dataclass(frozen=True)
class ScanPlan(Plan):
    """The scan of one array: each worker gets the last result of every preceding worker.

    - `inputs`: the shapes and dtypes of the workers' blocks.
    - `fetch`: the movement of these results, in the dtype in which they are combined.
    - `dtype`: of the result.
    """

    inputs: ShapeDtypes = field(hash=False)
    fetch: RangesPlan
    dtype: np.dtype

    def output(self, worker: int) -> ShapeDtype:
        return ShapeDtype(self.inputs[worker].shape, self.dtype)


@function_call
def associative_scan(
    f: Callable[[Tree, Tree], Tree], x: Tree, P_x: Partition, axis: int = 0, reverse: bool = False
) -> Tree:
    """Scan a tensor on `P_x` with an associative function along `axis`, which may be split: `jax.lax.associative_scan`.

    Entry i of the result is f(... f(f(x_0, x_1), x_2) ..., x_i). Each worker scans its own block. Then it gets the last
    result of every preceding worker, one entry of each along `axis`, combines them, and prepends them to its own: with
    p workers along `axis` up to p - 1 entries are sent to a worker, once, whatever the length. It computes f on its
    entries about three times. Derivatives are JAX's, of any order; the backward pass moves the same amount in reverse.

    **Arguments:**

    - `f`: a function of two trees like x that returns one. It must be associative, and work on all entries along `axis`
      at once. It must be the same on all workers, which is not checked.
    - `x`: this worker's block, or a tree of blocks, each on P_x and with equal lengths along `axis`; along other
      dimensions their lengths may differ. Blocks may be uneven and empty. Zero-volume outside P_x.
    - `P_x`: the partition, with as many dimensions as each tensor.
    - `axis`: the dimension; a negative one counts from the end.
    - `reverse`: whether to scan from the end.

    **Returns:** a tree like x, of blocks of the same shapes; outside P_x, `x`.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid; `PlanError`, on
    every worker of P_x, if blocks don't form a grid, or their lengths along `axis` differ.

    The state of a selective state space model (Mamba, S4, minGRU), h_t = a_t h_{t-1} + b_t, over a split sequence:

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])  # sequence x state
    >>> def after(first, then):
    ...     return first[0] * then[0], first[1] * then[0] + then[1]
    >>> a, b = jnp.full((4, 1), 0.5), jnp.ones((4, 1))
    >>> associative_scan(after, (a, b), P)[1].ravel().tolist()
    [1.0, 1.5, 1.75, 1.875]

    Source: Blelloch (1990), "Prefix sums and their applications"; JAX's function of the same name.
    """
    check_function("f", f)
    axis, reverse = _checked(P_x, axis, reverse)
    leaves, structure = jax.tree.flatten(x)
    if not leaves:
        raise InvalidArgumentError("`x` must hold at least one array.")
    if not P_x.active:
        return jax.tree.map(lambda leaf: outside(P_x.world, leaf), x)

    def flat(function: Callable[..., Tree]) -> Callable[..., Leaves]:
        return lambda *sides: jax.tree.leaves(function(*(jax.tree.unflatten(structure, side) for side in sides)))

    team = tuple(sorted(P_x.ranks))
    label = f"associative_scan of {len(leaves)} along {axis}, reverse {reverse}, on {P_x.describe()}"
    with jax.named_scope("associative_scan"):
        blocks = agree(P_x.world, team, label, lambda: [shape_dtype_of("x", leaf) for leaf in leaves])
        plans = plan_associative_scan(blocks, P_x, axis, reverse)
        scan = flat(lambda x: lax.associative_scan(f, x, reverse=reverse, axis=axis))
        return jax.tree.unflatten(structure, _run(plans, P_x.world, leaves, _Along(axis, reverse, scan, flat(f))))


def plan_associative_scan(
    shape_dtypes: Mapping[int, Sequence[ShapeDtype]], P_x: Partition, axis: int = 0, reverse: bool = False
) -> tuple[ScanPlan, ...]:
    """Plan `associative_scan`, from the shapes and dtypes of each leaf on at least the workers of P_x."""
    axis, reverse = _checked(P_x, axis, reverse)
    leaves = zip(*(shape_dtypes[worker] for worker in P_x.ranks), strict=True)
    plans = tuple(_plan(dict(zip(P_x.ranks, leaf, strict=True)), P_x, axis, reverse) for leaf in leaves)
    lengths = [tuple(plan.inputs[worker].shape[axis] for worker in P_x.ranks) for plan in plans]
    if len(set(lengths)) > 1:
        raise PlanError(
            f"The arrays of `x` must have equal blocks along dimension {axis}, but have the lengths {lengths} on the "
            "workers of P_x."
        )
    return plans


_ALONG_AXIS = """
Each worker scans its own block, and gets the last result of every preceding block: with p workers along `axis`, up to
p - 1 slices of one entry. $derivative

**Arguments:**

- `x`: this worker's block, of $numbers; blocks may be uneven and empty. Zero-volume outside P_x.
- `P_x`: the partition, with as many dimensions as the tensor.
- `axis`: the dimension; a negative one counts from the end.
- `reverse`: whether to start from the end.

**Returns:** this worker's block, of x's shape and dtype$returns. Outside P_x, `x`.

**Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid; `PlanError`, on
every worker of P_x, if blocks don't form a grid$refused.

>>> import jax.numpy as jnp, distdl_jax as dj
>>> def program():
...     P = dj.Partition().grid([2])
...     x = dj.TensorSpec((4,), P).block(jnp.array([2, 1, 3, 1]))
...     return dj.functional.$name(x, P, 0).tolist()
>>> dj.simulate(2, program)
$example
"""
_TOTAL = {"numbers": "any numbers", "refused": "", "returns": "; for booleans an integer, as in jnp"}
_EXTREMUM = {
    "derivative": "Tied entries share a gradient, in other proportions than on one worker.",
    "numbers": "real numbers",
    "returns": "",
    "refused": ", or numbers are not real",
}


@function_call
@documented(
    _ALONG_AXIS,
    **_TOTAL,
    derivative="It is linear; its adjoint is the sum from the other end.",
    example="[[2, 3], [6, 7]]",
)
def cumsum(x: Array, P_x: Partition, axis: int, reverse: bool = False) -> Array:
    """Return cumulative sums of a tensor on `P_x` along `axis`, which may be split: `jnp.cumsum`, `torch.cumsum`.

    Half precisions are added in float32.
    """
    return _cumulative("cumsum", x, P_x, axis, reverse)


@function_call
@documented(_ALONG_AXIS, **_TOTAL, derivative="Derivatives are exact at 0.", example="[[2, 2], [6, 6]]")
def cumprod(x: Array, P_x: Partition, axis: int, reverse: bool = False) -> Array:
    """Return cumulative products of a tensor on `P_x` along `axis`, which may be split: `jnp.cumprod`, `torch.cumprod`.

    Half precisions are multiplied in float32.
    """
    return _cumulative("cumprod", x, P_x, axis, reverse)


@function_call
@documented(_ALONG_AXIS, **_EXTREMUM, example="[[2, 2], [3, 3]]")
def cummax(x: Array, P_x: Partition, axis: int, reverse: bool = False) -> Array:
    """Return cumulative maxima of a tensor on `P_x` along `axis`, which may be split: `jax.lax.cummax`."""
    return _cumulative("cummax", x, P_x, axis, reverse)


@function_call
@documented(_ALONG_AXIS, **_EXTREMUM, example="[[2, 1], [1, 1]]")
def cummin(x: Array, P_x: Partition, axis: int, reverse: bool = False) -> Array:
    """Return cumulative minima of a tensor on `P_x` along `axis`, which may be split: `jax.lax.cummin`."""
    return _cumulative("cummin", x, P_x, axis, reverse)


_KINDS: dict[str, tuple[Callable[..., Array], Callable[[Array, Array], Array]]] = {
    "cumsum": (lax.cumsum, jnp.add),
    "cumprod": (lax.cumprod, jnp.multiply),
    "cummax": (lax.cummax, jnp.maximum),
    "cummin": (lax.cummin, jnp.minimum),
}
"""The scan of one worker's entries, and the combination of two results."""


def plan_cumulative(kind: str, shape_dtypes: ShapeDtypes, P_x: Partition, axis: int, reverse: bool = False) -> ScanPlan:
    """Plan the function `kind`, from the shapes and dtypes on at least the workers of P_x."""
    axis, reverse = _checked(P_x, axis, reverse)
    inputs = taking_part(shape_dtypes, P_x.ranks)
    dtype = common_dtype("x", inputs, P_x.ranks)
    extreme = kind in ("cummax", "cummin")
    if extreme and (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.complexfloating)):
        raise PlanError(f"`x` must hold real numbers, but is {dtype}.")
    return _plan(
        inputs, P_x, axis, reverse, jax.dtypes.canonicalize_dtype(int) if dtype == np.bool_ else dtype, wide=not extreme
    )


def _cumulative(kind: str, x: Array, P_x: Partition, axis: int, reverse: bool) -> Array:
    axis, reverse = _checked(P_x, axis, reverse)
    if not P_x.active:
        return outside(P_x.world, x)
    with jax.named_scope(kind):
        label = f"{kind} along {axis}, reverse {reverse}, on {P_x.describe()}"
        blocks = exchange_shapes(P_x.world, tuple(sorted(P_x.ranks)), label, x)
        return running(kind, plan_cumulative(kind, blocks, P_x, axis, reverse), P_x.world, x, axis, reverse)


def running(kind: str, plan: ScanPlan, world: World, x: Array, axis: int, reverse: bool) -> Array:
    """Return this worker's block of the function `kind`, by its plan."""
    scan, combine = _KINDS[kind]
    along = _Along(
        axis,
        reverse,
        lambda leaves: [scan(leaves[0], axis=axis, reverse=reverse)],
        lambda before, own: [combine(before[0], own[0])],
    )
    (y,) = _run((plan,), world, (x.astype(plan.fetch.dtype),), along)
    return y.astype(plan.dtype)


class _Along(NamedTuple):
    """The scan of arrays: of one worker's entries, and of two results, the first of which comes before the second."""

    axis: int
    reverse: bool
    scan: Callable[[Leaves], Leaves]
    combine: Callable[[Leaves, Leaves], Leaves]

    def last(self, y: Array) -> Array:
        """Return the result of the last entry; empty if there are no entries."""
        n = y.shape[self.axis]
        if n == 0:
            return y
        return (
            lax.slice_in_dim(y, 0, 1, axis=self.axis) if self.reverse else lax.slice_in_dim(y, n - 1, n, axis=self.axis)
        )


def _run(plans: Sequence[ScanPlan], world: World, leaves: Leaves, along: _Along) -> list[Array]:
    """Return this worker's results, one for each array."""
    n = leaves[0].shape[along.axis]
    own = list(along.scan(leaves)) if n else list(leaves)
    moved = [plan.fetch.run(world, along.last(y)) for plan, y in zip(plans, own, strict=True)]
    if n and moved[0].shape[along.axis]:
        before = (jnp.broadcast_to(along.last(y), own[i].shape) for i, y in enumerate(along.scan(moved)))
        own = list(along.combine(list(before), own))
    # Every worker's results depend on the whole movement, used or not; otherwise some would not run the adjoint.
    return [tie(y, *moved) for y in own]


def _plan(
    inputs: ShapeDtypes,
    P_x: Partition,
    axis: int,
    reverse: bool,
    dtype: np.dtype | None = None,
    wide: bool = False,
) -> ScanPlan:
    """Plan the scan of one array, whose results are of `dtype` (default: x's), combined in the dtype of its sums."""
    owned, given = owned_grid("x", P_x, inputs), common_dtype("x", inputs, P_x.ranks)
    dtype = given if dtype is None else dtype
    ends = ranges_of_sizes([min(stop - start, 1) for start, stop in owned.ranges[axis]])
    before = tuple((stop, ends[-1][1]) if reverse else (0, start) for start, stop in ends)
    slices, needed = ([*owned.ranges] for _ in range(2))
    slices[axis], needed[axis] = ends, before
    grid = ProductGrid(P_x.ranks, tuple(slices))
    moves = accumulation_dtype(dtype) if wide else dtype
    blocks = {worker: ShapeDtype(box_shape(grid.box(cell)), moves) for worker, cell in grid.cell_of.items()}
    return ScanPlan(inputs, plan_ranges("scan", blocks, P_x, Halos(grid, tuple(needed))), dtype)


def _checked(P_x: Partition, axis: int, reverse: bool) -> tuple[int, bool]:
    check_partitions(P_x=P_x)
    return checked_axis("axis", axis, P_x.shape), checked_boolean("reverse", reverse)
