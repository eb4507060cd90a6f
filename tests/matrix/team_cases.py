"""Operators within teams, some of which are not linear: reductions, and values that several workers hold copies of."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.functional.all_sum_reduce import plan_replicated
from distdl_jax.functional.gathering import plan_gather, plan_scatter
from distdl_jax.functional.largest import plan_top_k
from distdl_jax.functional.reductions import plan_reduction
from matrix import reference
from matrix.case import Case, Operator
from matrix.layer_cases import assembled
from matrix.movement_cases import is_whole, listed, movement
from matrix.partitions import On, Shape, block_shapes, blocks


def replicated(P_x: On, axes: Sequence[int], shapes: Shape | Mapping[int, Shape], world: int = 4) -> Case:
    def operator(P: dj.Partition) -> Operator:
        return lambda x: dj.replicated([x], P_x.partition(P), axes)[0]

    return Case(
        f"replicated {P_x} along {tuple(axes)}",
        world,
        block_shapes(P_x, shapes, world),
        operator,
        lambda xs: reference.replicated(xs, P_x.grid, axes),
        lambda P, x: plan_replicated(x, P_x.partition(P), axes),
        linear=False,
    )


def all_reduce(P_x: On, op: str, axes: Sequence[int], shapes: Shape | Mapping[int, Shape], world: int = 4) -> Case:
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


def reduction(P_x: On, op: str, axes: Sequence[int], *sizes: Any, world: int = 4) -> Case:
    """Along dimensions of the whole tensor; every worker has what belongs to its own block."""
    xs = blocks(P_x, *sizes, world=world)

    def along(team: np.ndarray, arrays: list[Any]) -> list[Any]:
        x = assembled(arrays, team)
        rows = jnp.moveaxis(x, axes, range(len(axes)))
        y = reference.reduced(op)(rows.reshape(-1, *rows.shape[len(axes) :]), 0)
        return [jnp.expand_dims(y, axes)] * team.size

    def dense(arrays: list[Any]) -> list[Any]:
        return reference.on_teams(arrays, P_x.grid, axes, lambda team: along(team, arrays))

    return Case(
        f"reduction {op} along {tuple(axes)} of {listed(xs)} {P_x}",
        world,
        xs,
        lambda P: lambda x: getattr(dj.functional, op)(x, P_x.partition(P), axes),
        dense,
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

    def spec(P: dj.Partition) -> dj.TensorSpec:
        return dj.TensorSpec(n, P_x.partition(P), copied)

    held = reference.cut_with_copies(np.zeros(n), P_x.grid, copied)
    return Case(
        f"gather {n} {P_x} copied along {tuple(copied)} to {root}",
        world,
        tuple(held[worker].shape if worker in held else (0,) for worker in range(world)),
        lambda P: lambda x: dj.gather([x], [spec(P)], root)[0],
        lambda xs: reference.gather(xs, P_x.grid, copied, root),
        lambda P, x: plan_gather(x, spec(P), root),
        silent=world == 1,
    )


def scatter(n: Shape, P_y: On, copied: Sequence[int], root: int, world: int = 4) -> Case:
    def spec(P: dj.Partition) -> dj.TensorSpec:
        return dj.TensorSpec(n, P_y.partition(P), copied)

    return Case(
        f"scatter {n} {P_y} copied along {tuple(copied)} from {root}",
        world,
        tuple(n if worker == root else (0,) for worker in range(world)),
        lambda P: lambda x: dj.scatter({"x": x}, {"x": spec(P)}, root)["x"],
        lambda xs: reference.scatter(xs, P_y.grid, copied, root),
        lambda P, x: plan_scatter(x, spec(P), root),
        silent=world == 1,
    )
