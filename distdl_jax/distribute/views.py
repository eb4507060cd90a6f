"""Views: slices, pads, concatenations, reversals and rolls of one value, as maps of indices; read by one exchange.

A periodic convolution is written as three concatenations and a window. Each of these maps the indices of its result,
one dimension at a time, to indices of the value behind; so the maps are composed, and the entries that a worker needs
are fetched once, where the result is read.

A stencil has many views of one value, each shifted by a few entries. One after another they would fetch one row each.
So the interpreter makes all views of a value as soon as the value is there (it costs nothing), and the first that is
read fetches a *neighbourhood*, what all of them read: this worker's block with a margin, filled beyond the ends of the
value. Each view is a slice of it, which a compiler fuses into one loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer

from distdl_jax.distribute.index_maps import Beyond, IndexMap, Segment, shift_of
from distdl_jax.distribute.layouts import Cut, axes_in, trimmed
from distdl_jax.distribute.movements import Needed
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.plans.decomposition import Range, balanced_ranges
from distdl_jax.tracing.tie import tie


class View(Tensor):
    """A value whose indices are mapped, dimension by dimension, to those of `base`; `fill` is where they are not.

    `scaled`: multiplies what is read by a number, such as a stencil's coefficient. Its zeros stay zeros.
    """

    def __init__(
        self,
        base: Tensor,
        maps: Sequence[IndexMap],
        fill: Any = None,
        scaled: Callable[[Array], Array] | None = None,
    ) -> None:
        shape = tuple(index_map.length for index_map in maps)
        super().__init__(base.movements, shape, base.dtype, trimmed(base.natural(), shape))
        self.base, self.maps, self.fill, self.scaled = base, tuple(maps), fill, scaled
        self._at = {}
        base.views.append(self)

    def at(self, cut: Iterable[Sequence[int]]) -> Any:
        wanted = trimmed(cut, self.shape)
        if wanted not in self._at:
            shared = self._shared() if wanted == self.cut else None
            block = self._read(wanted, {}) if shared is None else shared.read(self)
            self._at[wanted] = block if self.scaled is None else self.scaled(block)
        return self._at[wanted]

    def _shared(self) -> Neighbourhood | None:
        """Return what this view and others read together; None if it reads alone."""
        key = "neighbourhood", self.base.natural()
        if key not in self.base._fetched:
            self.base._fetched[key] = neighbourhood(self.base, [view for view in self.base.views if view.is_read])
        found: Neighbourhood | None = self.base._fetched[key]
        return found if found is not None and self in found.shifts else None

    def _may_have(self, fill: Any) -> bool:
        """Say whether a view of this one can have a fill: its own; what is scaled, only zeros."""
        is_zero = self.scaled is None or same_fill(fill, 0)
        return is_zero and (self.fill is None or same_fill(fill, self.fill))

    def has_fill(self, fill: Any) -> bool:
        """Say whether the view is known to have this fill."""
        return self.fill is not None and same_fill(self.fill, fill)

    def ranges(self, cut: Cut, needed: Needed, periodic: Iterable[int] = ()) -> Array:
        if not needed:
            return self.at(cut)
        assert not tuple(periodic)
        wanted = trimmed(cut, self.shape)
        along = tuple(sorted((d, tuple((int(a), int(b)) for a, b in ranges)) for d, ranges in needed.items()))
        if (wanted, along) not in self._fetched:
            block = self._read(wanted, dict(along))
            self._fetched[wanted, along] = block if self.scaled is None else self.scaled(block)
        return self._fetched[wanted, along]

    def _read(self, cut: Cut, needed: Needed) -> Array:
        """Return this worker's block, or the ranges that it needs: one exchange of the base, and local pieces."""
        mesh, base = self.mesh, self.base
        base_cut = self._cut_of_base(cut)
        mine: list[Range] = []
        fetch: dict[int, list[Range]] = {}
        wraps = []
        for d, (n, index_map) in enumerate(zip(base.shape, self.maps, strict=True)):
            m = self.shape[d]
            whole = [(0, m)] * mesh.size(base_cut[d])
            ranges = needed.get(d) or (balanced_ranges(m, mesh.size(cut[d])) if cut[d] else whole)
            mine.append(tuple(ranges)[mesh.place(cut, self.shape, d) if cut[d] else 0])
            if not base_cut[d]:
                continue
            hulls = [index_map.hull(*each, n)[0] for each in ranges]
            if hulls != list(balanced_ranges(n, mesh.size(base_cut[d]))):
                fetch[d] = hulls
                if any(low < 0 or high > n for low, high in hulls):
                    wraps.append(d)
        x = base.ranges(base_cut, fetch, wraps)
        for d, (n, index_map) in enumerate(zip(base.shape, self.maps, strict=True)):
            (low, _), segments = index_map.hull(*mine[d], n)
            if not base_cut[d]:
                low, segments = 0, index_map.within(*mine[d])
            x = self._pieces(x, d, low, segments)
        return x

    def _cut_of_base(self, cut: Cut) -> Cut:
        """Return the cut in which the base is read: along a length of 1 its own, of which all fetch one row."""
        own, used = list(trimmed(cut, self.base.shape)), axes_in(cut)
        for d, axes in enumerate(self.base.natural()):
            if self.shape[d] == 1 and not own[d] and not used & set(axes):
                own[d], used = axes, used | set(axes)
        return tuple(own)

    def _pieces(self, x: Array, d: int, low: int, segments: Sequence[Segment]) -> Array:
        """Return the entries of the segments along dimension `d` of `x`, whose first entry has the index `low`."""
        if len(segments) == 1 and segments[0] == (x.shape[d], low, 1):
            return x
        shape = list(x.shape)
        pieces = []
        for length, start, step in segments:
            shape[d] = length
            if start is None:
                pieces.append(jnp.full(shape, self.fill, x.dtype))
                continue
            first, last = sorted((start - low, start - low + (length - 1) * step))
            piece = lax.slice_in_dim(x, first, last + 1, abs(step), d)
            pieces.append(lax.rev(piece, (d,)) if step < 0 and length > 1 else piece)
        if not pieces:
            shape[d] = 0
            return tie(jnp.zeros(shape, x.dtype), x)
        return tie(pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, d), x)


