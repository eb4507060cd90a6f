"""Rules of rows by number: gather and scatter. Where an indexed dimension is cut, its owners answer.

Numbers count the rows of the whole array, and so does the check whether they are in bounds. Each worker takes its own
rows, and zeros in place of others: the results are terms of a sum. Updates are applied by the owner of their row, in
their order. Numbers that are known while JAX traces are read as slices, or make a plan of which rows to send.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from distdl_jax.distribute.interpreter import LINEAR, Site, rule
from distdl_jax.distribute.layouts import Axes, Cut, axes_in, trimmed
from distdl_jax.distribute.rules.rows import add_known_rows, known_window, one_window, put_window, take_known_rows
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.tracing.tie import tie

DROP = GatherScatterMode.FILL_OR_DROP


def _unless_filled_or_larger(site: Site) -> Sequence[int]:
    """A sum settles before its rows are filled, which would count the fill for each term, or enlarged."""
    params, x = site.params, site.eqn.invars[0].aval
    filled = params["mode"] == DROP and params["fill_value"] != 0
    return () if filled or math.prod(site.shape) > x.size else (0,)


def _unless_enlarged(site: Site) -> Sequence[int]:
    """A sum of few updates settles before it is added to a large operand."""
    return (0, 2) if site.eqn.invars[2].aval.size >= math.prod(site.shape) else ()


LINEAR["gather"] = _unless_filled_or_larger
LINEAR |= dict.fromkeys(("scatter-add", "scatter_add"), _unless_enlarged)


def sum_is_cheaper(site: Site, x: Tensor, dims: Sequence[int], size: int) -> bool:
    """Say whether to sum a result of `size` elements over the owners, instead of making `dims` of `x` whole."""
    natural, whole = x.natural(), x.whole_along(dims)
    moving = {a for d in dims for a in natural[d]}
    if not moving or x.is_lazy or not isinstance(x.dtype, np.dtype):
        return False
    if axes_in(natural) - axes_in(whole):  # x would be gathered
        return site.is_too_large(x) or 2 * size <= x.size
    return 2 * size * site.mesh.size(moving) <= x.size


@rule("gather")
def gather(site: Site, x: Tensor, indices: Tensor) -> Tensor:
    """Dimensions that pass whole stay cut, and so do those of the indices; the owners' rows are summed."""
    numbers, sizes = site.params["dimension_numbers"], list(site.params["slice_sizes"])
    if (known := _known_gather(site, x, indices)) is not None:
        return known
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    windowed = [d for d in range(len(x.shape)) if d not in gone]
    through = {d: o for d, o in zip(windowed, numbers.offset_dims, strict=True) if sizes[d] == x.shape[d]}
    # Even if all of it is taken: where the slice starts is computed, and clamped by the whole length.
    through = {d: o for d, o in through.items() if d not in numbers.start_index_map}
    batch = [o for o in range(len(site.shape)) if o not in numbers.offset_dims]  # of the result, as in the indices
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    partly = [d for d in range(len(x.shape)) if d not in through and d not in paired]
    summed = sum_is_cheaper(site, x, numbers.start_index_map, math.prod(site.shape))
    of_x, of_indices = x.natural() if summed else x.whole_along(partly), indices.natural()
    wishes: list[tuple[Any, Axes, int]] = [(o, of_x[d], x.size) for d, o in through.items()]
    wishes += [(batch[k], of_x[d], x.size) for d, k in paired.items()]
    wishes += [(batch[k], of_indices[k], indices.size) for k in range(len(batch))]
    if summed:
        wishes += [(("row", d), of_x[d], x.size) for d in numbers.start_index_map]
    granted = site.claim(wishes)
    own: list[Axes] = [granted.get(("row", d), ()) for d in range(len(x.shape))]
    for d, o in through.items():
        own[d] = granted.get(o, ())
    for d, k in paired.items():
        own[d] = granted.get(batch[k], ())
    rows = indices.at([*(granted.get(o, ()) for o in batch), ()])
    out = [granted.get(o, ()) for o in range(len(site.shape))]
    cut = trimmed(own, x.shape)
    block = x.at(cut)
    for d in through:
        sizes[d] = block.shape[d]
    owned = [d for d in partly if cut[d]]
    if not owned:
        return site.value(site.bind(block, rows, slice_sizes=tuple(sizes)), out)
    y = _own_rows(site, (x, cut, owned), rows, sizes, batch)
    return site.value(y, out, [a for d in owned for a in cut[d]])


