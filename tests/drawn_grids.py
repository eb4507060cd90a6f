"""Choices that drawn networks are made of: grids of workers, and one of several things."""

from __future__ import annotations

from typing import Any

import numpy as np

import distdl_jax as dj

Draw = np.random.Generator


def grid(draw: Draw, P: dj.Partition, dims: int) -> dj.Partition:
    """Return some workers of the world, in any order, on a grid."""
    shape, left, world = [1] * dims, P.world.size, dj.Partition.of_workers(P.world, range(P.world.size))
    for d in draw.permutation(dims)[:3]:
        shape[d] = int(draw.integers(1, left + 1))
        left //= shape[d]
    return world.grid(shape, draw.permutation(world.size)[: np.prod(shape)].tolist())


def one_of(draw: Draw, *choices: Any) -> Any:
    """Return one of the choices."""
    return choices[draw.integers(len(choices))]
