"""Sampling a split image at points known at run time: `grid_sample`, and the grids of affine maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import ceil, floor, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import common_dtype, outside, owned_grid
from distdl_jax.functional.calls import function_call
from distdl_jax.functional.halo_exchange import RangesPlan, plan_ranges
from distdl_jax.functional.plan import BlocksPlan, ShapeDtypes, taking_part
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.decomposition import Range, balanced_range, index_of
from distdl_jax.plans.halos import Halos
from distdl_jax.plans.padding import SAMPLE_MODES, reflected
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.agreement import exchange_named_shapes
from distdl_jax.transports.world import World
from distdl_jax.validation import check_length, checked_boolean, checked_integers, is_real

MODES = ("bilinear", "nearest")
ROUNDING = 1 / 16
"""The largest error, in entries, of a computed point; one that reads beyond the halo would be NaN."""

Reach = tuple[float, ...] | None


@dataclass(frozen=True)
class _How:
    """The options of `grid_sample`; `reach` is the largest displacement along each feature dimension."""

    mode: str
    padding_mode: str
    align_corners: bool
    reach: Reach


@function_call
def grid_sample(
    x: Array,
    grid: Array,
    P_x: Partition,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
    *,
    max_displacement: float | Sequence[float] | None = None,
) -> Array:
    """Sample a tensor on `P_x` at the points of `grid`: `torch.nn.functional.grid_sample`, of any number of features.

    With x of N x C x n_{D-1} x ... x n_0 on P_n x P_c x P_{D-1} x ... x P_0, each worker passes the points of its own
    block of the output, N x C x m_{D-1} x ... x m_0. The points may lie anywhere, and are known only at run time. So
    without `max_displacement` each worker gets all features of its samples and channels, with the corresponding memory:

        prod(n_d) n c  elements instead of  prod(n_d / P_d) n c

    With it, only a halo of that width is exchanged. It suits points near their outputs: flows of limited speed, small
    deformations. Outputs that would read beyond the halo are NaN, so errors are visible. The adjoint adds the gradients
    onto the workers that own the entries; the gradient of the grid needs no communication.

    **Arguments:**

    - `x`: this worker's block; blocks may be uneven and empty. Floating or complex; with mode "nearest" integers, too.
      Zero-volume outside P_x.
    - `grid`: the points of this worker's outputs, n x m_{D-1} x ... x m_0 x D with its own n and m_d: coordinates from
      -1 to 1 over the whole of x, starting with dimension 0, the last. Blocks form a grid on P_x; balanced ones give
      balanced outputs. Workers along P_c pass copies, and each gets the gradient from its own channels. `affine_grid`
      makes such blocks. Ignored outside P_x.
    - `P_x`: the partition of x and of the output, of 3 dimensions or more.
    - `mode`: "bilinear", which is linear between neighbours in any number of dimensions, or "nearest".
    - `padding_mode`: the values outside of x: "zeros", "border" (the nearest entry), or "reflection".
    - `align_corners`: whether -1 and 1 are the centres of the first and the last entry, or their outer edges.
    - `max_displacement`: the largest distance between a point and the position of its output, in entries of x: a
      number, or one for each feature dimension in the order of x's. The position is that of `affine_grid` for the
      identity.

    **Returns:** this worker's block of the output, of x's dtype, which may be empty; outside P_x, `x`.

    **Raises:** `InvalidArgumentError` or `InvalidTypeError`, on every worker, if arguments are invalid; `PlanError`, on
    every worker of P_x, if blocks don't form a grid or don't match, or x has no features to read.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> line, points = jnp.array([[[0.0, 10.0, 20.0]]]), jnp.array([[[-1.0], [0.25], [1.0]]])
    >>> grid_sample(line, points, P, align_corners=True).tolist()
    [[[0.0, 12.5, 20.0]]]

    Source: PyTorch's function of the same name; Jaderberg et al. (2015), arXiv:1506.02025.
    """
    how = _checked(P_x, mode, padding_mode, align_corners, max_displacement)
    if not P_x.active:
        outside(P_x.world, grid, "grid")
        return outside(P_x.world, x)
    with jax.named_scope("grid_sample"):
        label = f"grid_sample, {how}, on {P_x.describe()}"
        blocks = exchange_named_shapes(P_x.world, tuple(sorted(P_x.ranks)), label, {"x": x, "grid": grid})
        xs, grids = ({worker: both[name] for worker, both in blocks.items()} for name in ("x", "grid"))
        return _planned(xs, grids, P_x, how).run(P_x.world, x, grid)


def plan_grid_sample(
    x: ShapeDtypes,
    grid: ShapeDtypes,
    P_x: Partition,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
    *,
    max_displacement: float | Sequence[float] | None = None,
) -> SampledPlan:
    """Plan `grid_sample` from the shapes and dtypes of x and of the grid on at least the workers of P_x."""
    return _planned(x, grid, P_x, _checked(P_x, mode, padding_mode, align_corners, max_displacement))


@function_call
def affine_grid(theta: Array, P_x: Partition, size: Sequence[int], align_corners: bool = False) -> Array:
    """Return this worker's block of the grid of affine maps, without communication: `torch.nn.functional.affine_grid`.

    Output o of m along a dimension is at 2 o / (m - 1) - 1 with `align_corners`, and at (2 o + 1) / m - 1 without; the
    map sends it to the point that `grid_sample` reads.

    **Arguments:**

    - `theta`: the maps of this worker's samples, n x D x (D + 1): a matrix, with the offset in the last column.
      Coordinates are ordered from the last dimension to the first. Workers with the same samples pass copies, and each
      gets the gradient from its own points. Ignored outside P_x.
    - `P_x`: the partition of the output, P_n x P_c x P_{D-1} x ... x P_0.
    - `size`: the lengths of the whole output, N x C x m_{D-1} x ... x m_0.
    - `align_corners`: as in `grid_sample`. It and `size` are not compared with the other workers'.

    **Returns:** n x m_{D-1} x ... x m_0 x D, of theta's dtype, for this worker's balanced block of the output; outside
    P_x, the same with n = 0 and no points.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError` if arguments are invalid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> affine_grid(jnp.array([[[1.0, 0.0]]]), P, (1, 1, 4)).ravel().tolist()
    [-0.75, -0.25, 0.25, 0.75]
    """
    check_partitions(P_x=P_x)
    sizes, aligned, dims = checked_integers("size", size), checked_boolean("align_corners", align_corners), P_x.dim - 2
    if len(sizes) != P_x.dim or dims < 1 or min(sizes) < 0:
        raise InvalidArgumentError(
            f"`size` (={sizes}) must hold a length for each dimension of P_x ({shape_text(P_x.shape)}), which has 3 or "
            "more."
        )
    for length in sizes[2:]:
        check_length("size", sizes, length)
    theta = jnp.asarray(theta)
    if P_x.rank is None:
        return jnp.zeros((0,) * (dims + 1) + (dims,), theta.dtype)
    if theta.shape[1:] != (dims, dims + 1) or not jnp.issubdtype(theta.dtype, jnp.floating):
        raise InvalidArgumentError(
            f"`theta` (of {theta.dtype}, {shape_text(theta.shape)}) must hold floating-point matrices, n x {dims} x "
            f"{dims + 1}."
        )
    ranges = (balanced_range(m, p, i) for m, p, i in zip(sizes, P_x.shape, index_of(P_x.rank, P_x.shape), strict=True))
    lines = [_coordinates(np.arange(*own), m, aligned) for own, m in [*zip(ranges, sizes, strict=True)][2:]]
    ones = np.ones([len(line) for line in lines])
    points = np.stack([*reversed(np.meshgrid(*lines, indexing="ij")), ones], -1)
    return jnp.einsum("...j,nij->n...i", points.astype(theta.dtype), theta, precision="highest")


@dataclass(frozen=True)
class SampledPlan(BlocksPlan):
    """The plan of `grid_sample`: each worker gets the entries of x that its outputs may read.

    `fetch` moves these entries.
    """

    fetch: RangesPlan
    how: _How

    def run(self, world: World, x: Array, grid: Array) -> Array:
        """Return this worker's block of the output."""
        if world.rank not in self.blocks:
            return x
        halos, output, fetched = self.fetch.halos, self.output(world.rank), self.fetch.run(world, x)
        if output.size == 0:
            return tie(jnp.zeros(output.shape, output.dtype), fetched, grid)
        index = halos.owned.index(halos.owned.cell_of[world.rank])
        starts = [ranges[i][0] for ranges, i in zip(halos.needed[2:], index[2:], strict=True)]
        y = _sampled(fetched, grid, starts, halos.owned.extent[2:], self.how)
        return y.reshape(output.shape).astype(output.dtype)


def _planned(x: ShapeDtypes, grid: ShapeDtypes, P_x: Partition, how: _How) -> SampledPlan:
    x, grid = taking_part(x, P_x.ranks), taking_part(grid, P_x.ranks)
    owned, dtype = owned_grid("x", P_x, x), common_dtype("x", x, P_x.ranks)
    points, dims = common_dtype("grid", grid, P_x.ranks), P_x.dim - 2
    blocks: dict[int, ShapeDtype] = {}
    for worker, block in grid.items():
        if len(block.shape) != dims + 2 or (block.shape[0], block.shape[-1]) != (x[worker].shape[0], dims):
            raise PlanError(
                f"`grid` must be {x[worker].shape[0]} x lengths of {dims} feature dimensions x {dims} on worker "
                f"{worker}, whose `x` is {shape_text(x[worker].shape)}, but is {shape_text(block.shape)}."
            )
        blocks[worker] = ShapeDtype((*x[worker].shape[:2], *block.shape[1:-1]), dtype)
    if not jnp.issubdtype(points, jnp.floating):
        raise PlanError(f"`grid` must be floating, but is {points}.")
    if not jnp.issubdtype(dtype, jnp.inexact) and (how.mode != "nearest" or how.reach is not None):
        raise PlanError(
            f"`x` must be floating or complex, but is {dtype}; integers are sampled with mode 'nearest', without "
            "`max_displacement`."
        )
    outputs = owned_grid("grid", P_x, blocks)
    if prod(outputs.extent) and not prod(owned.extent):
        raise PlanError(f"`x` (of shape {shape_text(owned.extent)}) must have at least one entry to read.")
    # Where a grid points is known at run time only. So a worker fetches all that points within `reach` of its own
    # outputs can read, or everything.
    needed = list(owned.ranges)
    for d, n in enumerate(owned.extent[2:]):
        m = outputs.extent[d + 2]
        reach = None if how.reach is None else how.reach[d]
        needed[d + 2] = tuple(_reached(own, m, n, how.align_corners, reach) for own in outputs.ranges[d + 2])
    return SampledPlan(blocks, plan_ranges("grid_sample", x, P_x, Halos(owned, tuple(needed))), how)


def _reached(own: Range, m: int, n: int, align_corners: bool, reach: float | None) -> Range:
    """Return the entries, out of n, that outputs `own` out of m may read."""
    if reach is None or own[0] == own[1]:
        return (0, n) if own[0] < own[1] else (0, 0)
    ends = _coordinates(np.array([own[0], own[1] - 1]), m, align_corners)
    first, last = _place(ends, n, align_corners).tolist()
    start, stop = max(first - reach - ROUNDING, -1), min(last + reach + ROUNDING, n)  # which may be infinite
    return min(max(ceil(start) - 1, 0), n), min(max(floor(stop) + 2, 0), n)


def _coordinates(o: Any, m: int, align_corners: bool) -> Any:
    """Return the coordinates of outputs `o` out of m, from -1 to 1."""
    if align_corners:
        return o * (2 / (m - 1)) - 1 if m > 1 else np.zeros(len(o))
    return (2 * o + 1) / m - 1


def _place(coordinate: Any, n: int, align_corners: bool) -> Any:
    """Return the position of a coordinate among n entries."""
    return (coordinate + 1) / 2 * (n - 1) if align_corners else ((coordinate + 1) * n - 1) / 2


def _sampled(x: Array, grid: Array, starts: Sequence[int], extent: Sequence[int], how: _How) -> Array:
    """Return the samples, n x c x points, of the entries `x`, which start at `starts` in a tensor of `extent`."""
    lengths, wide = x.shape[2:], accumulation_dtype(np.dtype(x.dtype))
    flat = x.reshape(*x.shape[:2], -1)
    points = grid.reshape(len(grid), -1, len(extent)).astype(accumulation_dtype(np.dtype(grid.dtype)))
    sides = [
        _neighbours(_padded(_place(points[..., -1 - d], n, how.align_corners), n, how), how.mode)
        for d, n in enumerate(extent)
    ]
    parts: list[Array] = []
    beyond = jnp.zeros(points.shape[:2], bool)
    # Each point reads its 2^dims neighbours. Three things can be wrong with one: it lies outside of the tensor (it
    # counts as zero), it wasn't fetched (the result is NaN: a displacement broke the promise), or its weight is zero
    # (no matter).
    for corner in product(*sides):
        inside = fetched = jnp.ones(points.shape[:2], bool)
        at = jnp.zeros(points.shape[:2], np.int32)
        for (place, _), start, length, n in zip(corner, starts, lengths, extent, strict=True):
            local = place - start
            inside &= (place >= 0) & (place < n)
            fetched &= (local >= 0) & (local < length)
            at = at * length + jnp.clip(local, 0, length - 1).astype(np.int32)
        value = jax.vmap(lambda rows, places: rows.at[:, places].get(mode="clip"))(flat, at)
        value = jnp.where((inside & fetched)[:, None], value, 0)
        missing = inside & ~fetched
        if how.mode == "bilinear":
            weight = reduce(jnp.multiply, [part for _, part in corner])
            value, missing = value.astype(wide) * weight[:, None], missing & (weight != 0)
        parts.append(value)
        beyond |= missing
    y = reduce(jnp.add, parts)
    return y if how.reach is None else jnp.where(beyond[:, None], jnp.nan, y)


def _neighbours(place: Array, mode: str) -> list[tuple[Array, Array]]:
    """Return the entries along a dimension that are read at `place`, and their weights."""
    if mode == "nearest":
        return [(jnp.round(place), jnp.ones_like(place))]
    low = jax.lax.stop_gradient(jnp.floor(place))
    return [(low, 1 - (place - low)), (low + 1, place - low)]


def _padded(place: Array, n: int, how: _How) -> Array:
    """Return the entry that replaces a position outside of n entries."""
    if how.padding_mode == "zeros":
        return place
    if how.padding_mode == "reflection":
        low, high = (0.0, n - 1.0) if how.align_corners else (-0.5, n - 0.5)
        place = reflected(place, low, high) if low < high else jnp.zeros_like(place)
    # As in PyTorch, the derivative at the boundary is 0.
    return jnp.where(place <= 0, 0, jnp.where(place >= n - 1, n - 1, place))


def _checked(
    P_x: Partition,
    mode: str,
    padding_mode: str,
    align_corners: bool,
    max_displacement: float | Sequence[float] | None,
) -> _How:
    check_partitions(P_x=P_x)
    if P_x.dim < 3:
        raise InvalidArgumentError(
            f"`P_x` ({shape_text(P_x.shape)}) must have 3 dimensions or more: samples, channels, and features."
        )
    for name, value, accepted in (("mode", mode, MODES), ("padding_mode", padding_mode, SAMPLE_MODES)):
        if not isinstance(value, str) or value not in accepted:
            raise InvalidArgumentError(f"`{name}` (={value!r}) must be one of {', '.join(map(repr, accepted))}.")
    reach: Reach = None
    if max_displacement is not None:
        given = max_displacement if isinstance(max_displacement, Sequence | np.ndarray) else (max_displacement,)
        numbers = tuple(given) * (P_x.dim - 2 if len(given) == 1 else 1)
        if len(numbers) != P_x.dim - 2 or not all(is_real(number) and number >= 0 for number in numbers):
            raise InvalidArgumentError(
                f"`max_displacement` (={max_displacement!r}) must be a number, 0 or more, or one for each of "
                f"{P_x.dim - 2} feature dimensions."
            )
        reach = tuple(float(number) for number in numbers)
    return _How(mode, padding_mode, checked_boolean("align_corners", align_corners), reach)