def _own_rows(
    site: Site, of_x: tuple[Tensor, Cut, Sequence[int]], rows: Any, sizes: Sequence[int], batch: Sequence[int]
) -> Any:
    """Return this worker's entries of the rows, and zeros in place of other workers'."""
    x, cut, owned = of_x
    numbers, mode = site.params["dimension_numbers"], site.params["mode"]
    rows, is_valid = in_bounds(rows, [x.shape[d] - sizes[d] for d in numbers.start_index_map])
    block, first = _widened(site, x, cut, owned, sizes)
    local = rows - jnp.asarray([first[d] for d in numbers.start_index_map], rows.dtype)
    y = site.bind(block, local, slice_sizes=tuple(sizes), mode=DROP, fill_value=0, indices_are_sorted=False)
    if mode != DROP:
        return y
    fill = _fill_of(site) if site.mesh.is_first(a for d in owned for a in cut[d]) else 0
    shown = lax.broadcast_in_dim(is_valid, y.shape, batch)
    return jnp.where(shown, y, jnp.asarray(fill, y.dtype))


def _widened(site: Site, x: Tensor, cut: Cut, owned: Sequence[int], sizes: Sequence[int]) -> tuple[Any, dict[int, int]]:
    """Return this worker's block with zeros around it, so that no window lies partly in it; and where it begins.

    Both along dimensions of the whole array.
    """
    block, box = x.at(cut), site.mesh.box(cut, x.shape)
    width = {d: max(sizes[d] - 1, 0 if block.shape[d] else 1) if d in owned else 0 for d in range(len(x.shape))}
    first = {d: (box[d][0] if d in owned else 0) - width[d] for d in width}
    if any(width.values()):
        block = lax.pad(block, jnp.zeros((), block.dtype), [(n, n, 0) for n in width.values()])
    return block, first


def in_bounds(rows: Any, last: Sequence[int]) -> tuple[Any, Any]:
    """Return row numbers, clamped to 0 ... last, in 32 bits at least, and whether they were all in bounds."""
    rows = as_wide(rows)
    clamped = jnp.clip(rows, 0, jnp.asarray(last, rows.dtype))
    return clamped, jnp.all(clamped == rows, axis=-1)


def as_wide(numbers: Any) -> Any:
    """Return numbers as int32 or int64: narrow ones can't count a long dimension, unsigned ones have no sign."""
    numbers = jnp.asarray(numbers)
    wide = np.dtype(jnp.int64 if numbers.dtype.itemsize == 8 else jnp.int32)
    largest = jnp.iinfo(wide).max
    if jnp.iinfo(numbers.dtype).max > largest:
        numbers = jnp.minimum(numbers, jnp.asarray(largest, numbers.dtype))
    return numbers.astype(wide)


def _fill_of(site: Site) -> Any:
    """Return the value of rows that are out of bounds."""
    fill, dtype = site.params["fill_value"], site.outs[0].dtype
    if fill is not None:
        return fill
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if dtype == np.bool_:
        return True
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max


def _known_gather(site: Site, x: Tensor, indices: Tensor) -> Tensor | None:
    """Return the rows of a cut dimension whose numbers are known; None if they aren't, or are out of bounds."""
    numbers, sizes = site.params["dimension_numbers"], site.params["slice_sizes"]
    indexed = numbers.start_index_map
    natural = x.natural()
    if numbers.operand_batching_dims or x.is_lazy or not any(natural[d] for d in indexed):
        return None
    rows = indices.known()
    if rows is None or not rows.size:
        return None
    last = [x.shape[d] - sizes[d] for d in indexed]
    if site.params["mode"] != DROP:
        rows = np.clip(rows, 0, last)
    if (rows < 0).any() or (rows > last).any():
        return None
    if (starts := one_window(rows)) is not None:
        return known_window(site, x, dict(zip(indexed, starts, strict=True)), sizes, numbers.offset_dims)
    return take_known_rows(site, x, rows)


