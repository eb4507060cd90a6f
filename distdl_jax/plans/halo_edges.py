"""A halo exchange of the edges of blocks alone: what neighbours need of each block, and nothing of width inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from distdl_jax.plans.decomposition import ProductGrid, Range, ranges_of_sizes
from distdl_jax.plans.halos import Halos


@dataclass(frozen=True)
class HaloEdges:
    """The exchange of the blocks' edges along one dimension, `axis`.

    - `edges`: for each index along `axis`, how many of the first and of the last entries of a block others need.
    - `around`: for each, how many entries it needs before and after its block.
    - `halos`: the exchange. A block's edges are its first entries, and then its last ones.
    """

    axis: int
    edges: tuple[tuple[int, int], ...]
    around: tuple[tuple[int, int], ...]
    halos: Halos

    def index(self, worker: int) -> int:
        """Return the index of `worker` along `axis`."""
        return self.halos.owned.index(self.halos.owned.cell_of[worker])[self.axis]


def halo_edges(halos: Halos) -> tuple[HaloEdges, ...] | None:
    """Return `halos` as exchanges of edges, one for each dimension along which anything moves; None where it is none.

    It is one where every worker keeps its whole block, and needs around it only entries of its next neighbours, which
    must not overlap (in a periodic dimension they lie further round the tensor). Along a dimension the blocks are
    already wider in the dimensions before, so that corners ride along.

    >>> grid = ProductGrid.balanced((9,), (3,), ranks=(0, 1, 2))
    >>> (edges,) = halo_edges(Halos(grid, (((0, 4), (2, 8), (5, 9)),)))
    >>> edges.edges, edges.around, edges.halos.owned.ranges, edges.halos.needed
    (((0, 1), (1, 1), (2, 0)), ((0, 1), (1, 2), (1, 0)), (((0, 1), (1, 3), (3, 5)),), (((0, 2), (0, 5), (2, 5)),))
    """
    found = []
    # As a tensor that the blocks tile also where they have what is around them.
    tiled = [ranges_of_sizes([stop - start for start, stop in ranges]) for ranges in halos.owned.ranges]
    for axis, (owned, needed) in enumerate(zip(halos.owned.ranges, halos.needed, strict=True)):
        if owned == needed:
            continue
        around = tuple((own[0] - wide[0], wide[1] - own[1]) for own, wide in zip(owned, needed, strict=True))
        edges = _edges_needed(owned, around, halos.periodic[axis])
        if edges is None:
            return None
        ranges = ranges_of_sizes([sum(widths) for widths in edges])
        wanted = tuple(
            (start - before, stop + after) for (start, stop), (before, after) in zip(ranges, around, strict=True)
        )
        grid = ProductGrid(halos.owned.ranks, (*tiled[:axis], ranges, *tiled[axis + 1 :]))
        wraps = tuple(wraps and d == axis for d, wraps in enumerate(halos.periodic))
        exchange = Halos(grid, (*tiled[:axis], wanted, *tiled[axis + 1 :]), wraps)
        found.append(HaloEdges(axis, edges, around, exchange))
        tiled[axis] = ranges_of_sizes([stop - start for start, stop in needed])
    return tuple(found) or None


def _edges_needed(
    owned: Sequence[Range], around: Sequence[tuple[int, int]], periodic: bool
) -> tuple[tuple[int, int], ...] | None:
    """Return what others need of the edges of each block; None where that is not all that anyone needs."""
    if min(map(min, around)) < 0 or any(before[1] != after[0] for before, after in pairwise(owned)):
        return None
    befores, afters = zip(*around, strict=True)
    if not periodic and (befores[0] or afters[-1]):
        return None
    edges = tuple(zip((afters[-1], *afters[:-1]), (*befores[1:], befores[0]), strict=True))
    sizes = (stop - start for start, stop in owned)
    return None if any(sum(widths) > size for widths, size in zip(edges, sizes, strict=True)) else edges
