"""A halo exchange of the edges of blocks alone: what neighbours need of each block, and nothing of its inside."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from distdl_jax.plans.decomposition import ProductGrid, Range
from distdl_jax.plans.halos import Halos


@dataclass(frozen=True)
class HaloEdges:
    """A halo exchange along one dimension, `axis`, as one of the blocks' edges.

    - `kept`: for each index along `axis`, how many of the first and of the last entries of a block others need.
    - `around`: for each, how many entries it needs before and after its block.
    - `halos`: the exchange of the edges. A block's edges are its first entries, and then its last ones.

    >>> grid = ProductGrid.balanced((9,), (3,), ranks=(0, 1, 2))
    >>> edges = halo_edges(Halos(grid, (((0, 4), (2, 8), (5, 9)),)))
    >>> edges.kept, edges.around, edges.halos.owned.ranges, edges.halos.needed
    (((0, 1), (1, 1), (2, 0)), ((0, 1), (1, 2), (1, 0)), (((0, 1), (1, 3), (3, 5)),), (((0, 2), (0, 5), (2, 5)),))
    """

    axis: int
    kept: tuple[tuple[int, int], ...]
    around: tuple[tuple[int, int], ...]
    halos: Halos

    def index(self, worker: int) -> int:
        """The index of `worker` along `axis`."""
        return self.halos.owned.index(self.halos.owned.cell_of[worker])[self.axis]


def halo_edges(halos: Halos) -> HaloEdges | None:
    """The edges of which `halos` is an exchange; None where it is not one of edges alone.

    It is one where all that moves goes along one dimension that doesn't wrap around, from next neighbours, where every
    worker keeps its whole block, and where what its two neighbours need of it doesn't overlap.
    """
    moving = [d for d, needed in enumerate(halos.needed) if needed != halos.owned.ranges[d]]
    if len(moving) != 1 or halos.periodic[moving[0]]:
        return None
    (axis,) = moving
    owned, needed = halos.owned.ranges[axis], halos.needed[axis]
    around = tuple((own[0] - its[0], its[1] - own[1]) for own, its in zip(owned, needed, strict=True))
    sizes = [stop - start for start, stop in owned]
    if min(map(min, around)) < 0 or any(before[1] != after[0] for before, after in pairwise(owned)):
        return None
    befores, afters = zip(*around, strict=True)
    kept = tuple(zip((0, *afters[:-1]), (*befores[1:], 0), strict=True))
    if befores[0] or afters[-1] or any(sum(its) > size for its, size in zip(kept, sizes, strict=True)):
        return None
    ends = list(accumulate(map(sum, kept), initial=0))
    ranges: tuple[Range, ...] = tuple(pairwise(ends))
    wanted = tuple(
        (start - before, stop + after) for (start, stop), (before, after) in zip(ranges, around, strict=True)
    )
    by_dimension, wanted_by_dimension = list(halos.owned.ranges), list(halos.needed)
    by_dimension[axis], wanted_by_dimension[axis] = ranges, wanted
    grid = ProductGrid(halos.owned.ranks, tuple(by_dimension))
    return HaloEdges(axis, kept, around, Halos(grid, tuple(wanted_by_dimension), halos.periodic))
