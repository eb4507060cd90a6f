"""One worker's messages, from the boxes that workers own and the boxes that they need.

The overlap of an owned box with a needed box is a message. Both sides are product grids, so the overlap is the product
of one-dimensional overlaps: a worker finds its partners dimension by dimension, by bisection, without examining the
others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.plans.decomposition import ProductGrid, Range, box_shape, intersect_ranges
from distdl_jax.plans.messages import ExchangePlan, Message, Piece, Round, Start
from distdl_jax.plans.worker_ranks import positions, union


class _Segment(NamedTuple):
    """Part of a cell's range, within [0, n); `offset` is its position in the cell's block."""

    start: int
    stop: int
    cell: int
    offset: int


class Overlap(NamedTuple):
    """A one-dimensional piece; `source` may be a list of rows."""

    source: Start
    dest: int
    length: int


class _Segments:
    """The segments of all cells along one dimension, ordered for a fast search of those that overlap a range."""

    def __init__(self, segments: Iterable[_Segment]) -> None:
        self._ordered = sorted(segment for segment in segments if segment.start < segment.stop)
        self._starts = [segment.start for segment in self._ordered]
        # Stops need not ascend (one halo may be much wider than the next), but the furthest stop so far does.
        self._reach = list(accumulate((segment.stop for segment in self._ordered), max))

    def overlapping(self, start: int, stop: int) -> list[_Segment]:
        """Return the segments that share an index with [start, stop), by ascending start."""
        if stop <= start:
            return []
        first, last = bisect_right(self._reach, start), bisect_left(self._starts, stop)
        return [segment for segment in self._ordered[first:last] if segment.stop > start]


def _folded(wanted: Range, cell: int, n: int, periodic: bool) -> list[_Segment]:
    """Return the owned parts of a wanted range, in their order in the wanted block.

    A periodic dimension repeats [0, n) without end; each period that the range touches gives a segment. Otherwise only
    indices within [0, n) exist.

    >>> [tuple(part) for part in _folded((-1, 5), cell=0, n=4, periodic=True)]
    [(3, 4, 0, 0), (0, 4, 0, 1), (0, 1, 0, 5)]
    >>> [tuple(part) for part in _folded((-1, 5), cell=0, n=4, periodic=False)]
    [(0, 4, 0, 1)]
    """
    turns = range(wanted[0] // n, -(-wanted[1] // n)) if periodic and n else range(1)
    segments = []
    for turn in turns:
        start, stop = intersect_ranges(wanted, (turn * n, turn * n + n))
        if start < stop:
            segments.append(_Segment(start - turn * n, stop - turn * n, cell, start - wanted[0]))
    return segments


def per_dimension(periodic: Sequence[bool], ndim: int) -> tuple[bool, ...]:
    """Return `periodic` as one entry per dimension; () means none.

    >>> per_dimension((), 2)
    (False, False)
    """
    if periodic and len(periodic) != ndim:
        raise InvalidArgumentError(
            f"`periodic` (={tuple(periodic)}) must have one entry for each of {ndim} dimensions, or none."
        )
    return tuple(bool(wraps) for wraps in periodic) or (False,) * ndim


_Corners = tuple[tuple[Start, ...], tuple[Start, ...], tuple[int, ...]]  # source start, dest start, shape
Pieces = dict[int, tuple[Piece, ...]]  # by world rank of the other worker
_Line = dict[int, list[Overlap]]  # along one dimension: from the other grid's index to the overlap


def product_pieces(lines: Sequence[_Line], shape: Sequence[int], ranks: Sequence[int]) -> Pieces:
    """Return the pieces shared with each worker of the other grid: all products of one-dimensional overlaps.

    `shape`, `ranks`: of the other grid, whose cells are given by the lines, dimension by dimension.

    The order of a worker's pieces is that of the receiver's block, row-major, on both sides.
    """
    found: list[tuple[int, list[_Corners]]] = [(0, [((), (), ())])]
    for line, p in zip(lines, shape, strict=True):
        found = [
            (
                cell * p + index,  # row-major
                [
                    ((*source, more.source), (*dest, more.dest), (*shape, more.length))
                    for source, dest, shape in corners
                    for more in overlaps
                ],
            )
            for cell, corners in found
            for index, overlaps in line.items()
        ]
    return {ranks[cell]: tuple(Piece(*corners) for corners in pieces) for cell, pieces in found}


def shift_schedule(position: Mapping[int, int], rank: int, sends: Pieces, recvs: Pieces) -> tuple[Round, ...]:
    """Return a worker's messages in `Exchange`'s order; `position` numbers the team by ascending rank."""
    if not sends and not recvs:
        return ()
    n, here = len(position), position[rank]
    send_in = {(position[peer] - here) % n: Message(peer, pieces) for peer, pieces in sends.items()}
    recv_in = {(here - position[peer]) % n: Message(peer, pieces) for peer, pieces in recvs.items()}
    return tuple(Round(send_in.get(k), recv_in.get(k)) for k in sorted(send_in.keys() | recv_in.keys()))


@dataclass(frozen=True)
class Exchange:
    """Who owns and who needs which box: the same value on every worker, from which each plans its part.

    - `owned`: the grid of workers that hold the tensor. Along each dimension its ranges are consecutive from 0 on,
      balanced or not, empty or not; their end is the tensor's extent.
    - `needed`: the grid of receiving workers. Ranges may overlap, leave gaps, be empty, and reach outside the tensor.
      Needed entries that no worker owns stay zero: they are padding.
    - `periodic`: per dimension, whether indices outside the tensor wrap around, any number of times. Default: none.

    The teams may be equal, permuted, overlapping or disjoint.

    **Order.** Let n be the number of workers in the union of the teams, and number them by ascending world rank. The
    message from worker i to worker j belongs to round k = (j - i) mod n, for i and for j alike. Each worker processes
    its rounds by ascending k; in round k it sends to i + k and receives from i - k, with one blocking sendrecv, or only
    a send or a receive if there is only one.

    *It can't deadlock.* Suppose that some workers wait for ever. Take one of them, i, that waits in the lowest round,
    k, for a message to or from j. That message is in round k of j too. By the choice of i, j does not wait for ever in
    a lower round, so it comes to round k and posts both sides of it at once, as sendrecv does. Then both i and j have
    posted the message, so it moves: a contradiction. The same holds for several exchanges in a row, with (number of the
    exchange, k) in place of k, as long as all workers process the exchanges in the same order; and for the reverse
    plans, whose messages keep their rounds.

    Everything independent of the worker is computed once and cached in this object, so use one object for many plans.

    >>> rows = ProductGrid.balanced((4, 4), (2, 1), ranks=(0, 1))
    >>> columns = ProductGrid.balanced((4, 4), (1, 2), ranks=(0, 1))
    >>> plan = Exchange(rows, columns).plan(0)
    >>> plan.in_shape, plan.out_shape, plan.copies
    ((2, 4), (4, 2), (Piece(source_start=(0, 0), dest_start=(0, 0), shape=(2, 2)),))
    >>> plan.rounds[0].send
    Message(partner=1, pieces=(Piece(source_start=(0, 2), dest_start=(0, 0), shape=(2, 2)),))
    >>> plan.covers_output
    True
    """

    owned: ProductGrid
    needed: ProductGrid
    periodic: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        ndim = len(self.owned.shape)
        if len(self.needed.shape) != ndim:
            raise InvalidArgumentError(
                f"`needed` (of shape {self.needed.shape}) must have {ndim} dimensions, like `owned`."
            )
        if not self.owned.tiles:
            raise InvalidArgumentError("`owned` must have, in each dimension, consecutive ranges that start at 0.")
        per_dimension(self.periodic, ndim)

    @cached_property
    def wraps(self) -> tuple[bool, ...]:
        """For each dimension whether it is periodic."""
        return per_dimension(self.periodic, len(self.owned.shape))

    def plan(self, rank: int) -> ExchangePlan:
        """Return the part of the worker of world rank `rank`. A worker in neither team has nothing to do.

        Its cost grows with the number of this worker's messages, not with the number of workers.
        """
        in_shape = out_shape = (0,) * len(self.owned.shape)
        sends: Pieces = {}
        recvs: Pieces = {}
        in_disjoint = True
        if (cell := self.owned.cell_of.get(rank)) is not None:
            in_shape = box_shape(self.owned.box(cell))
            lines = [self.overlaps_of_owned(d, i) for d, i in enumerate(self.owned.index(cell))]
            sends = product_pieces(lines, self.needed.shape, self.needed.ranks)
            # Pieces are all products of the lines' overlaps, so they are disjoint if each line's are; and without a
            # piece in one line there is no piece at all.
            in_disjoint = not all(lines) or all(map(self._are_disjoint, lines))
        if (cell := self.needed.cell_of.get(rank)) is not None:
            out_shape = box_shape(self.needed.box(cell))
            lines = [self.overlaps_of_needed(d, j) for d, j in enumerate(self.needed.index(cell))]
            recvs = product_pieces(lines, self.owned.shape, self.owned.ranks)
        copies = sends.pop(rank, ())
        recvs.pop(rank, None)
        rounds = shift_schedule(self._position, rank, sends, recvs)
        return ExchangePlan(in_shape, out_shape, copies, rounds, in_disjoint)

    def _are_disjoint(self, line: Mapping[int, Sequence[Overlap]]) -> bool:
        """Return whether no row of the owned block is in two overlaps."""
        found = (overlap for overlaps in line.values() for overlap in overlaps)
        spans = sorted((start, length) for start, _, length in found if isinstance(start, int))
        return all(start + length <= following for (start, length), (following, _) in pairwise(spans))

    @cached_property
    def team(self) -> tuple[int, ...]:
        """The world ranks of all workers that own or need something, ascending."""
        return union(self.owned.ranks, self.needed.ranks)

    @property
    def is_identity(self) -> bool:
        """Whether no worker needs anything but its own block. Unlike for the plans, all workers agree on it."""
        return self.owned == self.needed

    @cached_property
    def _position(self) -> Mapping[int, int]:
        return positions(self.team)

    @cached_property
    def _owned_segments(self) -> tuple[_Segments, ...]:
        return tuple(
            _Segments(_Segment(start, stop, i, 0) for i, (start, stop) in enumerate(ranges))
            for ranges in self.owned.ranges
        )

    @cached_property
    def _needed_segments(self) -> tuple[_Segments, ...]:
        return tuple(
            _Segments(part for j, wanted in enumerate(ranges) for part in _folded(wanted, j, n, wraps))
            for ranges, n, wraps in zip(self.needed.ranges, self.owned.extent, self.wraps, strict=True)
        )

    def overlaps_of_owned(self, d: int, i: int) -> dict[int, list[Overlap]]:
        """Return, for each index j of the needed grid along dimension d, the part of owned range i that it needs."""
        start, stop = self.owned.ranges[d][i]
        overlaps: dict[int, list[Overlap]] = {}
        for part in self._needed_segments[d].overlapping(start, stop):
            low, high = max(start, part.start), min(stop, part.stop)
            overlap = Overlap(low - start, low - part.start + part.offset, high - low)
            overlaps.setdefault(part.cell, []).append(overlap)
        for peer in overlaps.values():
            peer.sort(key=lambda overlap: overlap.dest)  # the order in which the receiver finds them
        return overlaps

    def overlaps_of_needed(self, d: int, j: int) -> dict[int, list[Overlap]]:
        """Return, for each index i of the owned grid along dimension d, the part of needed range j that it owns."""
        overlaps: dict[int, list[Overlap]] = {}
        for part in _folded(self.needed.ranges[d][j], j, self.owned.extent[d], self.wraps[d]):
            for start, stop, i, _ in self._owned_segments[d].overlapping(part.start, part.stop):
                low, high = max(start, part.start), min(stop, part.stop)
                overlap = Overlap(low - start, low - part.start + part.offset, high - low)
                overlaps.setdefault(i, []).append(overlap)
        return overlaps