_ADDS = ("scatter-add", "scatter_add")


@rule(
    *("scatter", "scatter_add", "scatter-add", "scatter_mul", "scatter-mul", "scatter_min", "scatter-min"),
    *("scatter_max", "scatter-max", "scatter_sub", "scatter-sub"),
)
def scatter(site: Site, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Dimensions that pass whole stay cut. Owners apply the updates of their rows; cut ones that are added leave terms.

    All updates are on each owner, in their order: which of two for the same row counts is the single process's choice.
    """
    if (known := _known_scatter(site, x, indices, updates)) is not None:
        return known
    numbers = site.params["dimension_numbers"]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windowed = [d for d in range(len(x.shape)) if d not in gone]
    pairs = dict(zip(windowed, numbers.update_window_dims, strict=True))
    owned = numbers.scatter_dims_to_operand_dims
    through = {d: u for d, u in pairs.items() if x.shape[d] == updates.shape[u] and d not in owned}
    batch = [u for u in range(len(updates.shape)) if u not in numbers.update_window_dims]
    paired = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    granted = _granted_to_scatter(site, (x, indices, updates), through, paired, batch)
    if x.is_lazy and not site.wants_whole and site.is_too_large(x):
        _spread(site, x, [*through, *owned], granted)
    own = trimmed([granted.get(d, ()) for d in range(len(x.shape))], x.shape)
    of_batch: list[Axes] = [granted.get(("update", k), ()) for k in range(len(batch))]
    for d, k in paired.items():
        of_batch[k] = granted.get(d, ())
    wanted: list[Axes] = [()] * len(updates.shape)
    for d, u in through.items():
        wanted[u] = granted.get(d, ())
    for k, u in enumerate(batch):
        wanted[u] = of_batch[k]
    arrays = indices.at([*of_batch, ()]), updates.at(wanted)
    pending = frozenset(a for k in range(len(batch)) for a in granted.get(("update", k), ()))
    sizes = [updates.shape[pairs[d]] if d in pairs else 1 for d in range(len(x.shape))]
    of_x = x.natural()
    if x.is_lazy or not pending & axes_in(of_x):
        return site.value(_by_owners(site, (x, own, owned, sizes), *arrays, pending), own, pending)

    def none(cut: Cut) -> Any:
        return jnp.zeros(site.mesh.block_shape(cut, x.shape), x.dtype)

    # The updates are larger than x, and cut along its axes: their sum is scattered to its blocks.
    zeros = Tensor(x.movements, x.shape, x.dtype, own, make=none)
    total = site.value(_by_owners(site, (zeros, own, owned, sizes), *arrays, pending), own, pending)
    return site.value(x.at(of_x) + total.at(of_x), of_x)


def _granted_to_scatter(
    site: Site,
    operands: tuple[Tensor, Tensor, Tensor],
    through: Mapping[int, int],
    paired: Mapping[int, int],
    batch: Sequence[int],
) -> dict[Any, Axes]:
    """Return which axes cut the operand's dimensions, and, of updates that are added, the dimensions of the rows."""
    x, indices, updates = operands
    of_x, of_updates, of_indices = x.natural(), updates.natural(), indices.natural()
    owned = site.params["dimension_numbers"].scatter_dims_to_operand_dims
    wishes: list[tuple[Any, Axes, int]] = [
        (d, of_x[d], 0 if x.is_lazy else x.size) for d in (*through, *paired, *owned)
    ]
    wishes += [(d, of_updates[u], updates.size) for d, u in through.items()]
    wishes += [(d, of_updates[batch[k]], updates.size) for d, k in paired.items()]
    if site.name in _ADDS:
        free = [(k, u) for k, u in enumerate(batch) if k not in paired.values()]
        wishes += [(("update", k), of_updates[u], updates.size) for k, u in free]
        wishes += [(("update", k), of_indices[k], indices.size) for k, _ in free]
    return site.claim(wishes)


def _spread(site: Site, x: Tensor, dims: Sequence[int], granted: dict[Any, Axes]) -> None:
    """Grant the axes that cut nothing to the longest dimension of `dims`: no worker makes the whole result."""
    free = tuple(sorted(site.mesh.axes - {a for axes in granted.values() for a in axes}))
    long = [d for d in dims if not granted.get(d) and x.shape[d] >= site.mesh.size(free)]
    if free and long:
        granted[max(long, key=lambda d: x.shape[d])] = free


def _by_owners(
    site: Site,
    of_x: tuple[Tensor, Cut, Sequence[int], Sequence[int]],
    rows: Any,
    updates: Any,
    pending: frozenset[int],
) -> Any:
    """Return this worker's block after the updates of its rows; `x` is the first term of a pending sum."""
    x, cut, indexed, sizes = of_x
    numbers, mode = site.params["dimension_numbers"], site.params["mode"]
    owned = [d for d in indexed if cut[d]]
    if pending:
        x = Tensor(x.movements, x.shape, x.dtype, cut, x.terms(cut, pending))
    if not owned:
        return site.bind(x.at(cut), rows, updates)
    if 0 in x.at(cut).shape:
        return tie(x.at(cut), updates)
    rows, is_valid = in_bounds(rows, [x.shape[d] - sizes[d] for d in numbers.scatter_dims_to_operand_dims])
    block, first = _widened(site, x, cut, owned, sizes)
    local = rows - jnp.asarray([first[d] for d in numbers.scatter_dims_to_operand_dims], rows.dtype)
    if mode != GatherScatterMode.CLIP:
        local = jnp.where(is_valid[..., None], local, -1)
    y = site.bind(block, local, updates, mode=DROP, indices_are_sorted=False)
    starts = [-first[d] + site.mesh.box(cut, x.shape)[d][0] if d in owned else 0 for d in range(y.ndim)]
    shape = site.mesh.block_shape(cut, x.shape)
    return lax.slice(y, starts, [start + n for start, n in zip(starts, shape, strict=True)])


def _known_scatter(site: Site, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor | None:
    """Return the result for rows whose numbers are known, in bounds; None if another way is to be taken."""
    numbers = site.params["dimension_numbers"]
    indexed = numbers.scatter_dims_to_operand_dims
    if numbers.operand_batching_dims or not (any(x.natural()) or any(updates.natural())):
        return None
    rows = indices.known()
    if rows is None or not rows.size or site.params.get("update_consts"):
        return None
    windowed = [d for d in range(len(x.shape)) if d not in numbers.inserted_window_dims]
    pairs = dict(zip(windowed, numbers.update_window_dims, strict=True))
    sizes = [updates.shape[pairs[d]] if d in pairs else 1 for d in range(len(x.shape))]
    last = [x.shape[d] - sizes[d] for d in indexed]
    if site.params["mode"] == GatherScatterMode.CLIP:
        rows = np.clip(rows, 0, last)
    if (rows < 0).any() or (rows > last).any():
        return None
    if (starts := one_window(rows)) is not None:
        return put_window(site, x, updates, dict(zip(indexed, starts, strict=True)), pairs)
    return add_known_rows(site, x, rows, updates) if site.name in _ADDS else None


@rule("SearchSorted", "searchsorted")
def searchsorted(site: Site, x: Tensor, wanted: Tensor) -> Tensor:
    """The values are looked up in the whole sorted array."""
    if site.params.get("batch_dims") or site.params.get("dimension"):
        (result,) = site.run.whole(site, x, wanted, why="in batches has no rule for blocks")
        return result
    options = {name: site.params[name] for name in ("side", "method")}
    cut = wanted.natural()
    y = jnp.searchsorted(x.whole(), wanted.at(cut), **options)
    return site.value(y.astype(site.outs[0].dtype), cut)
