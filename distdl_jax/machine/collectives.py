"""The time of a collective operation: measured, and by MPICH's algorithms where it was not.

Source: MPICH's maint/tuning/coll/mpir/generic.json and src/mpi/coll/cvars.txt (2026); Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH" (2005).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from distdl_jax.machine.tables import CollectivePoint

Seconds = Callable[[np.ndarray], np.ndarray]
"""The time of something as a function of bytes."""

KINDS = ("allreduce", "bcast", "reduce", "allgather", "reduce_scatter")

_KIB = 1024


def by_algorithm(kind: str, size: int, step: Seconds, add: Seconds) -> Seconds:
    """Return the time of MPICH's algorithm for a team of `size` workers of one level.

    - `step`: of a message. - `add`: of the sum of two arrays.
    """
    if size == 1:
        return np.zeros_like

    def seconds(n: np.ndarray) -> np.ndarray:
        return _ALGORITHMS[kind](n, size, step, add)

    return seconds


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def _tree(n: np.ndarray, size: int, step: Seconds) -> np.ndarray:
    """Return the time of a tree along which the whole array goes."""
    return math.ceil(math.log2(size)) * step(n)


def _halving(n: np.ndarray, size: int, step: Seconds) -> np.ndarray:
    """Return the time of messages of n/2, n/4 and so on, until each worker has its part of n."""
    sizes = [n * share for share in _shares(size)]
    return np.sum([step(sent) for sent in sizes], axis=0)


def _shares(size: int) -> list[float]:
    left, shares = size, []
    while left > 1:
        shares.append((left // 2) / size)
        left -= left // 2
    return shares


def _bcast(n: np.ndarray, size: int, step: Seconds, add: Seconds) -> np.ndarray:
    scattered, part = _halving(n, size, step), step(n / size)
    doubling, ring = scattered + _halving(n, size, step), scattered + (size - 1) * part
    long = np.where(n <= 512 * _KIB, doubling, ring) if _is_power_of_two(size) else ring
    return np.where((n <= 12 * _KIB) | (size < 8), _tree(n, size, step), long)


def _reduce(n: np.ndarray, size: int, step: Seconds, add: Seconds) -> np.ndarray:
    by_tree = _tree(n, size, step) + _tree(n, size, add)
    return np.where(n <= 2 * _KIB, by_tree, _scattered_sum(n, size, step, add))


def _allreduce(n: np.ndarray, size: int, step: Seconds, add: Seconds) -> np.ndarray:
    fold = 0 * n if _is_power_of_two(size) else 2 * step(n) + add(n)
    power = 2 ** int(math.log2(size))
    doubling = fold + _tree(n, power, step) + _tree(n, power, add)
    return np.where(n <= max(8, 4 * (power - 1)), doubling, fold + _scattered_sum(n, power, step, add))


def _scattered_sum(n: np.ndarray, size: int, step: Seconds, add: Seconds) -> np.ndarray:
    """Return the time of Rabenseifner's algorithm: a reduce-scatter, and messages of the same sizes in reverse."""
    return 2 * _halving(n, size, step) + add(n * (size - 1) / size)


def _allgather(n: np.ndarray, size: int, step: Seconds, add: Seconds) -> np.ndarray:
    doubling, ring = _halving(n, size, step), (size - 1) * step(n / size)
    return np.where(n < (512 if _is_power_of_two(size) else 80) * _KIB, doubling, ring)


def _reduce_scatter(n: np.ndarray, size: int, step: Seconds, add: Seconds) -> np.ndarray:
    halving, pairwise_exchange = _halving(n, size, step), (size - 1) * step(n / size)
    return np.where(n < 512 * _KIB, halving, pairwise_exchange) + add(n * (size - 1) / size)


_ALGORITHMS = {
    "allreduce": _allreduce,
    "bcast": _bcast,
    "reduce": _reduce,
    "allgather": _allgather,
    "reduce_scatter": _reduce_scatter,
}


def by_points(points: Sequence[CollectivePoint], size: int, algorithm: Callable[[int], Seconds]) -> Seconds:
    """Return measured times, between them straight lines in logarithms of sizes and times.

    Beyond the sizes that were measured, in bytes or workers, the times of the algorithm are scaled to meet them.

    - `algorithm`: the times of a team of so many workers.
    """
    if size == 1 or not points:
        return algorithm(size)
    sizes = sorted({point.workers for point in points})
    nearest = min(max(size, sizes[0]), sizes[-1])
    below = max(each for each in sizes if each <= nearest)
    above = min(each for each in sizes if each >= nearest)
    low, high = (_curve([p for p in points if p.workers == each], algorithm(each)) for each in (below, above))
    share = math.log(nearest / below) / math.log(above / below) if above > below else 0.0

    def seconds(n: np.ndarray) -> np.ndarray:
        between = low(n) ** (1 - share) * high(n) ** share
        return between if nearest == size else between * algorithm(size)(n) / algorithm(nearest)(n)

    return seconds


def _curve(points: Sequence[CollectivePoint], algorithm: Seconds) -> Seconds:
    """Return the times of one size of team."""
    ordered = sorted(points, key=lambda point: point.bytes)
    sizes = np.array([point.bytes for point in ordered])
    times = np.array([point.seconds for point in ordered])

    def seconds(n: np.ndarray) -> np.ndarray:
        inside = np.clip(n, sizes[0], sizes[-1])
        logs = np.interp(np.log1p(inside), np.log1p(sizes), np.log(times))
        scale = np.where(inside == n, 1.0, algorithm(n) / algorithm(inside))
        return np.exp(logs) * scale

    return seconds


def nearest_hosts(points: Sequence[CollectivePoint], hosts: int) -> list[CollectivePoint]:
    """Return, of the points on one host or on several, for each size of team those on the most alike number."""
    alike = [point for point in points if (point.hosts > 1) == (hosts > 1)]
    best = {
        workers: min({p.hosts for p in alike if p.workers == workers}, key=lambda n: abs(math.log(n / hosts)))
        for workers in {point.workers for point in alike}
    }
    return [point for point in alike if point.hosts == best[point.workers]]


def is_ascending(numbers: Sequence[float]) -> bool:
    """Return whether each number is larger than the one before."""
    return all(one < two for one, two in pairwise(numbers))