# --- neighbourhoods ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """This worker's block of a value with a margin, for some views.

    - `block`: the entries from `lows`, along each dimension; negative ones lie before the value's first.
    - `shifts`: of each view that reads it, along each dimension.
    """

    block: Array
    lows: tuple[int, ...]
    shifts: dict[View, tuple[int, ...]]

    def read(self, view: View) -> Array:
        """Return this worker's block of a view."""
        box = view.mesh.box(view.cut, view.shape)
        starts = [own[0] + shift - low for own, shift, low in zip(box, self.shifts[view], self.lows, strict=True)]
        lengths = [stop - start for start, stop in box]
        if 0 in lengths:
            return tie(jnp.zeros(lengths, self.block.dtype), self.block)
        return lax.slice(self.block, starts, [start + n for start, n in zip(starts, lengths, strict=True)])


def neighbourhood(base: Tensor, views: Sequence[View]) -> Neighbourhood | None:
    """Return what several views of `base` read; None if it isn't worth it, or they don't fit together.

    All decide by the ranges of all workers. It is worth it if no worker fetches more than the views would one by one.
    """
    cut = base.natural()
    shifts: dict[View, tuple[int, ...]] = {}
    beyond: list[Beyond] = [None] * len(base.shape)
    fill = None
    for view in views:
        found = [shift_of(each.segments, n) for each, n in zip(view.maps, base.shape, strict=True)]
        if any(each is None for each in found):
            continue
        along = [each for each in found if each is not None]
        kinds = [old or new for old, (_, new) in zip(beyond, along, strict=True)]
        fits = all(new in (None, kind) for kind, (_, new) in zip(kinds, along, strict=True))
        filled = any(new == "fill" for _, new in along)
        if (
            not fits
            or (filled and fill is not None and not view.has_fill(fill))
            or view.cut != trimmed(cut, view.shape)
        ):
            continue
        beyond, fill = kinds, view.fill if filled and fill is None else fill
        shifts[view] = tuple(shift for shift, _ in along)
    if len(shifts) < 2:
        return None
    hulls = [_hulls(base, cut, shifts, d, beyond[d]) for d in range(len(base.shape))]
    return None if None in hulls else _fetched(base, cut, hulls, beyond, fill, shifts)  # type: ignore[arg-type]


