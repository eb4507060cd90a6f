"""Stencil functions of blocks with their neighbours' entries around them: `map_overlap`.

The engine is that of halo exchange: each worker asks for the range from which its block and halo are made, which at an
end of the tensor is another range than the halo itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.functional.block_checks import owned_grid
from distdl_jax.functional.halo_exchange import plan_ranges
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.decomposition import Range
from distdl_jax.plans.halos import Halos
from distdl_jax.source_lines import function_name
from distdl_jax.transforms.block_functions import BlockFunction
from distdl_jax.transports.agreement import agree, shape_dtype_of
from distdl_jax.validation import check_function, is_integer

Boundary = str | int | float | complex
"""What is around the tensor: one of `BOUNDARIES`, or a constant."""

BOUNDARIES: Final = ("none", "periodic", "reflect", "nearest")

_Depth = tuple[int, int]


def map_overlap(f: Callable[..., Any], x: Array, P: Partition, depth: Any, boundary: Any = "none") -> Any:
    """Apply a stencil function to a tensor on `P`: to each block with the neighbouring entries around it.

    With P of shape p_0 x ... x p_{D-1}, a worker that owns [a, b) of dimension d calls `f` on [a - depth, b + depth),
    and the depth is cropped from the result. So the blocks are those of the whole result, if no entry of it depends on
    entries further away than the depth. Blocks may be uneven, empty, or narrower than the depth. Of the tensor's ends,
    `boundary` says what is beyond:

        "none"        nothing: f gets less there, and nothing is cropped, as if f were called on the whole tensor
        "periodic"    ... c d | a b c d | a b ...
        "reflect"     ... b a | a b c d | d c ...    with the last entry, as in dask, cupy and scipy.ndimage
        "nearest"     ... a a | a b c d | d d ...
        a number      ... 0 0 | a b c d | 0 0 ...

    **Arguments:**

    - `f`: a function of an array of D dimensions, which moves no data. It returns an array of the same shape, of any
      dtype, or a pytree of these. Differentiable values in its closure need `dj.replicated`.
    - `x`: this worker's block. Zero-volume outside P.
    - `P`: the partition of x and of the result.
    - `depth`: the number of entries on each side, or a pair (left, right) of numbers: one for all dimensions, which
      then is an integer, a sequence with an entry for each dimension, or a dict from dimensions, with 0 elsewhere. At
      most the length of the dimension.
    - `boundary`: one of the above for all dimensions, a sequence with one for each, or a dict from dimensions, with
      "none" elsewhere. In a corner that of the later dimension counts.

    **Returns:** the block of the result; outside P, a placeholder of its dtype.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if an argument is invalid; `PlanError`,
    on every worker, if the blocks don't form a grid, `depth` is more than a dimension has, or the result of `f` has
    another shape than its argument.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def sums_of_three(x):
    ...     wide = jnp.pad(x, 1)
    ...     return wide[:-2] + wide[1:-1] + wide[2:]
    >>> def program(boundary):
    ...     P = dj.Partition().grid([2])
    ...     x = dj.TensorSpec((5,), P).block(jnp.arange(5.0))
    ...     return dj.map_overlap(sums_of_three, x, P, depth=1, boundary=boundary).tolist()
    >>> dj.simulate(2, program, "none")
    [[1.0, 3.0, 6.0], [9.0, 7.0]]
    >>> dj.simulate(2, program, "periodic")
    [[5.0, 3.0, 6.0], [9.0, 7.0]]
    >>> dj.simulate(2, program, "reflect")
    [[1.0, 3.0, 6.0], [9.0, 11.0]]

    Source: dask's `map_overlap`.
    """
    check_function("f", f)
    check_partitions(P=P)
    depths = [_checked_depth(depth, each) for each in _per_dimension("depth", depth, P.dim, 0)]
    kinds = [_checked_boundary(boundary, each) for each in _per_dimension("boundary", boundary, P.dim, "none")]

    @functools.wraps(f)
    def on_blocks(block: Array) -> Any:
        wide, starts = _widened(block, P, depths, kinds, f"map_overlap of {function_name(f)}")
        y = f(wide)
        stops = [start + n for start, n in zip(starts, block.shape, strict=True)]
        for leaf in jax.tree.leaves(y):
            if jnp.shape(leaf) != wide.shape:
                raise PlanError(
                    f"{function_name(f)} must return arrays of the shape of its argument, here {wide.shape}, but "
                    f"returns one of the shape {jnp.shape(leaf)}."
                )
        return jax.tree.map(lambda leaf: lax.slice(leaf, starts, stops), y)

    return BlockFunction(on_blocks, P)(x)


def _widened(
    block: Array, P: Partition, depths: Sequence[_Depth], kinds: Sequence[Boundary], name: str
) -> tuple[Array, list[int]]:
    """Return a worker's block with its halo, and where the block starts in it."""
    label = f"{name} on {P.describe()}, depth {tuple(depths)}, boundary {tuple(kinds)}"
    shape_dtypes = agree(P.world, P.ranks, label, lambda: shape_dtype_of("x", block))
    owned = owned_grid("x", P, shape_dtypes)
    needed = []
    for d, (n, pair, kind) in enumerate(zip(owned.extent, depths, kinds, strict=True)):
        if max(pair) > n:
            raise PlanError(f"`depth` (={pair}) must be at most {n} in dimension {d}, the length of `x` there.")
        needed.append(tuple(_source_range(_wide_range(own, pair, n, kind), n, kind) for own in owned.ranges[d]))
    halos = Halos(owned, tuple(needed), tuple(kind == "periodic" for kind in kinds))
    wide = plan_ranges("map_overlap", shape_dtypes, P, halos).run(P.world, block)
    starts = []
    for d, i in enumerate(owned.index(owned.cell_of[P.world.rank])):
        n, own, kind = owned.extent[d], owned.ranges[d][i], kinds[d]
        start, stop = _wide_range(own, depths[d], n, kind)
        starts.append(own[0] - start)
        # What lies beyond the tensor mirrors entries within it, which have come with the halo: no further message.
        if kind in ("reflect", "nearest"):
            wide = jnp.take(wide, _sources(start, stop, n, kind) - needed[d][i][0], axis=d, mode="clip")
        elif not isinstance(kind, str):
            beyond = [(0, 0)] * P.dim
            beyond[d] = max(-start, 0), max(stop - n, 0)
            wide = jnp.pad(wide, beyond, constant_values=_constant(kind, wide.dtype))
    return wide, starts


