"""Entries of the matrix that are primitives: the library's operator, as every worker builds it, and the reference."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.functional.copies import plan_replicated
from distdl_jax.functional.gathering import plan_gather, plan_scatter
from distdl_jax.functional.largest import plan_top_k
from distdl_jax.functional.reductions import plan_reduction
from matrix import reference
from matrix.case import Case
from matrix.partitions import On, Shape, block_shapes, blocks

Shapes = Shape | Mapping[int, Shape]
"""The same for all workers of a partition, or by worker."""


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


def _replication(
    name: str, layer: Any, P_x: On, P_y: On, shapes: Shapes, world: int = 4, silent: bool = False, **options: bool
) -> Case:
    return movement(
        f"{name} {P_x} -> {P_y}{_text(options)}",
        block_shapes(P_x, shapes, world),
        lambda P: layer(P_x.partition(P), P_y.partition(P), **options),
        lambda xs: getattr(reference, name)(xs, P_x.grid, P_y.grid, **options),
        silent,
    )


broadcast = partial(_replication, "broadcast", nn.Broadcast)
sum_reduce = partial(_replication, "sum_reduce", nn.SumReduce)


def all_sum_reduce(P_x: On, axes: Sequence[int], shapes: Shapes, world: int = 4) -> Case:
    return movement(
        f"all_sum_reduce {P_x} along {tuple(axes)}",
        block_shapes(P_x, shapes, world),
        lambda P: nn.AllSumReduce(P_x.partition(P), tuple(axes)),
        lambda xs: reference.all_sum_reduce(xs, P_x.grid, axes),
        is_whole(P_x, axes),
    )


def all_reduce(P_x: On, op: str, axes: Sequence[int], shapes: Shapes, world: int = 4) -> Case:
    ordered = op in ("max", "min")
    return movement(
        f"all_{op} {P_x} along {tuple(axes)}",
        block_shapes(P_x, shapes, world),
        lambda P: nn.AllReduce(P_x.partition(P), op, tuple(axes)),
        lambda xs: reference.all_reduce(xs, P_x.grid, axes, op),
        is_whole(P_x, axes),
        any_dtype=ordered,
        any_complex=not ordered,
        linear=False,
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
        widths = P_x.by_worker(
            [[halo] * p if isinstance(halo[0], int) else halo for halo, p in zip(halos, P_x.shape, strict=True)]
        )
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


def _along(name: str, layer: Any, P_x: On, axes: Sequence[int], shapes: tuple[Shape, ...]) -> Case:
    return movement(
        f"{name} {listed(shapes)} {P_x} along {tuple(axes)}",
        shapes,
        lambda P: layer(P_x.partition(P), tuple(axes)),
        lambda xs: getattr(reference, name)(xs, P_x.grid, axes),
        is_whole(P_x, axes),
    )


all_gather = partial(_along, "all_gather", nn.AllGather)
reduce_scatter = partial(_along, "reduce_scatter", nn.ReduceScatter)


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


def replicated(P_x: On, axes: Sequence[int], shapes: Shapes, world: int = 4) -> Case:
    return Case(
        f"replicated {P_x} along {tuple(axes)}",
        world,
        block_shapes(P_x, shapes, world),
        lambda P: lambda x: dj.replicated([x], P_x.partition(P), axes)[0],
        lambda xs: reference.replicated(xs, P_x.grid, axes),
        lambda P, x: plan_replicated(x, P_x.partition(P), axes),
        linear=False,
    )


def reduction(P_x: On, op: str, axes: Sequence[int], *sizes: Any, world: int = 4) -> Case:
    """Along dimensions of the whole tensor; every worker has what belongs to its own block."""
    xs = blocks(P_x, *sizes, world=world)

    def along(team: np.ndarray, arrays: list[Any]) -> list[Any]:
        rows = jnp.moveaxis(reference.assembled(arrays, team), axes, range(len(axes)))
        y = reference.reduced(op)(rows.reshape(-1, *rows.shape[len(axes) :]), 0)
        return [jnp.expand_dims(y, axes)] * team.size

    return Case(
        f"reduction {op} along {tuple(axes)} of {listed(xs)} {P_x}",
        world,
        xs,
        lambda P: lambda x: getattr(dj.functional, op)(x, P_x.partition(P), axes),
        lambda arrays: reference.on_teams(arrays, P_x.grid, axes, lambda team: along(team, arrays)),
        lambda P, x: plan_reduction(x, P_x.partition(P), op, tuple(axes)),
        any_dtype=op in ("max", "min"),
        any_complex=op in ("sum", "mean"),
        silent=is_whole(P_x, axes),
        linear=False,
        exact=op in ("max", "min", "sum"),
    )


def top_k(P_x: On, k: int, axis: int, shapes: tuple[Shape, ...]) -> Case:
    """Of the values; `tests/functional/test_top_k.py` is about the indices."""
    return Case(
        f"top_k of {k} {listed(shapes)} {P_x} along {axis}",
        len(shapes),
        shapes,
        lambda P: lambda x: dj.functional.top_k(x, P_x.partition(P), k, axis)[0],
        lambda xs: reference.top_k(xs, P_x.grid, k, axis)[0],
        lambda P, x: plan_top_k(x, P_x.partition(P), k, axis),
        any_dtype=False,
        any_complex=False,
        silent=is_whole(P_x, (axis,)),
        linear=False,
    )


def gather(n: Shape, P_x: On, copied: Sequence[int], root: int, world: int = 4) -> Case:
    """Of a tensor of n_0 x ... x n_{D-1}, of which the workers along the dimensions `copied` hold copies."""
    held = reference.cut_with_copies(np.zeros(n), P_x.grid, copied)
    return Case(
        f"gather {n} {P_x} copied along {tuple(copied)} to {root}",
        world,
        tuple(held[worker].shape if worker in held else (0,) for worker in range(world)),
        lambda P: lambda x: dj.gather([x], [dj.TensorSpec(n, P_x.partition(P), copied)], root)[0],
        lambda xs: reference.gather(xs, P_x.grid, copied, root),
        lambda P, x: plan_gather(x, dj.TensorSpec(n, P_x.partition(P), copied), root),
        silent=world == 1,
    )


def scatter(n: Shape, P_y: On, copied: Sequence[int], root: int, world: int = 4) -> Case:
    return Case(
        f"scatter {n} {P_y} copied along {tuple(copied)} from {root}",
        world,
        tuple(n if worker == root else (0,) for worker in range(world)),
        lambda P: lambda x: dj.scatter({"x": x}, {"x": dj.TensorSpec(n, P_y.partition(P), copied)}, root)["x"],
        lambda xs: reference.scatter(xs, P_y.grid, copied, root),
        lambda P, x: plan_scatter(x, dj.TensorSpec(n, P_y.partition(P), copied), root),
        silent=world == 1,
    )


def is_whole(P: On, axes: Sequence[int]) -> bool:
    """Whether a tensor on P is not split along any of `axes`."""
    return all(P.shape[axis] == 1 for axis in axes)


def _text(options: Mapping[str, bool]) -> str:
    return "".join(f" {name}={value}" for name, value in options.items())


def listed(shapes: Sequence[Shape]) -> str:
    """Shapes as a name has them."""
    return "+".join("x".join(map(str, shape)) for shape in shapes)
