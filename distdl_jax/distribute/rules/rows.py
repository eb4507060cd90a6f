"""Rows whose numbers are known while JAX traces: slices, and plans of which rows to send to whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from distdl_jax.distribute.interpreter import Site
from distdl_jax.distribute.layouts import Axes, trimmed
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.distribute.views import mapped, rearranged
from distdl_jax.functional.rows import Rows
from distdl_jax.functional.take import plan_segment_sum, plan_take


def one_window(rows: np.ndarray) -> list[int] | None:
    """Return where the only window starts; None if there are several."""
    return [int(n) for n in rows.ravel()] if prod(rows.shape[:-1]) == 1 else None


def known_window(
    site: Site, x: Tensor, starts: Mapping[int, int], sizes: Sequence[int], offset_dims: Sequence[int]
) -> Tensor:
    """Return a window of x, with the dimensions of a gather's result: a slice."""
    gone = site.params["dimension_numbers"].collapsed_slice_dims
    windowed = iter(d for d in range(len(x.shape)) if d not in gone)
    dims = [next(windowed) if o in offset_dims else None for o in range(len(site.shape))]
    part = mapped(x, lambda index_map, d: index_map.sliced(starts.get(d, 0), starts.get(d, 0) + sizes[d]))
    return renumbered(part, dims)


def renumbered(x: Tensor, dims: Sequence[int | None]) -> Tensor:
    """Return x with dimension i its dimension `dims[i]`, or a new one of length 1; those left out have length 1."""
    if (view := rearranged(x, dims)) is not None:
        return view
    cut = x.natural()
    block = x.at(cut)
    shape = [1 if d is None else x.shape[d] for d in dims]
    after = trimmed([() if d is None else cut[d] for d in dims], shape)
    return Tensor(x.movements, shape, x.dtype, after, block.reshape([1 if d is None else block.shape[d] for d in dims]))


_COMBINED: dict[str, Any] = {
    "scatter": lambda x, y: y,
    "scatter-add": lax.add,
    "scatter-mul": lax.mul,
    "scatter-min": lax.min,
    "scatter-max": lax.max,
    "scatter-sub": lax.sub,
}


def put_window(
    site: Site, x: Tensor, updates: Tensor, starts: Mapping[int, int], pairs: Mapping[int, int]
) -> Tensor | None:
    """Return x with a window of it set, added to or the like: where the window is, each worker reads its updates."""
    combined = _COMBINED.get(site.name.replace("_", "-"))
    if combined is None or not isinstance(x.dtype, np.dtype):
        return None
    placed = renumbered(updates, [pairs.get(d) for d in range(len(x.shape))])
    ends = {d: (starts.get(d, 0), starts.get(d, 0) + n) for d, n in enumerate(placed.shape)}
    padded = mapped(placed, lambda index_map, d: index_map.padded(ends[d][0], x.shape[d] - ends[d][1]), 0)
    wishes = [(d, axes, 0 if x.is_lazy else x.size) for d, axes in enumerate(x.natural())]
    wishes += [(d, axes, updates.size) for d, axes in enumerate(padded.natural())]
    granted = site.claim(wishes)
    cut = trimmed([granted.get(d, ()) for d in range(len(x.shape))], x.shape)
    block, new = x.at(cut), padded.at(cut)
    inside: Any = True
    for d, (start, stop) in enumerate(site.mesh.box(cut, x.shape)):
        if ends[d] != (0, x.shape[d]):
            number = jnp.arange(start, stop).reshape([-1 if e == d else 1 for e in range(len(x.shape))])
            inside = inside & (number >= ends[d][0]) & (number < ends[d][1])
    return site.value(jnp.where(inside, combined(block, new), block), cut)


def take_known_rows(site: Site, x: Tensor, rows: np.ndarray) -> Tensor | None:
    """Return whole rows of x by a plan; None if they are parts of rows, or lie elsewhere in the result."""
    numbers, sizes, natural = site.params["dimension_numbers"], site.params["slice_sizes"], x.natural()
    batch = rows.shape[:-1]
    if (d := _of_rows(numbers.start_index_map, numbers.collapsed_slice_dims)) is None:
        return None
    others = [e for e in range(len(x.shape)) if e != d]
    if any(sizes[e] != x.shape[e] for e in others) or numbers.offset_dims != _around(d, len(batch), len(x.shape)):
        return None
    of_batch: list[Axes] = [()] * len(batch)
    of_batch[_longest(batch, site.mesh.size(natural[d]))] = natural[d]
    after = trimmed((*natural[:d], *of_batch, *natural[d + 1 :]), site.shape)
    blocks = site.movements.blocks(natural, x.shape, x.dtype)
    mesh = site.mesh
    plan = plan_take(blocks, mesh.partition(natural), Rows(rows[..., 0]), d, mesh.partition(after))
    return site.value(site.movements.run(plan, x.at(natural), "rows", x.shape, natural, after), after)


def add_known_rows(site: Site, x: Tensor, rows: np.ndarray, updates: Tensor) -> Tensor | None:
    """Return x with cut updates added to its rows, which their owners get the sums of; None for another way."""
    numbers, natural, mesh = site.params["dimension_numbers"], updates.natural(), site.mesh
    batch = rows.shape[:-1]
    if (d := _of_rows(numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims)) is None:
        return None
    others = [e for e in range(len(x.shape)) if e != d]
    window = _around(d, len(batch), len(x.shape))
    if numbers.update_window_dims != window or [updates.shape[u] for u in window] != [x.shape[e] for e in others]:
        return None
    cuts = [axes for axes in natural[d : d + len(batch)] if axes]
    if len(cuts) != 1 or x.shape[d] == 1:
        return None
    falls_cut = x.is_lazy and not site.wants_whole and x.shape[d] >= mesh.size(cuts[0])
    if x.natural()[d] != cuts[0] and not falls_cut:
        return None
    after = trimmed((*natural[:d], cuts[0], *natural[d + len(batch) :]), x.shape)
    blocks = site.movements.blocks(natural, updates.shape, updates.dtype)
    partitions = mesh.partition(natural), mesh.partition(after)
    plan = plan_segment_sum(blocks, partitions[0], Rows(rows[..., 0]), x.shape[d], d, partitions[1])
    total = site.movements.run(plan, updates.at(natural), "sums of rows", updates.shape, natural, after)
    return site.value(x.at(after) + total, after)


def _of_rows(indexed: Sequence[int], gone: Sequence[int]) -> int | None:
    """Return the dimension that is indexed, if it is the only one, and isn't in the windows."""
    return indexed[0] if len(indexed) == 1 and tuple(gone) == tuple(indexed) else None


def _around(d: int, batch: int, dims: int) -> tuple[int, ...]:
    """Return the dimensions of rows, if `batch` dimensions stand in place of dimension d."""
    return (*range(d), *range(d + batch, dims - 1 + batch))


def _longest(lengths: Sequence[int], p: int) -> int:
    """Return the first dimension that is long enough for p blocks, or the longest."""
    return next((k for k, n in enumerate(lengths) if n >= p), max(range(len(lengths)), key=lambda k: lengths[k]))
