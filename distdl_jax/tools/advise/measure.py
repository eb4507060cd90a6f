"""Whole training steps of plans, on the workers of a job: in rounds, one step of each plan, in shuffled order."""

from __future__ import annotations

import math
import random
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.nn.base.layer import Layer, apply_layer, keeps_state
from distdl_jax.nn.networks.sequential import Sequential
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.tools.advise.halving import CHECKS, is_decided, staying
from distdl_jax.tools.advise.network import Grids
from distdl_jax.tracing.world import World
from distdl_jax.transforms.checked_jit import jit
from distdl_jax.transforms.gradients import value_and_grad
from distdl_jax.transports.agreement import agree
from distdl_jax.transports.progress import progress

RATE = 1e-6
"""Of the update: so small that the numbers stay as they are at the beginning of a training."""


LEAST_SECONDS, MOST_STEPS = 0.02, 9
"""A plan takes one step a round; several, of which the median counts, where steps are shorter than this."""


@dataclass(frozen=True)
class Measured:
    """The times of plans.

    - `times`: seconds of the slowest worker: rounds x plans, not a number where a plan took no step.
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
    """A plan's training step: value, gradient and update, again and again."""

    def __init__(self, network: Sequential, x_spec: TensorSpec, copies: int, dtype: np.dtype, is_kept: bool) -> None:
        self._network, self._x_spec, self._copies, self._dtype = network, x_spec, copies, dtype
        self._is_kept = is_kept
        everyone = Partition.of_workers(x_spec.partition.world, range(x_spec.partition.world.size))
        self._step = jit(_step(network, everyone), donate_argnums=(0, 1, 2))
        self._arrays: Any = None

    def seconds(self, steps: int = 1, ready: Callable[[], object] = lambda: None) -> float:
        """Take some steps once `ready` has returned; return how long this worker took, the median of them."""
        arrays, self._arrays = jax.block_until_ready(self._arrays or self._new()), None
        ready()
        seconds = []
        for _ in range(steps):
            start = perf_counter()
            *arrays, _ = jax.block_until_ready(self._step(*arrays))
            seconds.append(perf_counter() - start)
        if self._is_kept:
            self._arrays = arrays
        return float(np.median(seconds))

    def _new(self) -> tuple[Any, ...]:
        """Return the parameters, what the optimiser stores, the layers' state, the input."""
        params = self._network.init(jax.random.key(0), self._dtype)
        stored = [jax.tree.map(jnp.zeros_like, params) for _ in range(self._copies)]
        state = self._network.init_state(self._dtype) if keeps_state(self._network) else None
        shape = self._x_spec.local_shape
        if getattr(self._network, "takes_indices", False):
            return params, stored, state, jnp.zeros(shape, np.int32)
        return params, stored, state, jnp.asarray(np.random.default_rng(0).random(shape), self._dtype)


def _step(network: Layer, P: Partition) -> Callable[..., Any]:
    """Return a step: the value and the gradient of a loss, and an update that reads and writes all that is stored."""

    def loss(params: Any, state: Any, x: Array) -> tuple[Array, Any]:
        y, state = apply_layer(network, params, x, state, True, jax.random.key(0))
        return jnp.sum((y * y.conj()).real), state

    def step(params: Any, stored: list[Any], state: Any, x: Array) -> tuple[Any, ...]:
        (value, state), gradient = value_and_grad(loss, has_aux=True, partition=P)(params, state, x)
        stored = [jax.tree.map(partial(_mean, power), tree, gradient) for power, tree in enumerate(stored, start=1)]
        moved = jax.tree.map(_direction, gradient, *stored)
        return jax.tree.map(lambda p, m: (p - RATE * m).astype(p.dtype), params, moved), stored, state, x, value

    return step


def _told(seconds: list[float], is_interrupted: bool) -> tuple[list[float], bool]:
    return seconds, is_interrupted


def _any(contributions: dict[int, bool]) -> bool:
    return any(contributions.values())


def _mean(power: int, mean: Array, gradient: Array) -> Array:
    """Return the running mean of a power of the gradient."""
    return (0.9 * mean + 0.1 * gradient**power).astype(mean.dtype)


def _direction(gradient: Array, *means: Array) -> Array:
    """Return what sgd, momentum or Adam follow, with no, one or two running means."""
    if len(means) < 2:
        return means[0] if means else gradient
    return means[0] / (jnp.sqrt(jnp.abs(means[1])) + 1e-8)


class Interrupts:
    """Ctrl-C, noted and not raised. Pressed again it is raised; launchers that pass it on make two of one at once."""

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
    """What all workers do next.

    - `times`: of the last round. `plans`: those that stay.
    - `order`: the plans of the next round, in order; none at the end. `steps`: that each takes.
    """

    times: tuple[float, ...]
    plans: tuple[int, ...]
    order: tuple[int, ...]
    steps: int
    is_interrupted: bool


def measured_plans(world: World, trials: Sequence[Trial], obvious: Collection[int], seconds: float) -> Measured:
    """Take steps of plans until the fastest is known, or `seconds` are over; compiling comes before, and on top.

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
        following = agree(world, everyone, "the start of dj.advise", partial(_told, first, False), race.begin)
        ready = partial(world.agree, everyone, "a step of dj.advise", None)
        with progress(label="advice: measuring", unit="round") as shown:
            while following.order:
                mine = [math.nan] * len(trials)
                for plan in following.order:
                    mine[plan] = trials[plan].seconds(following.steps, ready)
                told = partial(_told, mine, bool(interrupts.noted))
                following = agree(world, everyone, "a round of dj.advise", told, race.next)
                rows.append(following.times)
                shown.advance()
    return Measured(np.array(rows).reshape(-1, len(trials)), following.plans, following.is_interrupted)


class Race:
    """The rounds, as the first worker decides on them for all.

    - `obvious`: the plans of which the better one stays to the end.
    - `seconds`: within which the last round has to end.
    """

    def __init__(self, count: int, obvious: Collection[int], seconds: float) -> None:
        self._plans, self._obvious, self._seconds = tuple(range(count)), tuple(obvious), seconds
        self._rows: list[tuple[float, ...]] = []
        self._random = random.Random(0)

    def begin(self, contributions: dict[int, tuple[list[float], bool]]) -> _Next:
        """Decide on the first round, after the workers' seconds of a step of each plan."""
        self._start = perf_counter()
        times = self._slowest(contributions)
        self._steps = min(MOST_STEPS, math.ceil(LEAST_SECONDS / min(times)))
        stops = any(noted for _, noted in contributions.values())
        return _Next(times, self._plans, () if stops else self._order(), self._steps, stops)

    def next(self, contributions: dict[int, tuple[list[float], bool]]) -> _Next:
        """Decide on the next round, after the workers' seconds of a round; each with whether Ctrl-C was pressed."""
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
