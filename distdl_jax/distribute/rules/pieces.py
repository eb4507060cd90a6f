"""Rules of slices, pads, concatenations, reversals and tiles: views, which are read by one exchange."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from distdl_jax.distribute.index_maps import IndexMap, Segment
from distdl_jax.distribute.interpreter import Site, rule
from distdl_jax.distribute.layouts import Axes, trimmed
from distdl_jax.distribute.rules.elementwise import elementwise
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.distribute.views import View, mapped, same_fill, sum_as_view
from distdl_jax.plans.decomposition import balanced_ranges
from distdl_jax.tracing.tie import tie


@rule("slice")
def slice_(site: Site, x: Tensor) -> Tensor:
    """Whole strides of the indices."""
    starts, stops = site.params["start_indices"], site.params["limit_indices"]
    strides = site.params["strides"] or (1,) * len(starts)
    return mapped(x, lambda index_map, d: index_map.sliced(int(starts[d]), int(stops[d]), int(strides[d])))


@rule("rev")
def rev(site: Site, x: Tensor) -> Tensor:
    """The indices in reverse."""
    dims = site.params["dimensions"]
    return mapped(x, lambda index_map, d: index_map.reversed() if d in dims else index_map)


@rule("split")
def split(site: Site, x: Tensor) -> list[Tensor]:
    """A slice each."""
    stops, axis = list(accumulate(site.params["sizes"])), site.params["axis"]

    def part(start: int, stop: int) -> Tensor:
        return mapped(x, lambda index_map, d: index_map.sliced(start, stop) if d == axis else index_map)

    return [part(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


@rule("unstack")
def unstack(site: Site, x: Tensor) -> list[Tensor]:
    """A slice each, without the dimension."""
    axis, results = site.params["axis"], []
    for i in range(x.shape[axis]):
        piece = mapped(x, partial(_at, axis, i))
        cut = piece.natural()
        results.append(site.value(lax.squeeze(piece.at(cut), (axis,)), (*cut[:axis], *cut[axis + 1 :]), n=i))
    return results


def _at(axis: int, i: int, index_map: IndexMap, d: int) -> IndexMap:
    return index_map.sliced(i, i + 1) if d == axis else index_map


@rule("pad")
def pad(site: Site, x: Tensor, fill: Tensor) -> Tensor:
    """Fill at the ends, or entries removed; interior padding spreads each worker's own entries first."""
    config = [tuple(map(int, each)) for each in site.params["padding_config"]]
    value = _plain(fill.whole())
    for d, (_, _, between) in enumerate(config):
        if between and x.shape[d] > 1:
            x = _spread(site, x, d, between, value)
    return mapped(x, lambda index_map, d: index_map.padded(*config[d][:2]), value)


def _plain(value: Any) -> Any:
    """Return a scalar as numpy's, which can be compared, unless it is traced."""
    return value if isinstance(value, Tracer) else np.asarray(value)[()]


