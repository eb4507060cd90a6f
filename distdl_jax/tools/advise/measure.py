"""Whole training steps of plans, on the workers of a job: in rounds, with one step of each plan, in shuffled order.

The faster plan is decided by paired differences of rounds' times; significantly slower plans are dropped.
"""

from __future__ import annotations

import math
import random
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from distdl_jax.nn.base.layer import keeps_state
from distdl_jax.nn.networks.sequential import Sequential
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.tools.advise.network import Grids
from distdl_jax.tools.cost.memory import training_step
from distdl_jax.transforms.checked_jit import jit
from distdl_jax.transports.agreement import agree
from distdl_jax.transports.progress import progress
from distdl_jax.transports.world import World

CHECKS = (3, 6, 12, 24, 48, 96)
"""The numbers of rounds after which slower plans are dropped; measuring ends after the last."""

ENOUGH = 12
"""Measuring ends after this many rounds, or later, once the rest are ties."""

TIE = 0.02
"""Plans whose difference is not significant, and at most this share, are a tie."""


@dataclass(frozen=True)
class Difference:
    """The share by which one plan takes longer than another, with limits at 95 %.

    - `rounds`: the number in which both were measured. With fewer than two there are no limits.
    """

    mean: float
    low: float
    high: float
    rounds: int

    @classmethod
    def between(cls, slower: np.ndarray, faster: np.ndarray) -> Difference:
        """Return the difference of the times of two plans, round by round; NaN if one took no step."""
        logs = np.log(slower / faster)
        mean, half, n = _trimmed(logs[np.isfinite(logs)])
        return cls(math.expm1(mean), math.expm1(mean - half), _expm1(mean + half), n)

    def __str__(self) -> str:
        limits = "" if math.isinf(self.high) else f" ({_percent(self.low)} to {_percent(self.high)})"
        return f"{_percent(self.mean)} %{limits}, {self.rounds} round{'' if self.rounds == 1 else 's'}"


def _trimmed(values: np.ndarray) -> tuple[float, float, int]:
    """Return the mean without a fifth at either end, half its interval at 95 %, and the number of values.

    So rounds disturbed by other work on the machine count little. Source: Yuen (1974), Biometrika 61.
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
    """Return the plan with the smallest typical time."""
    return min(plans, key=lambda plan: (typical(times[:, plan]), plan))


def typical(seconds: np.ndarray) -> float:
    """Return the geometric mean of the times of a plan, without the longest and the shortest ones."""
    return math.exp(_trimmed(np.log(seconds[np.isfinite(seconds)]))[0])


def ties(times: np.ndarray, plans: Sequence[int]) -> list[int]:
    """Return the fastest plan, and those not distinguishable from it."""
    best = fastest(times, plans)
    found = {plan: Difference.between(times[:, plan], times[:, best]) for plan in plans if plan != best}
    return [best, *(plan for plan, other in found.items() if other.low <= 0 and other.mean <= TIE)]


def _expm1(x: float) -> float:
    return math.inf if x > 700 else math.expm1(x)


def _percent(share: float) -> str:
    return f"{100 * share:.2g}" if abs(share) < 0.095 else f"{100 * share:.0f}"


LEAST_SECONDS, MOST_STEPS = 0.02, 9
"""A plan takes one step per round, or the median of several if steps are shorter than this."""


@dataclass(frozen=True)
class Measured:
    """The times of plans.

    - `times`: seconds of the slowest worker: rounds x plans, NaN if a plan took no step.
    - `plans`: those that took a step in every round.
    - `is_interrupted`: whether Ctrl-C ended it.
    """

    times: np.ndarray
    plans: tuple[int, ...]
    is_interrupted: bool = False


@dataclass(frozen=True)
class Plans:
    """The plans of the short list: the grids of each, and their times.

    - `obvious`: the numbers of the obvious ones, by name.
    """

    grids: tuple[Grids, ...]
    obvious: dict[str, int]
    measured: Measured = Measured(np.empty((0, 0)), ())


class Trial:
    """A plan's training step: value, gradient and update, repeatedly."""

    def __init__(self, network: Sequential, x_spec: TensorSpec, copies: int, dtype: np.dtype, is_kept: bool) -> None:
        self._network, self._x_spec, self._copies, self._dtype = network, x_spec, copies, dtype
        self._is_kept = is_kept
        everyone = Partition.of_workers(x_spec.partition.world, range(x_spec.partition.world.size))
        self._step = jit(training_step(network, everyone), donate_argnums=(0, 1, 2))
        self._arrays: Any = None

    def seconds(self, steps: int = 1, ready: Callable[[], object] = lambda: None) -> float:
        """Take steps once `ready` has returned; return this worker's median time of a step."""
        (*arrays, x), self._arrays = jax.block_until_ready(self._arrays or self._new()), None
        ready()
        seconds = []
        for _ in range(steps):
            start = perf_counter()
            *arrays, _ = jax.block_until_ready(self._step(*arrays, x))
            seconds.append(perf_counter() - start)
        if self._is_kept:
            self._arrays = (*arrays, x)
        return float(np.median(seconds))

    def _new(self) -> tuple[Any, ...]:
        """Return the parameters, the optimiser state, the layers' state, the input."""
        params = self._network.init(jax.random.key(0), self._dtype)
        stored = [jax.tree.map(jnp.zeros_like, params) for _ in range(self._copies)]
        state = self._network.init_state(self._dtype) if keeps_state(self._network) else None
        shape = self._x_spec.local_shape
        if getattr(self._network, "takes_indices", False):
            return params, stored, state, jnp.zeros(shape, np.int32)
        return params, stored, state, jnp.asarray(np.random.default_rng(0).random(shape), self._dtype)


