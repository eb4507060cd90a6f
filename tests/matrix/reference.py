"""The primitives on all workers' blocks at once, in numpy: what the tests compare with.

`blocks` holds one array per world rank; a *grid* is an array of world ranks in the shape of a partition. Nothing here
comes from the library: numpy's broadcasting finds the sources of a broadcast, `array_split` the balanced blocks. Of
blocks that JAX traces it is the same in jax.numpy.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Blocks = list[Any]
Grid = np.ndarray


def sources(source: Grid, copies: Grid, transpose_src: bool = False, transpose_dest: bool = False) -> Grid:
    """For each worker of `copies`, the worker of `source` whose block it gets."""
    found = np.broadcast_to(source.T if transpose_src else source, (copies.T if transpose_dest else copies).shape)
    return found.T if transpose_dest else found


def broadcast(blocks: Blocks, P_x: Grid, P_y: Grid, preserve_batch: bool = True, **transposed: bool) -> Blocks:
    """Every worker of P_y gets its source's block."""
    roots = sources(P_x, P_y, **transposed)
    copies = {worker: blocks[root] for worker, root in zip(P_y.flat, roots.flat, strict=True)}
    return with_placeholders(blocks, P_x, copies, preserve_batch)


def sum_reduce(
    blocks: Blocks, P_x: Grid, P_y: Grid, transpose_src: bool = False, transpose_dest: bool = False, **options: bool
) -> Blocks:
    """Every worker of P_y gets the sum over the workers of P_x that it would broadcast to."""
    roots = sources(P_y, P_x, transpose_dest, transpose_src)
    sums = {
        root: total(blocks[worker] for worker, other in zip(P_x.flat, roots.flat, strict=True) if other == root)
        for root in P_y.flat
    }
    return with_placeholders(blocks, P_x, sums, **options)


def all_sum_reduce(blocks: Blocks, P_x: Grid, axes: Sequence[int]) -> Blocks:
    """Every worker gets the sum over those that agree with it outside `axes`."""
    return on_teams(blocks, P_x, axes, lambda team: [total(blocks[w] for w in team.flat)] * team.size)


def replicated(blocks: Blocks, P_x: Grid, axes: Sequence[int]) -> Blocks:
    """Every worker keeps its copy; the gradient is summed over all copies, and so are cotangents of that."""

    @jax.custom_vjp
    def copies(blocks: Blocks) -> Blocks:
        return blocks

    copies.defvjp(lambda blocks: (copies(blocks), None), lambda _, dys: (all_sum_reduce(dys, P_x, axes),))
    return copies(blocks)


def all_reduce(blocks: Blocks, P_x: Grid, axes: Sequence[int], op: str) -> Blocks:
    """Every worker gets jnp's reduction over those that agree with it outside `axes`, and shares JAX's derivative."""
    of = reduced(op)
    return on_teams(blocks, P_x, axes, lambda team: [of(jnp.stack([blocks[w] for w in team.flat]), 0)] * team.size)


def reduced(op: str) -> Callable[[Any, int], Any]:
    """jnp's reduction along an axis."""
    return getattr(jnp, op) if op not in ("max", "min") else partial(_extremum, getattr(jnp, op))


def _extremum(of: Callable[[Any, int], Any], x: Any, axis: int) -> Any:
    """As jnp, but for its derivative in float64: XLA may compute x twice, an ulp apart, and then jnp finds none."""
    if x.dtype != np.float64:
        return of(x, axis)
    y = jax.lax.stop_gradient(of(x, axis))
    attained = jax.lax.stop_gradient(abs(x - y) <= 1e-12 * abs(y))
    shares = attained / attained.sum(axis)
    return y + (shares * (x - jax.lax.stop_gradient(x))).sum(axis)


def repartition(blocks: Blocks, P_x: Grid, P_y: Grid, preserve_batch: bool = True) -> Blocks:
    """Every worker of P_y gets its balanced block of the whole tensor."""
    return with_placeholders(blocks, P_x, cut(assembled(blocks, P_x), P_y), preserve_batch)


