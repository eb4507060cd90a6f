"""Entries of the matrix that are primitives: the library's operator, as every worker builds it, and the reference."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import distdl_jax as dj
from distdl_jax import nn
from matrix import reference
from matrix.case import Case
from matrix.partitions import On, Shape, block_shapes


def broadcast(
    P_x: On, P_y: On, shapes: Shape | Mapping[int, Shape], world: int = 4, silent: bool = False, **options: bool
) -> Case:
    def layer(P: dj.Partition) -> Any:
        return nn.Broadcast(P_x.partition(P), P_y.partition(P), **options)

    return Case(
        f"broadcast {P_x} -> {P_y}{_text(options)}",
        world,
        block_shapes(P_x, shapes, world),
        layer,
        lambda xs: reference.broadcast(xs, P_x.grid, P_y.grid, **options),
        lambda P, x: layer(P).plan(x),
        silent=silent,
    )


def sum_reduce(
    P_x: On, P_y: On, shapes: Shape | Mapping[int, Shape], world: int = 4, silent: bool = False, **options: bool
) -> Case:
    def layer(P: dj.Partition) -> Any:
        return nn.SumReduce(P_x.partition(P), P_y.partition(P), **options)

    return Case(
        f"sum_reduce {P_x} -> {P_y}{_text(options)}",
        world,
        block_shapes(P_x, shapes, world),
        layer,
        lambda xs: reference.sum_reduce(xs, P_x.grid, P_y.grid, **options),
        lambda P, x: layer(P).plan(x),
        silent=silent,
    )


def all_sum_reduce(P_x: On, axes: Sequence[int], shapes: Shape | Mapping[int, Shape], world: int = 4) -> Case:
    def layer(P: dj.Partition) -> Any:
        return nn.AllSumReduce(P_x.partition(P), tuple(axes))

    return Case(
        f"all_sum_reduce {P_x} along {tuple(axes)}",
        world,
        block_shapes(P_x, shapes, world),
        layer,
        lambda xs: reference.all_sum_reduce(xs, P_x.grid, axes),
        lambda P, x: layer(P).plan(x),
        silent=all(P_x.shape[axis] == 1 for axis in axes),
    )


def repartition(P_x: On, P_y: On, shapes: tuple[Shape, ...], silent: bool = False, **options: bool) -> Case:
    def layer(P: dj.Partition) -> Any:
        return nn.Repartition(P_x.partition(P), P_y.partition(P), **options)

    return Case(
        f"repartition {listed(shapes)} {P_x} -> {P_y}{_text(options)}",
        len(shapes),
        shapes,
        layer,
        lambda xs: reference.repartition(xs, P_x.grid, P_y.grid, **options),
        lambda P, x: layer(P).plan(x),
        silent=silent,
    )


def all_to_all(P_x: On, split_axis: int, concat_axis: int, shapes: tuple[Shape, ...]) -> Case:
    def layer(P: dj.Partition) -> Any:
        return nn.AllToAll(P_x.partition(P), split_axis, concat_axis)

    return Case(
        f"all_to_all {listed(shapes)} {P_x} from {concat_axis} to {split_axis}",
        len(shapes),
        shapes,
        layer,
        lambda xs: reference.all_to_all(xs, P_x.grid, split_axis, concat_axis),
        lambda P, x: layer(P).plan(x),
        silent=P_x.shape[concat_axis] == 1,
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
    def layer(P: dj.Partition) -> Any:
        return nn.AllGather(P_x.partition(P), tuple(axes))

    return Case(
        f"all_gather {listed(shapes)} {P_x} along {tuple(axes)}",
        len(shapes),
        shapes,
        layer,
        lambda xs: reference.all_gather(xs, P_x.grid, axes),
        lambda P, x: layer(P).plan(x),
        silent=all(P_x.shape[axis] == 1 for axis in axes),
    )


def reduce_scatter(P_x: On, axes: Sequence[int], shapes: tuple[Shape, ...]) -> Case:
    def layer(P: dj.Partition) -> Any:
        return nn.ReduceScatter(P_x.partition(P), tuple(axes))

    return Case(
        f"reduce_scatter {listed(shapes)} {P_x} along {tuple(axes)}",
        len(shapes),
        shapes,
        layer,
        lambda xs: reference.reduce_scatter(xs, P_x.grid, axes),
        lambda P, x: layer(P).plan(x),
        silent=all(P_x.shape[axis] == 1 for axis in axes),
    )


def take(P_x: On, P_y: On, indices: Any, axis: int, shapes: tuple[Shape, ...], silent: bool = False) -> Case:
    def layer(P: dj.Partition) -> Any:
        return nn.Take(P_x.partition(P), indices, axis, P_y.partition(P))

    return Case(
        f"take {listed(shapes)} {P_x} -> {P_y} of {np.asarray(indices).tolist()} along {axis}",
        len(shapes),
        shapes,
        layer,
        lambda xs: reference.take(xs, P_x.grid, P_y.grid, indices, axis),
        lambda P, x: layer(P).plan(x),
        silent=silent,
    )


def segment_sum(P_x: On, P_y: On, ids: Any, n: int, axis: int, shapes: tuple[Shape, ...], silent: bool = False) -> Case:
    def layer(P: dj.Partition) -> Any:
        return nn.SegmentSum(P_x.partition(P), ids, n, axis, P_y.partition(P))

    return Case(
        f"segment_sum {listed(shapes)} {P_x} -> {P_y} of {np.asarray(ids).tolist()} to {n} along {axis}",
        len(shapes),
        shapes,
        layer,
        lambda xs: reference.segment_sum(xs, P_x.grid, P_y.grid, np.asarray(ids), n, axis),
        lambda P, x: layer(P).plan(x),
        silent=silent,
    )


def _text(options: Mapping[str, bool]) -> str:
    return "".join(f" {name}={value}" for name, value in options.items())


def listed(shapes: Sequence[Shape]) -> str:
    """Shapes as a name has them."""
    return "+".join("x".join(map(str, shape)) for shape in shapes)
