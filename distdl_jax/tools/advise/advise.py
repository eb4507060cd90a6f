"""The partitions that make a training step of a network fast: `advise`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.nn.networks.sequential import Sequential
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.planning import planning_world
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.text import aligned
from distdl_jax.tools.advise.measure import Difference, Plans, Trial, fastest, measured_plans, ties, typical
from distdl_jax.tools.advise.network import DescribedNetwork, Grids, Shape
from distdl_jax.tools.advise.records import key_of, store_plans, stored_plans
from distdl_jax.tools.advise.search import Prices, Search, memory_text
from distdl_jax.tools.cost.cost import OPTIMISERS, Cost
from distdl_jax.tools.cost.machines import Machine, given_machine
from distdl_jax.transports.agreement import agree
from distdl_jax.validation import MOST_WORKERS, checked_dtype, checked_integer, checked_integers

USUAL = Machine(latency=5e-6, bandwidth=5e9, flops=2e10, memory_bandwidth=1e10, memory=16e9, source="a typical core")
"""The machine for estimates if none is given."""


@dataclass(frozen=True)
class Placement:
    """A grid for each described layer, and their total cost.

    - `grids`: by place, as "3", or "3.1" within a skip.
    - `messages`, `bytes`: the most that any worker sends in a training step.
    - `memory`: the largest peak memory of a worker in a step, in bytes.
    - `estimate`: seconds of a step by the machine's five numbers. It is not suited for ranking.
    - `seconds`: of a step, measured; None if it was not.
    """

    grids: dict[str, Shape] = field(hash=False)
    messages: int
    bytes: int
    memory: int
    estimate: float
    seconds: float | None = None


@dataclass(frozen=True)
class Advice:
    """The partitions of a network chosen by `dj.advise`, and the cost of alternatives.

    - `network`: an `nn.Sequential` with the chosen partitions, and an `nn.Repartition` between differing ones.
    - `x_spec`: the global shape and the partition of the network's input.
    - `verdict`: the speed-up of the plan, as a sentence; or that nothing was measured.
    - `faster`: by what share the better of the obvious plans, the batch split and the split of the longest dimension,
      takes longer: `mean`, and `low` and `high` at 95 %, over a number of `rounds`; None without times.

    Printed, it is the verdict and a table.
    """

    network: Sequential
    x_spec: TensorSpec
    verdict: str
    faster: Difference | None
    _search: Search = field(repr=False, compare=False)
    _plans: Plans = field(repr=False, compare=False)
    _chosen: int = field(repr=False, compare=False)

    @property
    def grids(self) -> Grids:
        """The chosen grid of each node."""
        return self._plans.grids[self._chosen]

    @cached_property
    def placement(self) -> Placement:
        """The chosen grids, by place, and their cost."""
        return self._placement(self.grids)

    @cached_property
    def runners_up(self) -> tuple[Placement, ...]:
        """The other plans of the short list, fastest first: if measured, those that stayed longest."""
        return tuple(self._placement(grids) for grids in self._ordered if grids != self.grids)

    @cached_property
    def cost(self) -> Cost:
        """The storage, computation and messages of each worker: `dj.cost` of the network."""
        return self._search.cost(self.grids)

    def why(self, layer: int | str, grid: Sequence[int]) -> Placement:
        """Return the plan that seems fastest among those with a certain grid for one layer, and any for the others.

        **Arguments:**

        - `layer`: its place in the described network: 3, or "3.1" for layer 1 of a skip, which is on a single grid. A
          normalisation has the grid of the previous layer.
        - `grid`: a number of workers for each dimension of the layer's input.

        **Returns:** the `Placement`: messages, bytes, memory, an estimate and, if it was measured, seconds.

        **Raises:** `InvalidArgumentError` if there is no such layer, or it can't be on that grid.
        """
        node_of, place = self._search.network.node_of, str(layer)
        if place not in node_of:
            raise InvalidArgumentError(
                f"`layer` (={layer!r}) must be the place of a described layer: {', '.join(node_of)}."
            )
        number, wanted = node_of[place], checked_integers("grid", grid)
        node, most = self._search.network.nodes[number], self._search.prices.workers
        if len(wanted) != len(node.x_shape) or min(wanted, default=0) < 1 or math.prod(wanted) > most:
            raise InvalidArgumentError(
                f"`grid` (={wanted}) must have {len(node.x_shape)} numbers of workers, 1 or more, and at most {most} "
                "in all."
            )
        if self._search.prices.node(node, wanted) is None:
            raise InvalidArgumentError(f"`grid` (={wanted}) is not possible for layer {place}.")
        listed = next((grids for grids in self._ordered if grids[number] == wanted), None)
        return self._placement(listed or self._search.fastest(forced={number: wanted})[0].grids)

    @cached_property
    def _ordered(self) -> list[Grids]:
        """The plans, fastest first."""
        times, listed = self._plans.measured.times, self._plans.grids

        def rank(plan: int) -> tuple[int, float]:
            if not len(times):
                return 0, self._search.plan(listed[plan]).seconds
            return -int(np.isfinite(times[:, plan]).sum()), typical(times[:, plan])

        return [listed[plan] for plan in sorted(range(len(listed)), key=rank)]

    def _placement(self, grids: Grids) -> Placement:
        cost, times, seconds = self._search.cost(grids), self._plans.measured.times, None
        if len(times) and grids in self._plans.grids:
            seconds = typical(times[:, self._plans.grids.index(grids)])
        return Placement(
            {place: grids[node] for place, node in self._search.network.node_of.items()},
            int(cost.messages.max()),
            int(cost.bytes.max()),
            self._search.memory(grids),
            self._search.plan(grids).seconds,
            seconds,
        )

    def __str__(self) -> str:
        return f"{self.verdict}\n\n{advice_table(self._search, self._plans, self._ordered, self.grids)}"


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
    """Choose partitions that make a training step of a network fast, and fit into memory.

    Exact counts and the five numbers of a machine determine a short list of four to eight plans: a grid for each layer,
    with repartitions between layers on different grids. The batch split, and the split of the longest dimension, are
    always included. In a job these plans are measured: whole training steps on the real workers, in rounds of one step
    per plan, until the fastest is known. Plans whose times can't be distinguished are ties, of which the one with least
    memory is chosen.

    In a job all workers of the world must call it with the same arguments. Ctrl-C stops measuring after a round, and
    the answer uses the times so far.

    **Arguments:**

    - `network`: a list of descriptions like `nn.conv2d(out_channels=8, kernel_size=3)`, of functions of an array, which
      are applied to each block separately, and of skips, `nn.skip(...)`.
    - `x_shape`: the global shape of the input, including the batch.
    - `workers`: in a job the partition, such as `dj.Partition()`: the network is on its workers, and trains there. Or
      their number: the network is then on `dj.planning_world(workers)`, for inspection, and nothing is measured.
    - `memory`: the most that a worker can store, in bytes, or as "40 GiB". Default: the memory of `machine` if given,
      otherwise unlimited.
    - `machine`: a `dj.Machine`, or the name of one, for the estimate. Default: a typical core.
    - `optimiser`, `dtype`: as in `dj.cost`.
    - `measure`: the maximum number of seconds for measuring plans, after compilation; 0 for an estimate.
    - `results`: a file, on worker 0, in which measurements are stored, and looked up. The same network, shapes,
      options, workers by host and versions are then measured only once. Functions in `network` are identified by their
      names.

    **Returns:** the `Advice`.

    **Raises:** `InvalidTypeError` for a layer that is not a description; `InvalidArgumentError` if an argument is not
    accepted; `PlanError` if `x_shape` does not fit a layer, or no plan fits into memory, with the memory that the
    smallest plan needs.

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
    numbers = None if machine is None else given_machine(machine)
    if isinstance(measure, bool) or not isinstance(measure, int | float) or not 0 <= measure < math.inf:
        raise InvalidArgumentError(f"`measure` (={measure!r}) must be a number of seconds, 0 or more.")
    given = workers if isinstance(workers, Partition) else None
    P = given or planning_world(checked_integer("workers", workers, least=1, most=MOST_WORKERS))
    limit = None if numbers is None else numbers.memory
    if memory is not None:
        limit = _bytes(memory)
    described = DescribedNetwork(network, shape, number)
    prices = Prices(described, P.size, numbers or USUAL, optimiser, OPTIMISERS[optimiser], number)
    search = Search(prices, limit)
    if given is None:
        return advice(search, P, shortlist(search, P), f"`workers` (={workers}) is a number, not a partition of a job")
    if reason := _why_not_measured(P, measure):
        return advice(search, P, shortlist(search, P), reason)
    key, path = "", None if results is None else Path(results)
    if path is not None:
        asked = {"x_shape": shape, "dtype": number.name, "optimiser": optimiser, "memory": limit}
        key = key_of(P.world, network, {**asked, "partition": list(P.ranks)})
        if (found := stored_plans(P.world, path, key)) is not None:
            return advice(search, P, found)
    plans = shortlist(search, P)
    measured = measured_plans(P.world, trials(search, P, plans.grids), plans.obvious.values(), measure)
    plans = replace(plans, measured=measured)
    if path is not None and len(measured.times) and not measured.is_interrupted:
        store_plans(P.world, path, key, plans)
    return advice(search, P, plans, "Ctrl-C was pressed before the first round")


