"""Rules of windows whose start is computed: dynamic_slice and dynamic_update_slice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from distdl_jax.distribute.interpreter import Site, rule
from distdl_jax.distribute.layouts import Axes, Cut, trimmed
from distdl_jax.distribute.rules.indexing import as_wide, sum_is_cheaper
from distdl_jax.distribute.rules.rows import put_window
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.distribute.views import mapped
from distdl_jax.tracing.tie import tie


class _Overlap(NamedTuple):
    """A piece of this worker's block that holds all its entries of a window, along one dimension.

    - `length`: of the piece. `first`: where it begins in the block, and `place`: in the window, which may lie outside
      of it, on either side.
    """

    length: int
    first: Any
    place: Any


def _overlaps(
    site: Site, cut: Cut, shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Any]
) -> list[_Overlap]:
    """Return the piece along each dimension; the starts are clamped by the lengths of the whole array."""
    found = []
    for (low, high), n, size, start in zip(site.mesh.box(cut, shape), shape, sizes, starts, strict=True):
        own, length = high - low, min(size, high - low)
        begin = jnp.clip(start, 0, n - size) - low
        first = jnp.clip(begin, 0, own - length)
        found.append(_Overlap(length, first, jnp.clip(first - begin, -length, size)))
    return found


def _known(starts: Sequence[Tensor]) -> list[int] | None:
    """Return the starts, if they are known while JAX traces."""
    values = [start.known() for start in starts]
    return None if any(value is None for value in values) else [int(value) for value in values]  # type: ignore[arg-type]


def _arrays(starts: Sequence[Tensor]) -> list[Any]:
    """Return the starts in 32 bits at least: XLA clamps narrow ones wrongly."""
    return [as_wide(start.whole()) for start in starts]


@rule("dynamic_slice")
def dynamic_slice(site: Site, x: Tensor, *starts: Tensor) -> Tensor:
    """Dimensions that are taken whole stay cut. Of others, the owners' entries are summed, or they are made whole."""
    sizes = list(site.params["slice_sizes"])
    partly = [d for d, n in enumerate(sizes) if n != x.shape[d]]
    if any(x.natural()[d] for d in partly) and (known := _known(starts)) is not None:
        begin = [min(max(start, 0), n - size) for start, n, size in zip(known, x.shape, sizes, strict=True)]
        return mapped(x, lambda index_map, d: index_map.sliced(begin[d], begin[d] + sizes[d]))
    summed = sum_is_cheaper(site, x, partly, math.prod(sizes))
    cut = x.natural() if summed else x.whole_along(partly)
    block, owned = x.at(cut), [d for d in partly if cut[d]]
    out: list[Axes] = [() if d in owned else axes for d, axes in enumerate(cut)]
    after = site.mesh.block_shape(trimmed(out, site.shape), site.shape)
    if not owned:
        return site.value(site.bind(block, *_arrays(starts), slice_sizes=after), out)
    pending = [a for d in owned for a in cut[d]]
    if 0 in block.shape:
        return site.value(tie(jnp.zeros(after, block.dtype), block), out, pending)
    parts = _overlaps(site, cut, x.shape, sizes, _arrays(starts))
    parts = [
        _whole_part(part, n) if d not in partly else part for d, (part, n) in enumerate(zip(parts, after, strict=True))
    ]
    piece = lax.dynamic_slice(block, [part.first for part in parts], [part.length for part in parts])
    # The piece is put in its place in the window; what lies outside of it is on the margins.
    margins = [part.length if d in owned else 0 for d, part in enumerate(parts)]
    wide = jnp.zeros([n + 2 * margin for n, margin in zip(after, margins, strict=True)], block.dtype)
    places = [part.place + margin for part, margin in zip(parts, margins, strict=True)]
    y = lax.dynamic_update_slice(wide, piece, places)
    return site.value(lax.slice(y, margins, [m + n for m, n in zip(margins, after, strict=True)]), out, pending)


def _whole_part(part: _Overlap, n: int) -> _Overlap:
    zero = jnp.zeros_like(part.first)
    return _Overlap(n, zero, zero)


@rule("dynamic_update_slice")
def dynamic_update_slice(site: Site, x: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
    """Each worker takes what falls into its block of x; dimensions that are replaced whole stay cut in the update."""
    partly = [d for d, n in enumerate(update.shape) if n != x.shape[d]]
    same = {d: d for d in range(len(x.shape))}
    if any(v.natural()[d] for v in (x, update) for d in partly) and (known := _known(starts)) is not None:
        begin = {d: min(max(known[d], 0), x.shape[d] - n) for d, n in enumerate(update.shape)}
        if (result := put_window(site, x, update, begin, same)) is not None:
            return result
    wishes = [(d, axes, 0 if x.is_lazy else x.size) for d, axes in enumerate(x.natural())]
    wishes += [(d, axes, update.size) for d, axes in enumerate(update.natural()) if d not in partly]
    granted = site.claim(wishes)
    cut = trimmed([granted.get(d, ()) for d in range(len(x.shape))], x.shape)
    block = x.at(cut)
    new = update.at([() if d in partly else axes for d, axes in enumerate(cut)])
    owned = [d for d in partly if cut[d]]
    if not owned or not isinstance(x.dtype, np.dtype):
        if owned:
            cut = x.whole_along(partly)
            block, new = x.at(cut), update.at(cut)
        return site.value(site.bind(block, new, *_arrays(starts)), cut)
    if 0 in block.shape:
        return site.value(tie(block, new), cut)
    parts = _overlaps(site, cut, x.shape, update.shape, _arrays(starts))
    parts = [part if d in partly else _whole_part(part, new.shape[d]) for d, part in enumerate(parts)]
    first, lengths = [part.first for part in parts], [part.length for part in parts]
    margins = [part.length if d in owned else 0 for d, part in enumerate(parts)]
    wide = lax.pad(new, jnp.zeros((), new.dtype), [(margin, margin, 0) for margin in margins])
    places = [part.place + margin for part, margin in zip(parts, margins, strict=True)]
    piece, old = lax.dynamic_slice(wide, places, lengths), lax.dynamic_slice(block, first, lengths)
    inside: Any = True
    for d in owned:
        number = parts[d].place + jnp.arange(lengths[d]).reshape([-1 if e == d else 1 for e in range(block.ndim)])
        inside = inside & (number >= 0) & (number < update.shape[d])
    return site.value(lax.dynamic_update_slice(block, jnp.where(inside, piece, old), first), cut)