def _spread(site: Site, x: Tensor, d: int, between: int, fill: Any) -> Tensor:
    """Return x with `between` entries of fill after each along `d`, but the last."""
    cut, n, step = x.natural(), x.shape[d], between + 1
    m = (n - 1) * step + 1
    shape = (*x.shape[:d], m, *x.shape[d + 1 :])
    value = jnp.asarray(fill, x.dtype)
    if not cut[d]:
        padding = [(0, 0, between if e == d else 0) for e in range(len(shape))]
        return site.like(x, lax.pad(x.at(cut), value, padding), shape, cut)
    mine = balanced_ranges(m, site.mesh.size(cut[d]))
    reads = [(-(-a // step), max(-(-a // step), (b - 1) // step + 1)) if a < b else (0, 0) for a, b in mine]
    block = x.ranges(cut, {d: reads})
    i = site.mesh.place(cut, x.shape, d)
    (a, b), (first, stop) = mine[i], reads[i]
    if first < stop:
        ends = (first * step - a, b - ((stop - 1) * step + 1), between)
        block = lax.pad(block, value, [ends if e == d else (0, 0, 0) for e in range(len(shape))])
    else:
        block = tie(jnp.full((*block.shape[:d], b - a, *block.shape[d + 1 :]), value), block)
    return site.like(x, block, shape, cut)


@rule("concatenate")
def concatenate(site: Site, *xs: Tensor) -> Tensor:
    """Pieces of one value are one view; others are joined where the blocks of the result are."""
    axis = site.params["dimension"]
    if (view := _one_view(axis, xs)) is not None:
        return view
    shape = site.shape
    granted = site.claim([(e, axes, 0 if x.is_lazy else x.size) for x in xs for e, axes in enumerate(x.natural())])
    cut = trimmed([granted.get(e, ()) for e in range(len(shape))], shape)
    if not cut[axis]:
        return site.value(site.bind(*(x.at(cut) for x in xs)), cut)
    mine = balanced_ranges(shape[axis], site.mesh.size(cut[axis]))
    own, start, pieces = mine[site.mesh.place(cut, shape, axis)], 0, []
    for x in xs:
        n, of_x = x.shape[axis], trimmed(cut, x.shape)
        needed = [(min(max(a - start, 0), n), min(max(b - start, 0), n)) for a, b in mine]
        if of_x[axis]:
            pieces.append(x.ranges(of_x, {axis: needed}))
        else:
            low, high = (min(max(end - start, 0), n) for end in own)
            pieces.append(lax.slice_in_dim(x.at(of_x), low, high, axis=axis))
        start += n
    some = [piece for piece in pieces if piece.shape[axis]] or pieces[:1]
    # A piece that contributes nothing here may do so elsewhere: its adjoint must run on all workers.
    return site.value(tie(site.bind(*some) if len(some) > 1 else some[0], *pieces), cut)


@rule("add_any")
def add_any(site: Site, x: Tensor, y: Tensor) -> Tensor:
    """Pieces that don't overlap are one view; otherwise it works element by element."""
    return sum_as_view(x, y) or elementwise(site, x, y)


def _one_view(axis: int, xs: tuple[Tensor, ...]) -> View | None:
    """Return the concatenation as a view, if all operands are views of one value that differ along `axis` only."""
    views = [x for x in xs if isinstance(x, View)]
    if not views:
        return None
    base, first = views[0].base, views[0]
    fills = [view.fill for view in views if view.fill is not None]
    maps = []
    for x in xs:
        if x is base:
            maps.append(tuple(IndexMap((Segment(n, 0),)) if n else IndexMap(()) for n in x.shape))
        elif isinstance(x, View) and x.base is base and x.scaled is None:
            maps.append(x.maps)
        else:
            return None
    others = {(*each[:axis], *each[axis + 1 :]) for each in maps}
    if len(others) > 1 or not all(same_fill(fill, fills[0]) for fill in fills):
        return None
    joined = IndexMap.of(segment for each in maps for segment in each[axis].segments)
    return View(base, (*first.maps[:axis], joined, *first.maps[axis + 1 :]), fills[0] if fills else None)


@rule("stack")
def stack(site: Site, *xs: Tensor) -> Tensor:
    """The new dimension is whole."""
    axis = site.params["axis"]
    granted = site.claim([(e, axes, x.size) for x in xs for e, axes in enumerate(x.natural())])
    cut: list[Axes] = [granted.get(e, ()) for e in range(len(xs[0].shape))]
    return site.value(site.bind(*(x.at(cut) for x in xs)), (*cut[:axis], (), *cut[axis:]))


@rule("tile")
def tile(site: Site, x: Tensor) -> Tensor:
    """The same segments again and again."""
    reps = site.params["reps"]
    lead = len(reps) - len(x.shape)
    if lead:
        raise site.refuse("adds dimensions", x)
    return mapped(x, lambda index_map, d: IndexMap.of(index_map.segments * reps[d]))
