"""Entries of the matrix that are primitives: the library's operator, as every worker builds it, and the reference."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import distdl_jax as dj
from distdl_jax import nn
from matrix import reference
from matrix.case import Case
from matrix.partitions import On, Shape, block_shapes


def movement(
    name: str,
    shapes: tuple[Shape, ...],
    layer: Callable[[dj.Partition], Any],
    dense: Callable[[list[Any]], list[Any]],
    silent: bool = False,
    **kinds: bool,
) -> Case:
    """A case of a layer that plans itself; `kinds`: what else a case says."""
    return Case(name, len(shapes), shapes, layer, dense, lambda P, x: layer(P).plan(x), silent=silent, **kinds)


def broadcast(
    P_x: On, P_y: On, shapes: Shape | Mapping[int, Shape], world: int = 4, silent: bool = False, **options: bool
) -> Case:
    return movement(
        f"broadcast {P_x} -> {P_y}{_text(options)}",
        block_shapes(P_x, shapes, world),
        lambda P: nn.Broadcast(P_x.partition(P), P_y.partition(P), **options),
        lambda xs: reference.broadcast(xs, P_x.grid, P_y.grid, **options),
        silent,
    )


def sum_reduce(
    P_x: On, P_y: On, shapes: Shape | Mapping[int, Shape], world: int = 4, silent: bool = False, **options: bool
) -> Case:
    return movement(
        f"sum_reduce {P_x} -> {P_y}{_text(options)}",
        block_shapes(P_x, shapes, world),
        lambda P: nn.SumReduce(P_x.partition(P), P_y.partition(P), **options),
        lambda xs: reference.sum_reduce(xs, P_x.grid, P_y.grid, **options),
        silent,
    )


def all_sum_reduce(P_x: On, axes: Sequence[int], shapes: Shape | Mapping[int, Shape], world: int = 4) -> Case:
    return movement(
        f"all_sum_reduce {P_x} along {tuple(axes)}",
        block_shapes(P_x, shapes, world),
        lambda P: nn.AllSumReduce(P_x.partition(P), tuple(axes)),
        lambda xs: reference.all_sum_reduce(xs, P_x.grid, axes),
        is_whole(P_x, axes),
    )


def repartition(P_x: On, P_y: On, shapes: tuple[Shape, ...], silent: bool = False, **options: bool) -> Case:
    return movement(
        f"repartition {listed(shapes)} {P_x} -> {P_y}{_text(options)}",
        shapes,
        lambda P: nn.Repartition(P_x.partition(P), P_y.partition(P), **options),
        lambda xs: reference.repartition(xs, P_x.grid, P_y.grid, **options),
        silent,
    )


def all_to_all(P_x: On, split_axis: int, concat_axis: int, shapes: tuple[Shape, ...]) -> Case:
    return movement(
        f"all_to_all {listed(shapes)} {P_x} from {concat_axis} to {split_axis}",
        shapes,
        lambda P: nn.AllToAll(P_x.partition(P), split_axis, concat_axis),
        lambda xs: reference.all_to_all(xs, P_x.grid, split_axis, concat_axis),
        is_whole(P_x, (concat_axis,)),
    )


def halo_exchange(P_x: On, shapes: tuple[Shape, ...], *halos: Any, periodic: Sequence[bool] = ()) -> Case:
    """`halos`: per dimension one pair (left, right) for all, or one for each index; or all pairs of each worker."""
    if isinstance(halos[0], Mapping):
        widths = dict(halos[0])
    else:
        lines = [
            [halo] * p if isinstance(halo[0], int) else list(halo) for halo, p in zip(halos, P_x.shape, strict=True)
        ]
        widths = {
            worker: tuple(line[i] for line, i in zip(lines, index, strict=True))
            for index, worker in np.ndenumerate(P_x.grid)
        }
    wraps = tuple(periodic) or (False,) * len(P_x.shape)

    def layer(P: dj.Partition) -> Any:
        return nn.HaloExchange(P_x.partition(P), widths.get(P.rank, ()), periodic)

    return Case(
        f"halo_exchange {listed(shapes)} {P_x} {halos}{f' periodic={wraps}' * any(wraps)}",
        len(shapes),
        shapes,
        layer,
        lambda xs: reference.halo_exchange(xs, P_x.grid, widths, wraps),
        lambda P, x: layer(P).plan(x, halos=widths),
    )


def all_gather(P_x: On, axes: Sequence[int], shapes: tuple[Shape, ...]) -> Case:
    return movement(
        f"all_gather {listed(shapes)} {P_x} along {tuple(axes)}",
        shapes,
        lambda P: nn.AllGather(P_x.partition(P), tuple(axes)),
        lambda xs: reference.all_gather(xs, P_x.grid, axes),
        is_whole(P_x, axes),
    )


def reduce_scatter(P_x: On, axes: Sequence[int], shapes: tuple[Shape, ...]) -> Case:
    return movement(
        f"reduce_scatter {listed(shapes)} {P_x} along {tuple(axes)}",
        shapes,
        lambda P: nn.ReduceScatter(P_x.partition(P), tuple(axes)),
        lambda xs: reference.reduce_scatter(xs, P_x.grid, axes),
        is_whole(P_x, axes),
    )


def take(P_x: On, P_y: On, indices: Any, axis: int, shapes: tuple[Shape, ...], silent: bool = False) -> Case:
    return movement(
        f"take {listed(shapes)} {P_x} -> {P_y} of {np.asarray(indices).tolist()} along {axis}",
        shapes,
        lambda P: nn.Take(P_x.partition(P), indices, axis, P_y.partition(P)),
        lambda xs: reference.take(xs, P_x.grid, P_y.grid, indices, axis),
        silent,
    )


def segment_sum(P_x: On, P_y: On, ids: Any, n: int, axis: int, shapes: tuple[Shape, ...]) -> Case:
    return movement(
        f"segment_sum {listed(shapes)} {P_x} -> {P_y} of {np.asarray(ids).tolist()} to {n} along {axis}",
        shapes,
        lambda P: nn.SegmentSum(P_x.partition(P), ids, n, axis, P_y.partition(P)),
        lambda xs: reference.segment_sum(xs, P_x.grid, P_y.grid, np.asarray(ids), n, axis),
    )


def is_whole(P: On, axes: Sequence[int]) -> bool:
    """Whether a tensor on P is not split along any of `axes`."""
    return all(P.shape[axis] == 1 for axis in axes)


def _text(options: Mapping[str, bool]) -> str:
    return "".join(f" {name}={value}" for name, value in options.items())


def listed(shapes: Sequence[Shape]) -> str:
    """Shapes as a name has them."""
    return "+".join("x".join(map(str, shape)) for shape in shapes)
