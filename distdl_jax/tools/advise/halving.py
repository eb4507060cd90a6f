"""Which plan is faster, by the times of rounds in which each took one step: paired differences, and who stays."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CHECKS = (3, 6, 12, 24, 48, 96)
"""After how many rounds plans that are slower leave; after the last, measuring ends."""

ENOUGH = 12
"""Measuring ends after so many rounds, or more, once the rest are ties."""

TIE = 0.02
"""Plans whose difference is no surer than chance, and at most this share, are a tie."""


@dataclass(frozen=True)
class Difference:
    """By what share one plan takes longer than another, and within which limits at 95 %.

    - `rounds`: in which both were measured. With fewer than two there are no limits.
    """

    mean: float
    low: float
    high: float
    rounds: int

    @classmethod
    def between(cls, slower: np.ndarray, faster: np.ndarray) -> Difference:
        """Return the difference of the times of two plans, round by round, not a number where one took no step."""
        logs = np.log(slower / faster)
        mean, half, n = _trimmed(logs[np.isfinite(logs)])
        return cls(math.expm1(mean), math.expm1(mean - half), _expm1(mean + half), n)

    def __str__(self) -> str:
        limits = "" if math.isinf(self.high) else f" ({_percent(self.low)} to {_percent(self.high)})"
        return f"{_percent(self.mean)} %{limits}, {self.rounds} round{'' if self.rounds == 1 else 's'}"


def _trimmed(values: np.ndarray) -> tuple[float, float, int]:
    """Return the mean without a fifth at either end, half its interval at 95 %, and the number of values.

    A round in which the machine did something else counts little so. Source: Yuen (1974), Biometrika 61.
    """
    n = len(values)
    ordered, cut = np.sort(values), n // 5
    kept = ordered[cut : n - cut]
    if n < 2:
        return float(kept.mean()), math.inf, n
    spread = float(np.clip(ordered, kept[0], kept[-1]).std(ddof=1))
    half = student(len(kept) - 1) * spread * math.sqrt((n - 1) / (len(kept) * (len(kept) - 1)))
    return float(kept.mean()), half, n


def student(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t, within 1 % for 2 degrees of freedom or more.

    >>> [round(student(n), 2) for n in (2, 5, 11, 1000)]
    [4.27, 2.57, 2.2, 1.96]
    """
    if freedom == 1:
        return 12.706
    z = NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def staying(times: np.ndarray, plans: Sequence[int], obvious: Collection[int]) -> list[int]:
    """Return the plans that are not slower than the fastest, at 95 %, and the better of the obvious ones.

    - `times`: seconds: rounds x plans. `plans`: those that took a step in every round.
    """
    best = fastest(times, plans)
    slower = {plan for plan in plans if Difference.between(times[:, plan], times[:, best]).low > 0}
    if rivals := [plan for plan in plans if plan in obvious]:
        slower.discard(fastest(times, rivals))
    return [plan for plan in plans if plan not in slower]


def is_decided(times: np.ndarray, plans: Sequence[int]) -> bool:
    """Say whether more rounds would change nothing: each plan is slower than the fastest, or as fast within `TIE`."""
    best = fastest(times, plans)
    others = [Difference.between(times[:, plan], times[:, best]) for plan in plans if plan != best]
    return len(times) >= CHECKS[-1] or (
        len(times) >= ENOUGH and all(other.low > 0 or other.high <= TIE for other in others)
    )


def fastest(times: np.ndarray, plans: Sequence[int]) -> int:
    """Return the plan of least typical time."""
    return min(plans, key=lambda plan: (typical(times[:, plan]), plan))


def typical(seconds: np.ndarray) -> float:
    """Return the mean of the times of a plan, of their logarithms, without the longest and the shortest ones."""
    return math.exp(_trimmed(np.log(seconds[np.isfinite(seconds)]))[0])


def ties(times: np.ndarray, plans: Sequence[int]) -> list[int]:
    """Return the fastest plan, and those that are as fast as can be told."""
    best = fastest(times, plans)
    found = {plan: Difference.between(times[:, plan], times[:, best]) for plan in plans if plan != best}
    return [best, *(plan for plan, other in found.items() if other.low <= 0 and other.mean <= TIE)]


def _expm1(x: float) -> float:
    return math.inf if x > 700 else math.expm1(x)


def _percent(share: float) -> str:
    return f"{100 * share:.2g}" if abs(share) < 0.095 else f"{100 * share:.0f}"