def _why_not_measured(P: Partition, seconds: float) -> str:
    """Return the reason for using an estimate only; nothing if plans can be measured."""
    if not seconds:
        return "`measure` is 0"
    if P.size == 1:
        return "there is one worker"
    return "" if P.world.may_measure else "the workers are not separate processes"


def shortlist(search: Search, P: Partition) -> Plans:
    """Return the plans of the short list; in a job, those of the first worker."""
    candidates, obvious = search.shortlist()
    plans = Plans(tuple(way.grids for way in candidates), obvious)
    if not P.world.may_measure:
        return plans
    found: Plans = agree(P.world, tuple(range(P.world.size)), "the plans of dj.advise", lambda: plans, itemgetter(0))
    return found


def trials(search: Search, P: Partition, plans: Sequence[Grids]) -> list[Trial]:
    """Return the steps of plans; their arrays stay between steps if all plans' arrays fit into memory together."""
    prices, network = search.prices, search.network
    fit = sum(search.plan(grids).stored for grids in plans) <= (search.limit or prices.machine.memory)
    specs = [TensorSpec(network.x_shape, P.grid(grids[0])) for grids in plans]
    return [
        Trial(network.on(grids, P), spec, prices.copies, prices.dtype, fit)
        for grids, spec in zip(plans, specs, strict=True)
    ]