def _hulls(base: Tensor, cut: Cut, shifts: dict[View, tuple[int, ...]], d: int, beyond: Beyond) -> list[Range] | None:
    """Return, for each index along `d`, the entries that the views read; None if these are too many."""
    n, p = base.shape[d], base.mesh.size(cut[d])
    reads = []
    for view, shift in shifts.items():
        m = view.shape[d]
        ranges = balanced_ranges(m, p) if view.cut[d] else [(0, m)] * p
        reads.append([(a + shift[d], b + shift[d]) for a, b in ranges])
    hulls: list[Range] = []
    for own, each in zip(balanced_ranges(n, p) if cut[d] else [(0, n)], zip(*reads, strict=True), strict=True):
        some = [(a, b) for a, b in each if a < b]
        # Along a dimension that is whole, the block isn't cropped: nothing would be saved.
        ends = some if cut[d] and some else [*some, own]
        low, high = min(a for a, _ in ends), max(b for _, b in ends)
        singly = sum(_margin(own, each) for each in some)
        if (
            _margin(own, (low, high)) > singly
            or low < -n
            or high > 2 * n
            or (beyond is None and not 0 <= low <= high <= n)
        ):
            return None
        hulls.append((low, high))
    return hulls


def _margin(own: Range, read: Range) -> int:
    return max(0, own[0] - read[0]) + max(0, read[1] - own[1])


def _fetched(
    base: Tensor,
    cut: Cut,
    hulls: list[list[Range]],
    beyond: Sequence[Beyond],
    fill: object,
    shifts: dict[View, tuple[int, ...]],
) -> Neighbourhood:
    needed: dict[int, list[Range]] = {}
    mine = [each[base.mesh.place(cut, base.shape, d) if cut[d] else 0] for d, each in enumerate(hulls)]
    for d, (n, ranges) in enumerate(zip(base.shape, hulls, strict=True)):
        inside = ranges if beyond[d] == "wrap" else [_clipped(each, n) for each in ranges]
        if cut[d] and inside != list(balanced_ranges(n, base.mesh.size(cut[d]))):
            needed[d] = inside
    block = base.ranges(cut, needed, [d for d in needed if beyond[d] == "wrap"])
    widths = [(0, 0, 0)] * len(hulls)
    for d, (n, (low, high)) in enumerate(zip(base.shape, mine, strict=True)):
        if beyond[d] == "fill":
            start, stop = _clipped((low, high), n) if cut[d] else (0, n)
            widths[d] = (start - low, high - stop, 0)
        elif not cut[d] and (low < 0 or high > n):
            ends = lax.slice_in_dim(block, n + low, n, axis=d), lax.slice_in_dim(block, 0, high - n, axis=d)
            block = lax.concatenate([ends[0], block, ends[1]], d)
    if any(map(any, widths)):
        block = lax.pad(block, jnp.asarray(fill, block.dtype), widths)
    return Neighbourhood(block, tuple(low for low, _ in mine), shifts)


def _clipped(read: Range, n: int) -> Range:
    start = min(max(read[0], 0), n)
    return start, max(start, min(read[1], n))


# --- views ------------------------------------------------------------------------------------------------------------


