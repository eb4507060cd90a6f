"""How fast a worker computes a shape: from shapes that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from distdl_jax.kernels.problem import Problem
from distdl_jax.machine.tables import Compute, RatePoint
from distdl_jax.plans.work import Work

USUAL = {"matrix product": 0.6, "convolution": 0.3, "layer": 0.2, "fft": 0.1, "optimiser": 0.04}
"""Shares of the most that a core can do, where no such shape was measured; kinds that are not here read and write.

A "layer" is one whose arithmetic is known as a whole only.
"""

THIN, THIN_SHARE = 16, 0.2
"""Below so many rows, columns or channels, this share."""


def shape_of(work: Work) -> tuple[int, ...]:
    """Return the shape of a worker's arithmetic as a machine file has it, or () where there is none."""
    match work.shape:
        case Problem(weight=(c_out, c_in, *kernel), groups=groups) as problem:
            extents = [max(n, 1) for n in problem.y[2:]]
            tile = round(math.prod(extents) ** (1 / max(len(extents), 1)))
            return c_in, max(c_out // groups, 1), tile, math.prod(kernel)
        case tuple() as shape:
            return tuple(n for n in shape if isinstance(n, int))
    return ()


def rate(compute: Compute, kind: str, direction: str, dtype: str, shape: tuple[int, ...]) -> float:
    """Return flops per second of one worker while all of its host compute; infinite where only bytes count."""
    alike = [point for point in compute.points if point.kind == kind]
    for wanted in ((dtype, direction), (dtype, None), (None, direction), (None, None)):
        points = [point for point in alike if _is(point, *wanted)]
        if points:
            return float(_weights(points, shape) @ [_scaled(point, dtype, compute) for point in points])
    if kind not in USUAL:
        return math.inf
    thin = any(0 < n < THIN for n in shape[:2])
    return _peak(compute, dtype) * (min(THIN_SHARE, USUAL[kind]) if thin else USUAL[kind])


def _is(point: RatePoint, dtype: str | None, direction: str | None) -> bool:
    return dtype in (None, point.dtype) and direction in (None, point.direction)


def _scaled(point: RatePoint, dtype: str, compute: Compute) -> float:
    """Return the point's rate in another dtype: as much more or less as the core can do at most."""
    return point.rate * _peak(compute, dtype) / _peak(compute, point.dtype)


def _peak(compute: Compute, dtype: str) -> float:
    return compute.float64 if dtype in ("float64", "complex128") else compute.float32


def _weights(points: Sequence[RatePoint], shape: tuple[int, ...]) -> np.ndarray:
    """Return weights that fall with the square of the distance in logarithms: a point's own shape has its rate."""
    fitting = np.array([len(point.shape) == len(shape) for point in points])
    if not shape or not fitting.any():
        return np.full(len(points), 1 / len(points))
    logs = np.log2(np.maximum([point.shape if fits else shape for point, fits in zip(points, fitting, strict=True)], 1))
    distances = np.sum((logs - np.log2(np.maximum(shape, 1))) ** 2, axis=1)
    weights = np.where(fitting, 1 / np.maximum(distances, 1e-9) ** 2, 0.0)
    return weights / weights.sum()
