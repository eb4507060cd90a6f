"""The partitions with which a training step of a network is fast: `advise`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from distdl_jax.agreement.agree import agree
from distdl_jax.costs.cost import OPTIMISERS, Cost
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.nn.sequential import Sequential
from distdl_jax.partition import Partition
from distdl_jax.planning import planning_world
from distdl_jax.tensors import TensorSpec
from distdl_jax.tools.advise.halving import Difference, fastest, ties, typical
from distdl_jax.tools.advise.measure import Measured, Trial, measured_plans
from distdl_jax.tools.advise.network import DescribedNetwork, Grids, Shape
from distdl_jax.tools.advise.prices import Prices
from distdl_jax.tools.advise.records import keep, kept, key_of
from distdl_jax.tools.advise.search import Search
from distdl_jax.tools.advise.table import advice_table
from distdl_jax.tools.cost.machine import Machine
from distdl_jax.validation import MOST_WORKERS, checked_dtype, checked_integer, checked_integers

USUAL = Machine(latency=5e-6, bandwidth=5e9, flops=2e10, memory_bandwidth=1e10, memory=16e9, source="a usual core")
"""The machine of estimates where none is given."""


@dataclass(frozen=True)
class Placement:
    """A grid for each described layer, and what they cost together.

    - `grids`: by place, as "3", or "3.1" within a skip.
    - `messages`, `bytes`: that the worker that sends most sends in a training step.
    - `memory`: bytes that the worker that stores most needs at the fullest time of a step.
    - `estimate`: seconds of a step by the machine's five numbers. It is not for ranking.
    - `seconds`: of a step, measured; None where it was not.
    """

    grids: dict[str, Shape] = field(hash=False)
    messages: int
    bytes: int
    memory: int
    estimate: float
    seconds: float | None = None


@dataclass(frozen=True)
class Advice:
    """The partitions of a network that `dj.advise` chose, and what others would cost.

    - `network`: an `nn.Sequential` with the chosen partitions, and an `nn.Repartition` wherever they differ.
    - `x_spec`: the global shape and the partition of the network's input.
    - `faster`: by what share the better one of the obvious plans, the batch split and the split of the longest
      dimension, takes longer: `mean`, and `low` and `high` at 95 %, in so many `rounds`. None where nothing was
      measured.
    - `verdict`: the same as a sentence; where nothing was measured, it says so.

    Printed, it is the verdict and a table.
    """

    network: Sequential
    x_spec: TensorSpec
    faster: Difference | None
    verdict: str
    _search: Search = field(repr=False, compare=False)
    _plans: tuple[Grids, ...] = field(repr=False, compare=False)
    _obvious: dict[str, int] = field(repr=False, compare=False)
    _measured: Measured | None = field(repr=False, compare=False)
    _chosen: int = field(repr=False, compare=False)

    @cached_property
    def placement(self) -> Placement:
        """The chosen grids, and what they cost."""
        return self._placement(self._plans[self._chosen])

    @cached_property
    def runners_up(self) -> tuple[Placement, ...]:
        """The other plans of the short list, fastest first: those that stayed longest where they were measured."""
        return tuple(self._placement(self._plans[plan]) for plan in self._order if plan != self._chosen)

    @cached_property
    def cost(self) -> Cost:
        """What each worker stores, computes and sends: `dj.cost` of the network."""
        return self._search.cost(self._plans[self._chosen])

    def why(self, layer: int | str, grid: Sequence[int]) -> Placement:
        """Return the plan that seems fastest in which a layer has a certain grid; all others may have any.

        **Arguments:**

        - `layer`: its place in the described network: 3, or "3.1" for layer 1 of a skip, all of which is on one grid.
          A normalisation has the grid of the layer before.
        - `grid`: a number of workers for each dimension of the layer's input.

        **Returns:** the `Placement`: messages, bytes, memory, an estimate and, where it was measured, seconds.

        **Raises:** `InvalidArgumentError` where there is no such layer, or it can't be on that grid.
        """
        node_of, place = self._search.network.node_of, str(layer)
        if place not in node_of:
            raise InvalidArgumentError(
                f"`layer` (={layer!r}) must be the place of a described layer: {', '.join(node_of)}."
            )
        node, wanted = node_of[place], checked_integers("grid", grid)
        shape, most = self._search.network.nodes[node].x_shape, self._search.prices.workers
        if len(wanted) != len(shape) or min(wanted, default=0) < 1 or math.prod(wanted) > most:
            raise InvalidArgumentError(
                f"`grid` (={wanted}) must have {len(shape)} numbers of workers, 1 or more, and at most {most} in all."
            )
        if self._search.prices.node(self._search.network.nodes[node], wanted) is None:
            raise InvalidArgumentError(f"`grid` (={wanted}) is none that layer {place} can have.")
        plans = [plan for plan in self._order if self._plans[plan][node] == wanted]
        if plans:
            return self._placement(self._plans[plans[0]])
        return self._placement(self._search.fastest(forced={node: wanted})[0].grids)

    @cached_property
    def _order(self) -> list[int]:
        """The plans, fastest first."""
        if self._measured is None:
            return sorted(range(len(self._plans)), key=lambda plan: self._search.seconds(self._plans[plan]))
        steps = np.isfinite(self._measured.times).sum(0)
        return sorted(range(len(self._plans)), key=lambda plan: (-steps[plan], self._seconds(plan)))

    def _seconds(self, plan: int) -> float:
        """Return the measured seconds of a plan."""
        assert self._measured is not None
        return typical(self._measured.times[:, plan])

    def _placement(self, grids: Grids) -> Placement:
        cost = self._search.cost(grids)
        named = {place: grids[node] for place, node in self._search.network.node_of.items()}
        is_measured = self._measured is not None and grids in self._plans
        seconds = self._seconds(self._plans.index(grids)) if is_measured else None
        counts = int(cost.messages.max()), int(cost.bytes.max()), int(cost.memory.max())
        return Placement(named, *counts, self._search.seconds(grids), seconds)

    def __str__(self) -> str:
        names = {plan: name for name, plan in self._obvious.items()}
        others = [(names.get(plan, ""), self._placement(self._plans[plan])) for plan in self._order]
        return f"{self.verdict}\n\n{advice_table(self._search, self._plans[self._chosen], self.placement, others)}"


def advise(
    network: Sequence[Any],
    x_shape: Sequence[int],
    *,
    workers: int | Partition,
    memory: int | str | None = None,
    machine: Machine | str | None = None,
    optimiser: str = "adam",
    dtype: DTypeLike = jnp.float32,
    measure: float = 60.0,
    results: str | os.PathLike[str] | None = None,
) -> Advice:
    """Choose the partitions with which a training step of a network is fast, and fits the memory.

    Exact counts and the five numbers of a machine make a short list of four to eight plans: a grid for each layer, with
    repartitions between layers on other grids. The batch split, and the split of the longest dimension, are always on
    it. In a job these plans are measured: whole training steps on the real workers, in rounds of one step a plan, until
    the fastest is known. Plans whose times can't be told apart are ties, of which the one with least memory is taken.

    In a job all workers of the world call it with the same arguments. Ctrl-C ends measuring after a round, and the
    answer is what is known then.

    **Arguments:**

    - `network`: a list of descriptions like `nn.conv2d(out_channels=8, kernel_size=3)`, of functions of an array, which
      are applied to each block by itself, and of skips, `nn.skip(...)`.
    - `x_shape`: the global shape of the input, with the batch.
    - `workers`: in a job the partition, as `dj.Partition()`: the network is on its workers, and trains there. Or how
      many there are: the network is then on `dj.planning_world(workers)`, to look at, and nothing is measured.
    - `memory`: the most that a worker can store, in bytes, or as "40 GiB". Default: that of `machine` where it is
      given, else any amount.
    - `machine`: a `dj.Machine`, for the estimate. Default: a usual core.
    - `optimiser`, `dtype`: as in `dj.cost`.
    - `measure`: for how many seconds at most plans are measured, after they were compiled; 0 for an estimate.
    - `results`: a file, on worker 0, in which what is measured is kept, and looked up. The same network, shapes,
      options, workers by host and versions are then measured once. Functions in `network` count by their names.

    **Returns:** the `Advice`.

    **Raises:** `InvalidTypeError` for a layer that is no description; `InvalidArgumentError` where an argument is not
    accepted; `PlanError` where `x_shape` does not fit a layer, or nothing fits the memory: it says what the least plan
    needs.

    >>> import jax, distdl_jax as dj
    >>> layers = [dj.nn.conv2d(out_channels=8, kernel_size=3, padding=1), jax.nn.relu, dj.nn.max_pool2d(kernel_size=2)]
    >>> advice = dj.advise(layers, (4, 3, 256, 256), workers=4)
    >>> advice.placement.grids
    {'0': (4, 1, 1, 1), '2': (4, 1, 1, 1)}
    """
    if isinstance(network, str) or not isinstance(network, Sequence) or not network:
        raise InvalidTypeError(f"`network` (={network!r}) must be a list of descriptions and functions, one or more.")
    shape, number = checked_integers("x_shape", x_shape), checked_dtype("dtype", dtype)
    if len(shape) < 2 or min(shape) < 1:
        raise InvalidArgumentError(f"`x_shape` (={shape}) must be two lengths or more, each 1 or more.")
    if optimiser not in OPTIMISERS:
        raise InvalidArgumentError(f"`optimiser` (={optimiser!r}) must be one of {', '.join(OPTIMISERS)}.")
    seconds = _checked_seconds(measure)
    is_given = isinstance(workers, Partition)
    P = (
        workers
        if isinstance(workers, Partition)
        else planning_world(checked_integer("workers", workers, least=1, most=MOST_WORKERS))
    )
    limit = _bytes(memory) if memory is not None else None if machine is None else _machine(machine).memory
    described = DescribedNetwork(network, shape, number)
    prices = Prices(described, P.size, _machine(machine), optimiser, OPTIMISERS[optimiser], number)
    search = Search(prices, limit)
    if reason := _why_not_measured(P, is_given, seconds):
        candidates, obvious = search.shortlist()
        chosen = min(range(len(candidates)), key=lambda plan: candidates[plan].seconds)
        return _advice(search, P, [way.grids for way in candidates], obvious, None, chosen, None, reason)
    key, path = "", None if results is None else Path(results)
    if path is not None:
        asked = {"x_shape": shape, "dtype": number.name, "optimiser": optimiser, "memory": limit}
        key = key_of(P.world, network, {**asked, "partition": list(P.ranks)})
        if (found := kept(P.world, path, key)) is not None:
            return _measured_advice(search, P, *found)
    plans, obvious = _agreed_shortlist(search, P)
    memories = [search.memory(grids) for grids in plans]
    fits = sum(memories) <= (limit or prices.machine.memory)
    trials = [
        Trial(described.on(grids, P), TensorSpec(shape, P.grid(grids[0])), prices.copies, number, fits)
        for grids in plans
    ]
    measured = measured_plans(P.world, trials, obvious.values(), seconds)
    if path is not None and len(measured.times) and not measured.is_interrupted:
        keep(P.world, path, key, plans, obvious, measured)
    return _measured_advice(search, P, plans, obvious, measured)


def _agreed_shortlist(search: Search, P: Partition) -> tuple[list[Grids], dict[str, int]]:
    """Return the plans to be measured, as the first worker lists them."""
    candidates, obvious = search.shortlist()
    listed = [way.grids for way in candidates], obvious
    everyone = tuple(range(P.world.size))
    found: tuple[list[Grids], dict[str, int]] = agree(
        P.world, everyone, "the plans of dj.advise", lambda: listed, lambda all: all[everyone[0]]
    )
    return found


def _measured_advice(
    search: Search, P: Partition, plans: Sequence[Grids], obvious: dict[str, int], measured: Measured
) -> Advice:
    """Return the advice that follows from times."""
    times = measured.times
    if not len(times):
        chosen = min(range(len(plans)), key=lambda plan: search.seconds(plans[plan]))
        return _advice(search, P, plans, obvious, None, chosen, None, "Ctrl-C came before the first round")
    best = ties(times, measured.plans)
    chosen = min(best, key=lambda plan: (search.memory(plans[plan]), best.index(plan)))
    stayed = [plan for plan in obvious.values() if plan in measured.plans]
    rival = fastest(times, stayed) if stayed else None
    faster = None if rival is None else Difference.between(times[:, rival], times[:, chosen])
    name = next((name for name, plan in obvious.items() if plan == rival), "")
    verdict = _verdict(faster, name, chosen == rival, len(best) - 1, len(times))
    if measured.is_interrupted:
        verdict += f" Ctrl-C ended measuring after {len(times)} rounds."
    return _advice(search, P, plans, obvious, measured, chosen, faster, verdict)


def _verdict(faster: Difference | None, rival: str, is_rival: bool, others: int, rounds: int) -> str:
    """Return what was measured as a sentence or two. `others`: how many plans are as fast as the chosen one."""
    if faster is None:
        verdict = f"This plan was the fastest in {rounds} rounds."
    elif is_rival:
        verdict = f"This is {rival}: no other plan was surely faster, {rounds} rounds."
    elif faster.low > 0:
        verdict = f"This plan is faster than {rival} by {faster}."
    else:
        verdict = f"This plan is as fast as {rival}, as far as can be told: faster by {faster}."
    if others:
        verdict += f" It is a tie with {others} other plan{'s' * (others > 1)}, and needs the least memory of them."
    return verdict


def _advice(
    search: Search,
    P: Partition,
    plans: Sequence[Grids],
    obvious: dict[str, int],
    measured: Measured | None,
    chosen: int,
    faster: Difference | None,
    verdict: str,
) -> Advice:
    """Return the advice; without times, `verdict` is why there are none."""
    if measured is None:
        verdict = f"Nothing was measured, since {verdict}: the plan is the first of an estimate, which is often wrong."
    grids = plans[chosen]
    spec = TensorSpec(search.network.x_shape, P.grid(grids[0]))
    network = search.network.on(grids, P)
    return Advice(network, spec, faster, verdict, search, tuple(plans), obvious, measured, chosen)


def _why_not_measured(P: Partition, is_given: bool, seconds: float) -> str:
    """Return why an estimate has to do; nothing where plans can be measured."""
    if not is_given:
        return f"`workers` (={P.size}) is a number and no partition of a job"
    if not seconds:
        return "`measure` is 0"
    if P.size == 1:
        return "there is one worker"
    return "" if P.world.may_measure else "the workers are no processes of their own"


def _checked_seconds(measure: object) -> float:
    if isinstance(measure, bool) or not isinstance(measure, int | float) or not 0 <= measure < math.inf:
        raise InvalidArgumentError(f"`measure` (={measure!r}) must be a number of seconds, 0 or more.")
    return float(measure)


def _machine(machine: Machine | str | None) -> Machine:
    if machine is None:
        return USUAL
    if not isinstance(machine, Machine):
        raise InvalidTypeError(f"`machine` (={machine!r}) must be a dj.Machine, or None.")
    return machine


def _bytes(memory: int | str) -> float:
    """Return a number of bytes, given as such or as text."""
    if not isinstance(memory, str):
        return float(checked_integer("memory", memory, least=1))
    units = {f"{prefix}{unit}": base**power for power, prefix in enumerate(("", "k", "M", "G", "T"))
             for unit, base in (("B", 1000), ("iB", 1024)) if prefix or unit == "B"}  # fmt: skip
    units["KiB"] = units.pop("kiB")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", memory)
    if match is None or match[2] not in units:
        raise InvalidArgumentError(
            f'`memory` (={memory!r}) must be a number of bytes and a unit, as "40 GiB"; units are {", ".join(units)}.'
        )
    return float(match[1]) * units[match[2]]