def all_to_all(blocks: Blocks, P_x: Grid, split_axis: int, concat_axis: int) -> Blocks:
    """Every worker along `concat_axis` gets its balanced block along `split_axis`."""
    lengths = list(P_x.shape)
    lengths[split_axis], lengths[concat_axis] = lengths[split_axis] * lengths[concat_axis], 1
    P_y = np.zeros(lengths, int)
    for index, worker in np.ndenumerate(P_x):
        place = list(index)
        place[split_axis], place[concat_axis] = index[split_axis] * P_x.shape[concat_axis] + index[concat_axis], 0
        P_y[tuple(place)] = worker
    return repartition(blocks, P_x, P_y)


def top_k(blocks: Blocks, P_x: Grid, k: int, axis: int) -> tuple[Blocks, Blocks]:
    """Every worker gets JAX's largest values, and their indices, along `axis` of the blocks along it, side by side."""

    def largest(team: Grid) -> Blocks:
        line = jnp.concatenate([blocks[worker] for worker in team.flat], axis)
        values, places = jax.lax.top_k(jnp.moveaxis(line, axis, -1), k)
        return [(jnp.moveaxis(values, -1, axis), jnp.moveaxis(places, -1, axis))] * team.size

    both = on_teams(blocks, P_x, [axis], largest)
    pairs = [pair if isinstance(pair, tuple) else (pair, np.zeros(0, np.int32)) for pair in both]
    return [values for values, _ in pairs], [places for _, places in pairs]


def gather(blocks: Blocks, P_x: Grid, copied: Sequence[int], root: int) -> Blocks:
    """The root gets the whole tensor, from the first copy of each block; the others are left with nothing."""
    first = P_x[tuple(0 if d in copied else slice(None) for d in range(P_x.ndim))]
    whole = assembled(blocks, np.asarray(first))
    nothing = dict.fromkeys(P_x.flat, np.zeros(0, whole.dtype))
    return [whole if worker == root else nothing.get(worker, x) for worker, x in enumerate(blocks)]


def scatter(blocks: Blocks, P_y: Grid, copied: Sequence[int], root: int) -> Blocks:
    """Every worker of P_y gets its block of the tensor that the root has, and copies of a block are the same."""
    results = {root: np.zeros(0, blocks[root].dtype)} | cut_with_copies(blocks[root], P_y, copied)
    return [results.get(worker, x) for worker, x in enumerate(blocks)]


def cut_with_copies(whole: Any, grid: Grid, copied: Sequence[int]) -> dict[int, Any]:
    """The balanced blocks, by worker, of which the workers along the dimensions `copied` have the same."""
    results = {}
    for index in np.ndindex(*(p if d in copied else 1 for d, p in enumerate(grid.shape))):
        results |= cut(whole, np.asarray(grid[tuple(i if d in copied else slice(None) for d, i in enumerate(index))]))
    return results


def halo_exchange(blocks: Blocks, P_x: Grid, halos: Mapping[int, Any], periodic: Sequence[bool]) -> Blocks:
    """Every worker gets a slice of the whole tensor; `halos` has its widths, (left, right) by dimension."""
    whole = assembled(blocks, P_x)
    lines = [np.moveaxis(P_x, d, 0).reshape(p, -1)[:, 0] for d, p in enumerate(P_x.shape)]
    stops = [np.cumsum([blocks[worker].shape[d] for worker in line]) for d, line in enumerate(lines)]
    wider = {}
    for index, worker in np.ndenumerate(P_x):
        block = whole
        for d, (i, wraps) in enumerate(zip(index, periodic, strict=True)):
            left, right = halos[worker][d]
            places = np.arange(stops[d][i] - blocks[worker].shape[d] - left, stops[d][i] + right)
            if not wraps:
                places = places[(places >= 0) & (places < whole.shape[d])]
            block = np.take(block, places, axis=d, mode="wrap")
        wider[worker] = block
    return with_placeholders(blocks, P_x, wider)


def take(blocks: Blocks, P_x: Grid, P_y: Grid, indices: Any, axis: int) -> Blocks:
    """Every worker of P_y gets its balanced block of the rows with these numbers."""
    return with_placeholders(blocks, P_x, cut(np.take(assembled(blocks, P_x), indices, axis), P_y))