def _wide_range(own: Range, pair: _Depth, n: int, kind: Boundary) -> Range:
    """Return the range that `f` sees, which may reach beyond the tensor."""
    start, stop = own[0] - pair[0], own[1] + pair[1]
    return (max(start, 0), min(stop, n)) if kind == "none" else (start, stop)


def _source_range(wide: Range, n: int, kind: Boundary) -> Range:
    """Return the range of the tensor, around it if periodic, from which a worker makes what `f` sees."""
    start, stop = wide
    if kind in ("reflect", "nearest") and start < stop:
        sources = _sources(start, stop, n, kind)
        return int(sources.min()), int(sources.max()) + 1
    return wide if kind == "periodic" else (min(max(start, 0), n), min(max(stop, 0), n))


def _sources(start: int, stop: int, n: int, kind: Boundary) -> np.ndarray:
    """Return the entry of the tensor that is at each place from `start` to `stop`."""
    places = np.arange(start, stop)
    if kind == "nearest":
        return np.clip(places, 0, n - 1)
    return np.where(places < 0, -1 - places, np.where(places >= n, 2 * n - 1 - places, places))


def _constant(value: Any, dtype: np.dtype) -> Any:
    """Return a boundary's number; refuse one that the tensor's dtype can't hold."""
    held = jnp.issubdtype(dtype, jnp.complexfloating) or (
        jnp.issubdtype(dtype, jnp.floating) and not isinstance(value, complex)
    )
    if jnp.issubdtype(dtype, jnp.integer) and is_integer(value):
        held = jnp.iinfo(dtype).min <= value <= jnp.iinfo(dtype).max
    if not held:
        raise InvalidArgumentError(f"`boundary` (={value!r}) must be a number that `x`, of {dtype}, can hold.")
    return value


def _per_dimension(name: str, value: Any, dim: int, default: Any) -> list[Any]:
    """Return an argument's entry for each dimension, from a dict, a sequence, or one for all of them."""
    if isinstance(value, Mapping):
        if not all(is_integer(d) and -dim <= d < dim for d in value):
            raise InvalidArgumentError(
                f"`{name}` (={value!r}) must have dimensions from {-dim} to {dim - 1} as its keys."
            )
        by_dimension = {d % dim: entry for d, entry in value.items()}
        return [by_dimension.get(d, default) for d in range(dim)]
    if isinstance(value, list | tuple):
        if len(value) != dim:
            raise InvalidArgumentError(f"`{name}` (={value!r}) must have {dim} entries, one for each dimension of P.")
        return list(value)
    return [value] * dim


def _checked_depth(depth: Any, entry: Any) -> _Depth:
    pair = tuple(entry) if isinstance(entry, list | tuple) else (entry, entry)
    if not all(map(is_integer, pair)):
        raise InvalidTypeError(f"`depth` (={depth!r}) must be integers, or pairs (left, right) of integers.")
    if len(pair) != 2 or min(pair) < 0:
        raise InvalidArgumentError(f"`depth` (={depth!r}) must be integers, or pairs (left, right), 0 or more.")
    return int(pair[0]), int(pair[1])


def _checked_boundary(boundary: Any, entry: Any) -> Boundary:
    if isinstance(entry, np.number):
        entry = entry.item()
    if not isinstance(entry, str | int | float | complex) or isinstance(entry, bool):
        raise InvalidTypeError(
            f"`boundary` (={boundary!r}) must be a string or a number, one for all dimensions or each."
        )
    if isinstance(entry, str) and entry not in BOUNDARIES:
        raise InvalidArgumentError(f"`boundary` (={boundary!r}) must be one of {', '.join(BOUNDARIES)}, or a number.")
    return entry
