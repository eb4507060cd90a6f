"""Views: slices, pads, concatenations, reversals and rolls of one value, as maps of indices; read by one exchange.

A periodic convolution is written as three concatenations and a window. Each of these maps the indices of its result,
one dimension at a time, to indices of the value behind; so the maps are composed, and the entries that a worker needs
are fetched once, where the result is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer

from distdl_jax.distribute.layouts import Cut, trimmed
from distdl_jax.distribute.movements import Needed
from distdl_jax.distribute.tensors import Tensor
from distdl_jax.plans.decomposition import Range, balanced_ranges
from distdl_jax.tracing.tie import tie


class Segment(NamedTuple):
    """`length` consecutive indices of a view: entries start, start + step, ... of the value behind it, or the fill."""

    length: int
    start: int | None
    step: int = 1

    def part(self, first: int, stop: int) -> Segment:
        """Return the indices from `first` to `stop` of the segment."""
        return Segment(stop - first, None if self.start is None else self.start + first * self.step, self.step)

    def source(self) -> Range:
        """Return the range of entries that it reads."""
        assert self.start is not None
        last = self.start + (self.length - 1) * self.step
        return min(self.start, last), max(self.start, last) + 1


@dataclass(frozen=True)
class IndexMap:
    """A map from the indices of one dimension of a view to those of the value behind it."""

    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> IndexMap:
        """Return the map of consecutive segments, with those merged that continue each other."""
        merged: list[Segment] = []
        for segment in segments:
            if not segment.length:
                continue
            if merged and (joined := _joined(merged[-1], segment)):
                merged[-1] = joined
            else:
                merged.append(segment)
        return cls(tuple(merged))

    @property
    def length(self) -> int:
        """The number of indices."""
        return sum(segment.length for segment in self.segments)

    def within(self, start: int, stop: int) -> list[Segment]:
        """Return the segments of the indices from `start` to `stop`."""
        found, first = [], 0
        for segment in self.segments:
            low, high = max(start, first), min(stop, first + segment.length)
            if low < high:
                found.append(segment.part(low - first, high - first))
            first += segment.length
        return found

    def sliced(self, start: int, stop: int, stride: int = 1) -> IndexMap:
        """Return the map of every `stride`-th index from `start` to `stop`."""
        segments: list[Segment] = []
        first = 0
        for segment in self.segments:
            low = max(start, first)
            low += -(low - start) % stride
            count = len(range(low, min(stop, first + segment.length), stride))
            begin = None if segment.start is None else segment.start + (low - first) * segment.step
            segments.append(Segment(count, begin, segment.step * stride))
            first += segment.length
        return IndexMap.of(segments)

    def reversed(self) -> IndexMap:
        """Return the map of the indices in reverse."""
        return IndexMap.of(
            Segment(n, None if start is None else start + (n - 1) * step, -step)
            for n, start, step in reversed(self.segments)
        )

    def padded(self, low: int, high: int) -> IndexMap:
        """Return the map with fill at its ends, or without their indices where a width is negative."""
        cut = self.sliced(max(0, -low), max(self.length + min(0, high), max(0, -low)))
        return IndexMap.of([Segment(max(0, low), None), *cut.segments, Segment(max(0, high), None)])

    def hull(self, start: int, stop: int, n: int) -> tuple[Range, list[Segment]]:
        """Return the range that the indices from `start` to `stop` read, and their segments within it.

        Beyond its ends, of length `n`, the value goes on periodically: so what wraps around is read in one piece.
        """
        hull: Range | None = None
        placed = []
        for segment in self.within(start, stop):
            if segment.start is None:
                placed.append(segment)
                continue
            low, high = segment.source()
            if hull is None:
                shift, hull = 0, (low, high)
            else:
                shift = min((0, -n, n), key=partial(_grown_length, hull, low, high))
                hull = min(hull[0], low + shift), max(hull[1], high + shift)
            placed.append(segment._replace(start=segment.start + shift))
        return hull or (0, 0), placed


def _joined(a: Segment, b: Segment) -> Segment | None:
    if a.start is None or b.start is None:
        return Segment(a.length + b.length, None) if a.start is b.start else None
    step = a.step if a.length > 1 else b.step if b.length > 1 else 1
    continues = b.start == a.start + a.length * step and (b.length == 1 or b.step == step)
    return Segment(a.length + b.length, a.start, step) if continues else None


def _grown_length(hull: Range, low: int, high: int, shift: int) -> int:
    return max(hull[1], high + shift) - min(hull[0], low + shift)


class View(Tensor):
    """A value whose indices are mapped, dimension by dimension, to those of `base`; `fill` is where they are not."""

    def __init__(self, base: Tensor, maps: Sequence[IndexMap], fill: Any = None) -> None:
        shape = tuple(index_map.length for index_map in maps)
        super().__init__(base.movements, shape, base.dtype, trimmed(base.natural(), shape))
        self.base, self.maps, self.fill = base, tuple(maps), fill
        self._at = {}

    def at(self, cut: Iterable[Sequence[int]]) -> Any:
        wanted = trimmed(cut, self.shape)
        if wanted not in self._at:
            self._at[wanted] = self._read(wanted, {})
        return self._at[wanted]

    def ranges(self, cut: Cut, needed: Needed, periodic: Iterable[int] = ()) -> Array:
        if not needed:
            return self.at(cut)
        assert not tuple(periodic)
        wanted = trimmed(cut, self.shape)
        along = tuple(sorted((d, tuple((int(a), int(b)) for a, b in ranges)) for d, ranges in needed.items()))
        if (wanted, along) not in self._fetched:
            self._fetched[wanted, along] = self._read(wanted, dict(along))
        return self._fetched[wanted, along]

    def _read(self, cut: Cut, needed: Needed) -> Array:
        """Return this worker's block, or the ranges that it needs: one exchange of the base, and local pieces."""
        mesh, base = self.mesh, self.base
        base_cut = trimmed(cut, base.shape)
        mine: list[Range] = []
        fetch: dict[int, list[Range]] = {}
        wraps = []
        for d, (n, index_map) in enumerate(zip(base.shape, self.maps, strict=True)):
            m = self.shape[d]
            ranges = needed.get(d) or (balanced_ranges(m, mesh.size(cut[d])) if cut[d] else [(0, m)])
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


def mapped(x: Tensor, change: Callable[[IndexMap, int], IndexMap], fill: Any = None) -> Tensor:
    """Return a view of `x` with its maps changed by `change(map, dimension)`.

    What is lazy or pending is made here, in its natural cut. A view with another fill is read first.
    """
    if isinstance(x, View) and (fill is None or x.fill is None or same_fill(fill, x.fill)):
        base, maps, fill = x.base, x.maps, x.fill if fill is None else fill
    else:
        base, maps = x, tuple(IndexMap((Segment(n, 0),)) if n else IndexMap(()) for n in x.shape)
        base = Tensor(x.movements, x.shape, x.dtype, x.natural(), x.at(x.natural())) if x.is_lazy or x.pending else x
    return View(base, [change(index_map, d) for d, index_map in enumerate(maps)], fill)


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
    return View(base._fetched[key], [one if d is None else x.maps[d] for d in dims], x.fill)


def same_fill(a: Any, b: Any) -> bool:
    """Say whether two fills are known to be equal: traced ones only if they are one value."""
    return a is b or (not (isinstance(a, Tracer) or isinstance(b, Tracer)) and bool(a == b))
