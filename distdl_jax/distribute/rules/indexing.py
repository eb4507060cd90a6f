"""Rules of rows by number: gather, scatter, and slices whose start is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from distdl_jax.distribute.interpreter import LINEAR, Site, rule
from distdl_jax.distribute.layouts import Axes
from distdl_jax.distribute.tensors import Tensor

LINEAR["gather"] = lambda site: (0,)


@rule("gather")
def gather(site: Site, x: Tensor, indices: Tensor) -> Tensor:
    """Dimensions that pass whole stay cut, and so do those of the indices; indexed ones are made whole."""
    numbers, sizes = site.params["dimension_numbers"], list(site.params["slice_sizes"])
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    windowed = [d for d in range(len(x.shape)) if d not in gone]
    through = {d: o for d, o in zip(windowed, numbers.offset_dims, strict=True) if sizes[d] == x.shape[d]}
    # Even if all of it is taken: where the slice starts is computed, and clamped by the whole length.
    through = {d: o for d, o in through.items() if d not in numbers.start_index_map}
    batch = [o for o in range(len(site.shape)) if o not in numbers.offset_dims]  # of the result, as in the indices
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    of_x, of_indices = x.natural(), indices.natural()
    wishes = [(o, of_x[d], x.size) for d, o in through.items()]
    wishes += [(batch[k], of_x[d], x.size) for d, k in paired.items()]
    wishes += [(batch[k], of_indices[k], indices.size) for k in range(len(batch))]
    granted = site.claim(wishes)
    own: list[Axes] = [()] * len(x.shape)
    for d, o in through.items():
        own[d] = granted.get(o, ())
    for d, k in paired.items():
        own[d] = granted.get(batch[k], ())
    block = x.at(own)
    for d in through:
        sizes[d] = block.shape[d]
    rows = indices.at([*(granted.get(o, ()) for o in batch), ()])
    y = site.bind(block, rows, slice_sizes=tuple(sizes))
    return site.value(y, [granted.get(o, ()) for o in range(len(site.shape))])


@rule(
    *("scatter", "scatter_add", "scatter-add", "scatter_mul", "scatter-mul", "scatter_min", "scatter-min"),
    *("scatter_max", "scatter-max", "scatter_sub", "scatter-sub"),
)
def scatter(site: Site, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Dimensions that pass whole stay cut. Cut updates that are added leave terms of a sum."""
    numbers = site.params["dimension_numbers"]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windowed = [d for d in range(len(x.shape)) if d not in gone]
    pairs = zip(windowed, numbers.update_window_dims, strict=True)
    through = {d: u for d, u in pairs if x.shape[d] == updates.shape[u]}
    through = {d: u for d, u in through.items() if d not in numbers.scatter_dims_to_operand_dims}
    batch = [u for u in range(len(updates.shape)) if u not in numbers.update_window_dims]
    paired = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    of_x, of_updates, of_indices = x.natural(), updates.natural(), indices.natural()
    # Updates that are set, multiplied or compared must all be there, in their order: only what passes stays cut.
    wishes: list[tuple[Any, Axes, int]] = [(d, of_x[d], x.size) for d in (*through, *paired)]
    wishes += [(d, of_updates[u], updates.size) for d, u in through.items()]
    wishes += [(d, of_updates[batch[k]], updates.size) for d, k in paired.items()]
    if site.name in ("scatter-add", "scatter_add"):
        free = [(k, u) for k, u in enumerate(batch) if k not in paired.values()]
        wishes += [(("update", k), of_updates[u], updates.size) for k, u in free]
        wishes += [(("update", k), of_indices[k], indices.size) for k, _ in free]
    granted = site.claim(wishes)
    own = [granted.get(d, ()) if d in through or d in paired else () for d in range(len(x.shape))]
    of_batch: list[Axes] = [granted.get(("update", k), ()) for k in range(len(batch))]
    for d, k in paired.items():
        of_batch[k] = granted.get(d, ())
    wanted: list[Axes] = [()] * len(updates.shape)
    for d, u in through.items():
        wanted[u] = granted.get(d, ())
    for k, u in enumerate(batch):
        wanted[u] = of_batch[k]
    pending = frozenset(a for k in range(len(batch)) for a in granted.get(("update", k), ()))
    # The operand counts once: it is the first worker's term, to which each adds its own updates.
    block = x.terms(tuple(own), pending) if pending else x.at(own)
    return site.value(site.bind(block, indices.at([*of_batch, ()]), updates.at(wanted)), own, pending)


@rule("dynamic_slice")
def dynamic_slice(site: Site, x: Tensor, *starts: Tensor) -> Tensor:
    """Dimensions that are taken whole stay cut; the others are made whole."""
    sizes = list(site.params["slice_sizes"])
    cut = x.whole_along([d for d, n in enumerate(sizes) if n != x.shape[d]])
    block = x.at(cut)
    sizes = [block.shape[d] if n == x.shape[d] else n for d, n in enumerate(sizes)]
    return site.value(site.bind(block, *_starts(starts), slice_sizes=tuple(sizes)), cut)


@rule("dynamic_update_slice")
def dynamic_update_slice(site: Site, x: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
    """Dimensions that are replaced whole stay cut; the others are made whole."""
    partly = [d for d, n in enumerate(update.shape) if n != x.shape[d]]
    wishes = [(d, axes, v.size) for v in (x, update) for d, axes in enumerate(v.natural()) if d not in partly]
    granted = site.claim(wishes)
    cut = [granted.get(d, ()) for d in range(len(x.shape))]
    return site.value(site.bind(x.at(cut), update.at(cut), *_starts(starts)), cut)


def _starts(starts: Sequence[Tensor]) -> list[Any]:
    """Return the starts in 32 bits at least: XLA clamps narrow ones wrongly."""
    whole = [start.whole() for start in starts]
    return [x.astype(jnp.int32) if jnp.iinfo(x.dtype).bits < 32 else x for x in map(jnp.asarray, whole)]


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