def _contribution(seconds: list[float], is_interrupted: bool) -> tuple[list[float], bool]:
    return seconds, is_interrupted


def _any(contributions: dict[int, bool]) -> bool:
    return any(contributions.values())


class Interrupts:
    """Ctrl-C, recorded without raising. Pressed again it raises; launchers that forward it make two of one."""

    def __init__(self) -> None:
        self.noted = 0.0
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted and perf_counter() - self.noted > 1.0:
            raise KeyboardInterrupt
        self.noted = self.noted or perf_counter()


class _Next(NamedTuple):
    """The next action of all workers.

    - `times`: of the last round. `plans`: those that stay.
    - `order`: the plans of the next round, in order; none at the end. `steps`: the number that each takes.
    """

    times: tuple[float, ...]
    plans: tuple[int, ...]
    order: tuple[int, ...]
    steps: int
    is_interrupted: bool


def measured_plans(world: World, trials: Sequence[Trial], obvious: Collection[int], seconds: float) -> Measured:
    """Take steps of plans until the fastest is known, or `seconds` have passed, not counting compilation.

    Collective in the world. `obvious`: the plans of which the better one stays to the end.
    """
    everyone = tuple(range(world.size))
    race = Race(len(trials), obvious, seconds)
    rows: list[tuple[float, ...]] = []
    with Interrupts() as interrupts:
        first = []
        for trial in progress(trials, label="advice: compiling plans", unit="plan"):
            trial.seconds()
            first.append(trial.seconds())
            if agree(world, everyone, "a plan of dj.advise", lambda: bool(interrupts.noted), _any):
                return Measured(np.empty((0, len(trials))), tuple(range(len(trials))), True)
        following = agree(world, everyone, "the start of dj.advise", partial(_contribution, first, False), race.begin)
        ready = partial(world.agree, everyone, "a step of dj.advise", None)
        with progress(label="advice: measuring", unit="round") as shown:
            while following.order:
                mine = [math.nan] * len(trials)
                for plan in following.order:
                    mine[plan] = trials[plan].seconds(following.steps, ready)
                own = partial(_contribution, mine, bool(interrupts.noted))
                following = agree(world, everyone, "a round of dj.advise", own, race.next)
                rows.append(following.times)
                shown.advance()
    return Measured(np.array(rows).reshape(-1, len(trials)), following.plans, following.is_interrupted)


class Race:
    """The rounds, decided by the first worker for all.

    - `obvious`: the plans of which the better one stays to the end.
    - `seconds`: the time in which the last round must end.
    """

    def __init__(self, count: int, obvious: Collection[int], seconds: float) -> None:
        self._plans, self._obvious, self._seconds = tuple(range(count)), tuple(obvious), seconds
        self._rows: list[tuple[float, ...]] = []
        self._random = random.Random(0)

    def begin(self, contributions: dict[int, tuple[list[float], bool]]) -> _Next:
        """Decide on the first round, given the workers' seconds of a step of each plan."""
        self._start = perf_counter()
        times = self._slowest(contributions)
        self._steps = min(MOST_STEPS, math.ceil(LEAST_SECONDS / min(times)))
        stops = any(noted for _, noted in contributions.values())
        return _Next(times, self._plans, () if stops else self._order(), self._steps, stops)

    def next(self, contributions: dict[int, tuple[list[float], bool]]) -> _Next:
        """Decide on the next round, given the workers' seconds of a round, and whether Ctrl-C was pressed on each."""
        self._rows.append(self._slowest(contributions))
        times, elapsed = np.array(self._rows), perf_counter() - self._start
        stops = any(noted for _, noted in contributions.values())
        rounds = len(times)
        if rounds in CHECKS:
            self._plans = tuple(staying(times, self._plans, self._obvious))
        is_over = elapsed + elapsed / rounds > self._seconds
        order = () if stops or is_over or is_decided(times, self._plans) else self._order()
        return _Next(self._rows[-1], self._plans, order, self._steps, stops)

    def _order(self) -> tuple[int, ...]:
        return tuple(self._random.sample(self._plans, len(self._plans)))

    @staticmethod
    def _slowest(contributions: dict[int, tuple[list[float], bool]]) -> tuple[float, ...]:
        """Return the seconds of the slowest worker, plan by plan."""
        return tuple(np.max([times for times, _ in contributions.values()], axis=0).tolist())
