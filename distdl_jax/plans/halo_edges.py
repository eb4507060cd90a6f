"""A halo exchange of the edges of blocks alone: what neighbours need of each block, and nothing of its inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from distdl_jax.plans.decomposition import ProductGrid, Range, ranges_of_sizes
from distdl_jax.plans.halos import Halos


@dataclass(frozen=True)
class HaloEdges:
    """The exchange of the blocks' edges along one dimension, `axis`.

    - `kept`: for each index along `axis`, how many of the first and of the last entries of a block others need.
    - `around`: for each, how many entries it needs before and after its block.
    - `halos`: the exchange. A block's edges are its first entries, and then its last ones.
    """

    axis: int
    kept: tuple[tuple[int, int], ...]
    around: tuple[tuple[int, int], ...]
    halos: Halos

    def index(self, worker: int) -> int:
        """The index of `worker` along `axis`."""
        return self.halos.owned.index(self.halos.owned.cell_of[worker])[self.axis]


def halo_edges(halos: Halos) -> tuple[HaloEdges, ...] | None:
    """The edges of which `halos` is an exchange, for each dimension along which anything moves, in order; None where
    it is not one of edges alone.

    It is one where something moves, every worker keeps its whole block, and what it needs around that is of its next
    neighbours, which are further round the tensor in a periodic dimension, and doesn't overlap with what those at the
    other side need. Edges along a dimension are of blocks that are already wider in the ones before, so that corners
    ride along.

    >>> grid = ProductGrid.balanced((9,), (3,), ranks=(0, 1, 2))
    >>> (edges,) = halo_edges(Halos(grid, (((0, 4), (2, 8), (5, 9)),)))
    >>> edges.kept, edges.around, edges.halos.owned.ranges, edges.halos.needed
    (((0, 1), (1, 1), (2, 0)), ((0, 1), (1, 2), (1, 0)), (((0, 1), (1, 3), (3, 5)),), (((0, 2), (0, 5), (2, 5)),))
    """
    found = []
    # As a tensor that the blocks tile also where they have what is around them.
    held = [ranges_of_sizes([stop - start for start, stop in ranges]) for ranges in halos.owned.ranges]
    for axis, (owned, needed) in enumerate(zip(halos.owned.ranges, halos.needed, strict=True)):
        if owned == needed:
            continue
        around = tuple((own[0] - its[0], its[1] - own[1]) for own, its in zip(owned, needed, strict=True))
        kept = _kept(owned, around, halos.periodic[axis])
        if kept is None:
            return None
        ranges = ranges_of_sizes([sum(its) for its in kept])
        wanted = tuple(
            (start - before, stop + after) for (start, stop), (before, after) in zip(ranges, around, strict=True)
        )
        grid = ProductGrid(halos.owned.ranks, (*held[:axis], ranges, *held[axis + 1 :]))
        wraps = tuple(wraps and d == axis for d, wraps in enumerate(halos.periodic))
        exchange = Halos(grid, (*held[:axis], wanted, *held[axis + 1 :]), wraps)
        found.append(HaloEdges(axis, kept, around, exchange))
        held[axis] = ranges_of_sizes([stop - start for start, stop in needed])
    return tuple(found) or None


def _kept(
    owned: Sequence[Range], around: Sequence[tuple[int, int]], periodic: bool
) -> tuple[tuple[int, int], ...] | None:
    """What others need of the edges of each block; None where that is not all that anyone needs."""
    if min(map(min, around)) < 0 or any(before[1] != after[0] for before, after in pairwise(owned)):
        return None
    befores, afters = zip(*around, strict=True)
    if not periodic and (befores[0] or afters[-1]):
        return None
    kept = tuple(zip((afters[-1], *afters[:-1]), (*befores[1:], befores[0]), strict=True))
    sizes = (stop - start for start, stop in owned)
    return None if any(sum(its) > size for its, size in zip(kept, sizes, strict=True)) else kept