def segment_sum(blocks: Blocks, P_x: Grid, P_y: Grid, ids: np.ndarray, n: int, axis: int) -> Blocks:
    """Every worker of P_y gets its balanced block of the sums of the entries with the same number."""
    x = assembled(blocks, P_x)
    y = np.zeros((*x.shape[:axis], n, *x.shape[axis + ids.ndim :]), x.dtype)
    for place, number in np.ndenumerate(ids):
        row = (slice(None),) * axis
        y[(*row, number)] = total([y[(*row, number)], x[row + place]])
    return with_placeholders(blocks, P_x, cut(y, P_y))


def all_gather(blocks: Blocks, P_x: Grid, axes: Sequence[int]) -> Blocks:
    """Every worker gets the blocks of those that agree with it outside `axes`, side by side."""
    return on_teams(blocks, P_x, axes, lambda team: [assembled(blocks, team)] * team.size)


def reduce_scatter(blocks: Blocks, P_x: Grid, axes: Sequence[int]) -> Blocks:
    """Every worker gets its balanced block, along `axes`, of the sum over those that agree with it outside them."""

    def pieces(team: Grid) -> Blocks:
        mine = cut(total(blocks[worker] for worker in team.flat), team)
        return [mine[worker] for worker in team.flat]

    return on_teams(blocks, P_x, axes, pieces)


def linear(blocks: Blocks, params: Blocks, P_x: Grid, P_y: Grid, stored: Grid) -> Blocks:
    """x W^T + b of the assembled tensors, cut into the blocks of y; W is `stored` on so many workers a dimension."""
    weight = assembled([p["weight"] for p in params], stored)
    bias = np.concatenate([params[worker]["bias"] for worker in stored[:, 0]])
    return of_whole(blocks, P_x, P_y, lambda x: x @ weight.T + bias)


def of_whole(blocks: Blocks, P_x: Grid, P_y: Grid, whole: Callable[[Any], Any]) -> Blocks:
    """`whole`, a layer, of the assembled tensor, cut into the blocks of y."""
    y = whole(assembled(blocks, P_x))
    results = cut(y, P_y)
    return [results.get(worker, np.zeros((len(x), 0), y.dtype)) for worker, x in enumerate(blocks)]


def with_placeholders(blocks: Blocks, P_x: Grid, results: dict[int, Any], preserve_batch: bool = True) -> Blocks:
    """What each worker has in the end: what it holds, a zero-volume array on the rest of P_x, elsewhere what it had."""
    result = []
    for worker, x in enumerate(blocks):
        if worker in results:
            result.append(results[worker])
        elif worker in P_x:
            result.append(np.zeros((x.shape[0], 0) if preserve_batch and x.ndim else (0,), x.dtype))
        else:
            result.append(x)
    return result


def on_teams(blocks: Blocks, P_x: Grid, axes: Sequence[int], team_result: Callable[[Grid], Blocks]) -> Blocks:
    """`team_result`, a list in the order of the team, for each slice of the grid along `axes`."""
    result = list(blocks)
    for index in np.ndindex(*(1 if d in axes else p for d, p in enumerate(P_x.shape))):
        team = P_x[tuple(slice(None) if d in axes else slice(i, i + 1) for d, i in enumerate(index))]
        for worker, y in zip(team.flat, team_result(team), strict=True):
            result[worker] = y
    return result


def total(terms: Iterable[Any]) -> Any:
    """The sum; of booleans, their "or"."""
    return reduce(operator.add, terms)


def assembled(blocks: Blocks, grid: Grid) -> Any:
    """The whole tensor: the blocks side by side in the order of the grid."""
    if grid.ndim == 0:
        return blocks[int(grid)]
    parts = [assembled(blocks, np.asarray(part)) for part in grid]
    return numpy_of(parts[0]).concatenate(parts, -grid.ndim)


def cut(whole: Any, grid: Grid) -> dict[int, Any]:
    """The balanced blocks, by worker."""
    if grid.ndim == 0:
        return {int(grid): whole}
    parts = zip(numpy_of(whole).array_split(whole, len(grid), -grid.ndim), grid, strict=True)
    return {worker: block for part, of in parts for worker, block in cut(part, np.asarray(of)).items()}


def numpy_of(x: Any) -> Any:
    """Numpy, or jax.numpy where x is traced."""
    return np if isinstance(x, np.ndarray) else jnp
