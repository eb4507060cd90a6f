"""Latency and bandwidth of messages from their measured times: one line for each range of sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np

from distdl_jax.machine.tables import Segment

MOST_SEGMENTS = 3
"""Short, eager and rendezvous messages."""

SHORTEST = 1e-9
"""Seconds: the least latency, and the least time of a message, where what is subtracted leaves none."""


LEAST_SHARE = 0.01
"""Of the time of the longest message, at least so much is for the bytes."""


def fit_segments(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[tuple[Segment, ...], float]:
    """Return segments whose times are closest to the measured ones, and the largest relative error.

    Among all ways to cut the sizes into three ranges or less, the one with the least sum of squared relative errors in
    which a longer message never takes less time. The first range may have no bandwidth.

    - `sizes`: ascending. - `seconds`: of a message of each.

    >>> sizes = [8, 64, 1024, 8192, 65536, 1048576]
    >>> segments, error = fit_segments(sizes, [1e-6 + n / 1e9 for n in sizes])
    >>> [f"{1e6 * segment.latency:.2f} us" for segment in segments][-1], error < 1e-6
    ('1.00 us', True)
    """
    n, t = np.asarray(sizes, float), np.maximum.accumulate(np.maximum(np.asarray(seconds, float), SHORTEST))
    # Where nothing else fits, since a longer message took no more time: a hundredth of the time is for the bytes.
    best: tuple[Segment, ...] = (Segment(float(t[0]), float(n[-1] / max(t[-1] - t[0], LEAST_SHARE * t[-1]))),)
    least = math.inf
    for ranges in _cuts(len(n)):
        if (segments := _joined(n, t, ranges)) is None:
            continue
        squares = float(np.sum(_errors(segments, n, t) ** 2))
        if squares < least - 1e-12:  # a cut that improves nothing is none: the fewer segments, the earlier they come
            least, best = squares, segments
    return best, float(np.max(np.abs(_errors(best, n, np.maximum(seconds, SHORTEST)))))


def _cuts(count: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the ways to cut so many sizes into ranges; all but the first have two sizes at least."""
    for inner in range(MOST_SEGMENTS):
        for ends in combinations(range(1, count), inner):
            ranges = tuple(pairwise((0, *ends, count)))
            if all(stop - start >= 2 for start, stop in ranges[1:]):
                yield ranges


def _joined(n: np.ndarray, t: np.ndarray, ranges: Sequence[tuple[int, int]]) -> tuple[Segment, ...] | None:
    """Return the segments of these ranges; None where a longer message would take less time than a shorter one."""
    lines = []
    for place, (start, stop) in enumerate(ranges):
        is_short = place == 0 and len(ranges) > 1
        lines.append((_mean(t[:stop]), 0.0) if is_short else _line(n[start:stop], t[start:stop]))
    if lines[-1][1] * n[-1] < LEAST_SHARE * t[-1]:
        return None
    ends = []
    for (one, other), (_, stop) in zip(pairwise(lines), ranges[:-1], strict=True):
        end = _border(one, other, n[stop - 1], n[stop])
        if end is None:
            return None
        ends.append(end)
    return tuple(
        Segment(latency, 1 / per_byte if per_byte > 0 else math.inf, end)
        for (latency, per_byte), end in zip(lines, [*ends, math.inf], strict=True)
    )


def _border(one: tuple[float, float], other: tuple[float, float], low: float, high: float) -> float | None:
    """Return the size at which the second line takes over, between two sizes; None where it is below the first there.

    Where the lines cross, there; else halfway, in logarithms, since nothing says where between the two sizes.
    """
    gaps = [other[0] - one[0] + size * (other[1] - one[1]) for size in (low, high)]
    if gaps[0] >= 0 and gaps[1] >= 0:
        return math.sqrt(low * high)
    if gaps[0] < 0 and gaps[1] < 0:
        return None
    return min(max(low + (high - low) * gaps[0] / (gaps[0] - gaps[1]), low), high)


def _line(n: np.ndarray, t: np.ndarray) -> tuple[float, float]:
    """Return latency and seconds of a byte with the least sum of squared relative errors, neither below 0."""
    if len(n) == 1:
        return float(t[0]) / 2, float(t[0]) / 2 / float(n[0])
    (latency, per_byte), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], axis=1), np.ones(len(n)), rcond=None)
    if per_byte <= 0:
        return _mean(t), 0.0
    if latency <= 0:
        return SHORTEST, float(np.sum(n / t) / np.sum((n / t) ** 2))
    return float(latency), float(per_byte)


def _mean(t: np.ndarray) -> float:
    """Return the number with the least sum of squared errors, relative to these times."""
    return float(np.sum(1 / t) / np.sum(1 / t**2))


def _errors(segments: Sequence[Segment], n: np.ndarray, t: np.ndarray) -> np.ndarray:
    place = np.searchsorted([segment.up_to for segment in segments[:-1]], n)
    fitted = np.array([segment.latency for segment in segments])[place]
    fitted = fitted + n / np.array([segment.bandwidth for segment in segments])[place]
    return np.asarray(fitted / np.maximum(t, SHORTEST) - 1)