def mapped(x: Tensor, change: Callable[[IndexMap, int], IndexMap], fill: Any = None) -> Tensor:
    """Return a view of `x` with its maps changed by `change(map, dimension)`.

    What is lazy or pending is made here, in its natural cut. A view with another fill is read first.
    """
    scaled = None
    if isinstance(x, View) and (fill is None or x._may_have(fill)):
        base, maps, fill, scaled = x.base, x.maps, x.fill if fill is None else fill, x.scaled
    else:
        base, maps = x, _every_index(x.shape)
        base = Tensor(x.movements, x.shape, x.dtype, x.natural(), x.at(x.natural())) if x.is_lazy or x.pending else x
    return View(base, [change(index_map, d) for d, index_map in enumerate(maps)], fill, scaled)


def multiplied(x: Tensor, by: Callable[[Array], Array]) -> View:
    """Return a view of `x`, multiplied by a number when it is read."""
    if not isinstance(x, View):
        return View(x, _every_index(x.shape), None, by)
    before = x.scaled
    return View(x.base, x.maps, x.fill, by if before is None else lambda block: by(before(block)))


def _every_index(shape: Sequence[int]) -> tuple[IndexMap, ...]:
    return tuple(IndexMap((Segment(n, 0),)) if n else IndexMap(()) for n in shape)


def sum_as_view(x: Tensor, y: Tensor) -> View | None:
    """Return x + y as a view: two of one value, padded with zeros, which don't overlap. So JAX transposes a roll."""
    if not (isinstance(x, View) and isinstance(y, View) and x.base is y.base and x.scaled is y.scaled):
        return None
    differ = [d for d, (a, b) in enumerate(zip(x.maps, y.maps, strict=True)) if a != b]
    if x.shape != y.shape or len(differ) != 1 or not (x.has_fill(0) and y.has_fill(0)):
        return None
    (d,) = differ
    ends = sorted({end for each in (x, y) for end in accumulate(segment.length for segment in each.maps[d].segments)})
    segments = []
    for start, stop in pairwise([0, *ends]):
        (a,), (b,) = x.maps[d].within(start, stop), y.maps[d].within(start, stop)
        if a.start is not None and b.start is not None:
            return None
        segments.append(b if a.start is None else a)
    maps = [IndexMap.of(segments) if e == d else index_map for e, index_map in enumerate(x.maps)]
    is_filled = any(segment.start is None for index_map in maps for segment in index_map.segments)
    return View(x.base, maps, x.fill if is_filled else None, x.scaled)


def rearranged(x: Tensor, dims: Sequence[int | None]) -> View | None:
    """Return a view whose dimension i is `dims[i]` of the view `x`, or a new one of length 1; None if it can't be one.

    A dimension that is left out must have length 1 in the value behind it, too.
    """
    if not isinstance(x, View):
        return None
    base = x.base
    gone = [d for d in range(len(x.shape)) if d not in dims]
    if any(base.shape[d] != 1 or x.shape[d] != 1 for d in gone):
        return None
    key = "rearranged", tuple(dims)
    if key not in base._fetched:  # one value for all views of the same base
        cut, kept = base.natural(), [d for d in dims if d is not None]
        block = jnp.transpose(base.at(cut), [*kept, *gone])
        block = block.reshape([1 if d is None else base.at(cut).shape[d] for d in dims])
        shape = [1 if d is None else base.shape[d] for d in dims]
        after = [() if d is None else cut[d] for d in dims]
        base._fetched[key] = Tensor(base.movements, shape, base.dtype, trimmed(after, shape), block)
    one = IndexMap((Segment(1, 0),))
    return View(base._fetched[key], [one if d is None else x.maps[d] for d in dims], x.fill, x.scaled)


def same_fill(a: Any, b: Any) -> bool:
    """Say whether two fills are known to be equal: traced ones only if they are one value."""
    return a is b or (not (isinstance(a, Tracer) or isinstance(b, Tracer)) and bool(a == b))