def advice(search: Search, P: Partition, plans: Plans, reason: str = "") -> Advice:
    """Return the advice based on times. `reason`: why there may be none."""
    times, listed = plans.measured.times, plans.grids
    faster = None
    if not len(times):
        chosen = min(range(len(listed)), key=lambda plan: search.plan(listed[plan]).seconds)
        verdict = f"Nothing was measured, since {reason}: the plan is the first of an estimate, which is often wrong."
    else:
        best = ties(times, plans.measured.plans)
        chosen = best[0] if len(best) == 1 else min(best, key=lambda plan: search.memory(listed[plan]))
        verdict = f"This plan was the fastest in {len(times)} rounds."
        if stayed := {plan: name for name, plan in plans.obvious.items() if plan in plans.measured.plans}:
            rival = fastest(times, list(stayed))
            faster = Difference.between(times[:, rival], times[:, chosen])
            verdict = _verdict(faster, stayed[rival], chosen == rival)
        if len(best) > 1:
            others = f"{len(best) - 1} other plan{'s' * (len(best) > 2)}"
            verdict += f" It is a tie with {others}, and needs the least memory of them."
        if plans.measured.is_interrupted:
            verdict += f" Ctrl-C stopped measuring after {len(times)} rounds."
    spec = TensorSpec(search.network.x_shape, P.grid(listed[chosen][0]))
    return Advice(search.network.on(listed[chosen], P), spec, verdict, faster, search, plans, chosen)


def _verdict(faster: Difference, rival: str, is_rival: bool) -> str:
    """Return the result of the measurement as a sentence. `rival`: the better of the obvious plans."""
    if is_rival:
        return f"This is {rival}: no other plan was significantly faster, {faster.rounds} rounds."
    if faster.low > 0:
        return f"This plan is faster than {rival} by {faster}."
    return f"This plan is as fast as {rival}, within the uncertainty: faster by {faster}."


def _bytes(memory: int | str) -> float:
    """Return a number of bytes, given as such or as text."""
    if not isinstance(memory, str):
        return float(checked_integer("memory", memory, least=1))
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B\s*", memory)
    if match is None:
        raise InvalidArgumentError(
            f'`memory` (={memory!r}) must be a number of bytes and a unit, as "40 GiB" or "512 MB".'
        )
    return float(match[1]) * (1024 if match[3] else 1000) ** "_KMGT".index(match[2].upper() or "_")


def advice_table(search: Search, plans: Plans, ordered: Sequence[Grids], chosen: Grids) -> str:
    """Return a line for each node of the chosen plan, then one for each plan."""
    rows: list[tuple[str, ...]] = [("", "layer", "output", "grid", "workers", "messages", "sent", "stored")]
    for node, grid in zip(search.network.nodes, chosen, strict=True):
        if (price := search.prices.node(node, grid)) is not None:
            cells = shape_text(node.y_shape), shape_text(grid), f"{math.prod(grid)}", f"{price.messages}"
            rows.append((node.items[0][0], node.name, *cells, memory_text(price.bytes), memory_text(price.stored)))
    times = plans.measured.times
    names = {plans.grids[plan]: name for name, plan in plans.obvious.items()}
    shown: list[tuple[str, ...]] = [
        ("", "plan", "grids of the layers", "step, ms" if len(times) else "estimate, ms", "stored")
    ]
    for grids in ordered:
        way = search.plan(grids)
        seconds = typical(times[:, plans.grids.index(grids)]) if len(times) else way.seconds
        mark, text = "->" if grids == chosen else "", _grids_text(search, grids)
        shown.append((mark, names.get(grids, ""), text, f"{1e3 * seconds:.3g}", memory_text(way.stored)))
    return "\n".join(line.rstrip() for line in [*aligned(rows, range(4)), "", *aligned(shown, range(3))])


def _grids_text(search: Search, grids: Grids) -> str:
    """Return the grids of a plan, merging neighbours on one grid."""
    runs: list[tuple[str, str, tuple[int, ...]]] = []
    for node, grid in zip(search.network.nodes, grids, strict=True):
        place = node.items[0][0]
        if runs and runs[-1][2] == grid:
            runs[-1] = (runs[-1][0], place, grid)
        else:
            runs.append((place, place, grid))
    return ", ".join(f"{a if a == b else f'{a} to {b}'}: {shape_text(grid)}" for a, b, grid in runs)
