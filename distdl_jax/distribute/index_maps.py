"""Maps of indices: of the dimensions of a view to those of the value behind it, as segments and as shifts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from distdl_jax.plans.decomposition import Range


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


Beyond = Literal["fill", "wrap"] | None
"""What a view reads beyond the ends of the value: fill, the other end, or nothing."""


def shift_of(segments: Sequence[Segment], n: int) -> tuple[int, Beyond] | None:
    """Return by how much a map of indices shifts them, and what it reads beyond the `n` entries; None if it isn't one.

    >>> shift_of([Segment(1, None), Segment(4, 0)], 5), shift_of([Segment(2, 3), Segment(3, 0)], 5)
    ((-1, 'fill'), (-2, 'wrap'))
    >>> shift_of([Segment(3, 0, 2)], 5)
    """
    reads = [segment for segment in segments if segment.start is not None]
    starts = [segment.start or 0 for segment in reads]
    stops = [start + segment.length for start, segment in zip(starts, reads, strict=True)]
    if not reads or any(segment.length > 1 and segment.step != 1 for segment in reads):
        return None
    if len(reads) == len(segments):
        if any(stop != n for stop in stops[:-1]) or any(starts[1:]):
            return None
        wraps = len(reads) > 1
        return starts[0] - (n if wraps and 2 * starts[0] > n else 0), "wrap" if wraps else None
    if len(reads) > 1:
        return None
    before = segments[0].length if segments[0].start is None else 0
    if (before and starts[0]) or (segments[-1].start is None and stops[0] != n):
        return None
    return starts[0] - before, "fill"
