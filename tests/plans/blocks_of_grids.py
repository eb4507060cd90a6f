"""Blocks of grids that are drawn, and their contents, cut from whole arrays."""

from collections.abc import Sequence

import numpy as np

from distdl_jax.plans.decomposition import ProductGrid, balanced_ranges, ranges_of_sizes


def random_blocks(rng, n, p, balanced=0.5):
    """Draw p ranges that follow each other from 0 to n: balanced, or cut anywhere."""
    if rng.random() < balanced:
        return balanced_ranges(n, p)
    cuts = [0, *sorted(int(c) for c in rng.integers(0, n + 1, p - 1)), n]
    return ranges_of_sizes(np.diff(cuts).tolist())


def blocks_of(grid: ProductGrid, array: np.ndarray, ranks: Sequence[int] = ()) -> dict[int, np.ndarray]:
    """Cut the block of each worker of a grid; of others among `ranks`, nothing."""
    nothing = dict.fromkeys(ranks, np.zeros((0,) * array.ndim, array.dtype))
    return nothing | {r: array[tuple(slice(*side) for side in grid.box(c))] for r, c in grid.cell_of.items()}


def needed_blocks(array: np.ndarray, grid: ProductGrid, wraps: Sequence[bool], ranks: Sequence[int] = ()):
    """Cut what each worker of a grid needs, from the array padded with zeros or with copies of itself."""
    low = [max(0, -min(start for start, _ in line)) for line in grid.ranges]
    high = [max(0, max(stop for _, stop in line) - n) for line, n in zip(grid.ranges, array.shape, strict=True)]
    for d, wrapped in enumerate(wraps):
        width = [(low[e], high[e]) if e == d else (0, 0) for e in range(array.ndim)]
        array = np.pad(array, width, mode="wrap" if wrapped else "constant")
    shifted = (tuple((a + n, b + n) for a, b in line) for line, n in zip(grid.ranges, low, strict=True))
    return blocks_of(ProductGrid(grid.ranks, tuple(shifted)), array, ranks)
