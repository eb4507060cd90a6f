"""Random cases on twelve workers.

Teams are drawn out of all workers in any order, so that the partitions of one operator overlap, are disjoint, equal or
permuted.
"""

from math import prod

import numpy as np

from matrix import movement_cases as cases
from matrix import reference
from matrix.case import Case
from matrix.partitions import On, blocks

WORKERS = 12

Shape = tuple[int, ...]


def partition(rng: np.random.Generator, shape: Shape) -> On:
    return On(shape, tuple(rng.permutation(WORKERS)[: prod(shape)].tolist()))


def grid_shape(rng: np.random.Generator, ndim: int) -> Shape:
    """At most twelve workers, few along most dimensions."""
    while True:
        shape = tuple(rng.integers(1, (WORKERS, 5, 4)[ndim - 1] + 1, ndim).tolist())
        if prod(shape) <= WORKERS:
            return shape


def block_shape(rng: np.random.Generator) -> Shape:
    return tuple(rng.integers(0 if rng.random() < 0.2 else 1, 4, rng.integers(1, 4)).tolist())


def random_replication(rng: np.random.Generator) -> Case:
    """A broadcast or sum-reduction, each with or without its transpositions."""
    copies = grid_shape(rng, int(rng.integers(1, 4)))
    source = tuple(size if rng.random() < 0.5 else 1 for size in copies)
    while source[0] == 1 and len(source) > 1 and rng.random() < 0.7:
        source = source[1:]
    transpose_source, transpose_copies, preserve_batch = (bool(rng.random() < p) for p in (0.3, 0.3, 0.7))
    P_source = partition(rng, source[::-1] if transpose_source else source)
    P_copies = partition(rng, copies[::-1] if transpose_copies else copies)
    by_root = {root: block_shape(rng) for root in P_source.ranks}
    if rng.random() < 0.5:
        options = {"transpose_src": transpose_source, "transpose_dest": transpose_copies}
        return cases.broadcast(P_source, P_copies, by_root, WORKERS, preserve_batch=preserve_batch, **options)
    roots = reference.sources(P_source.grid, P_copies.grid, transpose_source, transpose_copies)
    shapes = {worker: by_root[root] for worker, root in zip(P_copies.ranks, roots.ravel().tolist(), strict=True)}
    options = {"transpose_src": transpose_copies, "transpose_dest": transpose_source}
    return cases.sum_reduce(P_copies, P_source, shapes, WORKERS, preserve_batch=preserve_batch, **options)


def random_all_sum_reduce(rng: np.random.Generator) -> Case:
    P_x = partition(rng, grid_shape(rng, int(rng.integers(1, 4))))
    axes = tuple(d for d in range(len(P_x.shape)) if rng.random() < 0.6)
    team_shapes = {
        index: block_shape(rng) for index in np.ndindex(*(1 if d in axes else p for d, p in enumerate(P_x.shape)))
    }
    shapes = {
        worker: team_shapes[tuple(0 if d in axes else i for d, i in enumerate(index))]
        for index, worker in np.ndenumerate(P_x.grid)
    }
    return cases.all_sum_reduce(P_x, axes, shapes, WORKERS)


def lengths(rng: np.random.Generator, p: int, n: int) -> int | list[int]:
    """`n` in all, over `p` blocks: balanced, or cut anywhere."""
    return n if rng.random() < 0.5 else np.diff([0, *sorted(rng.integers(0, n + 1, p - 1).tolist()), n]).tolist()


def random_repartition(rng: np.random.Generator) -> Case:
    ndim = int(rng.integers(1, 4))
    P_x, P_y = (partition(rng, grid_shape(rng, ndim)) for _ in range(2))
    sizes = [lengths(rng, p, int(rng.integers(0 if rng.random() < 0.1 else 1, 8))) for p in P_x.shape]
    return cases.repartition(P_x, P_y, blocks(P_x, *sizes, world=WORKERS), preserve_batch=bool(rng.random() < 0.7))


def random_halo_exchange(rng: np.random.Generator) -> Case:
    """Widths differ between the indices of a dimension, are sometimes negative, and reach past the neighbour."""
    P_x = partition(rng, grid_shape(rng, int(rng.integers(1, 4))))
    shapes = blocks(P_x, *(lengths(rng, p, int(rng.integers(1, 8))) for p in P_x.shape), world=WORKERS)
    halos = []
    for d, p in enumerate(P_x.shape):
        line = np.moveaxis(P_x.grid, d, 0).reshape(p, -1)[:, 0]
        lowest = [-1 if shapes[worker][d] > 1 and rng.random() < 0.3 else 0 for worker in line]
        halos.append(tuple(tuple(rng.integers(low, 4, 2).tolist()) for low in lowest))
    return cases.halo_exchange(P_x, shapes, *halos, periodic=tuple(bool(rng.random() < 0.3) for _ in P_x.shape))


def random_gather(rng: np.random.Generator) -> Case:
    """An all-gather of blocks of any lengths, or a reduce-scatter of terms of one."""
    P_x = partition(rng, grid_shape(rng, int(rng.integers(1, 4))))
    axes = tuple(d for d in range(len(P_x.shape)) if rng.random() < 0.6)
    if rng.random() < 0.5:
        shapes = blocks(P_x, *(lengths(rng, p, int(rng.integers(0, 8))) for p in P_x.shape), world=WORKERS)
        return cases.all_gather(P_x, axes, shapes)
    sizes = [[int(rng.integers(0, 6))] * p if d in axes else lengths(rng, p, 5) for d, p in enumerate(P_x.shape)]
    return cases.reduce_scatter(P_x, axes, blocks(P_x, *sizes, world=WORKERS))


def random_rows(rng: np.random.Generator) -> Case:
    """Rows by number, or sums at rows, of numbers of one or two dimensions, from any partition to any."""
    dims, k = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    axis = int(rng.integers(dims))
    P_table = partition(rng, grid_shape(rng, dims))
    around = grid_shape(rng, dims) if k == 1 else (*grid_shape(rng, 3)[:2], *(1,) * (dims - 1))
    P_entries = partition(rng, around)
    n, counts = int(rng.integers(1, 8)), rng.integers(0 if rng.random() < 0.1 else 1, 8, k)
    sizes = [n if d == axis else int(rng.integers(1, 4)) for d in range(dims)]
    if rng.random() < 0.5:
        indices = rng.integers(-n, n, counts)
        shapes = blocks(
            P_table, *(lengths(rng, p, s) for p, s in zip(P_table.shape, sizes, strict=True)), world=WORKERS
        )
        return cases.take(P_table, P_entries, indices, axis, shapes)
    sizes[axis : axis + 1] = counts.tolist()
    shapes = blocks(P_entries, *(lengths(rng, p, s) for p, s in zip(around, sizes, strict=True)), world=WORKERS)
    return cases.segment_sum(P_entries, P_table, rng.integers(0, n, counts), n, axis, shapes)


def random_all_to_all(rng: np.random.Generator) -> Case:
    """From any dimension to any other one, which may be split already."""
    P_x = partition(rng, grid_shape(rng, int(rng.integers(2, 4))))
    split_axis, concat_axis = rng.permutation(len(P_x.shape))[:2].tolist()
    shapes = blocks(P_x, *(lengths(rng, p, int(rng.integers(0, 8))) for p in P_x.shape), world=WORKERS)
    return cases.all_to_all(P_x, split_axis, concat_axis, shapes)
