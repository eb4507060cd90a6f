"""The partitions that make a training step of a network fast: `advise`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from distdl_jax.advice.elimination import Choice
from distdl_jax.advice.graph import Graph, Shape
from distdl_jax.advice.grids_and_cost import Placement, memory_text
from distdl_jax.advice.network import Builder
from distdl_jax.advice.search import Search
from distdl_jax.advice.seconds import Stopwatch
from distdl_jax.advice.states import Prices
from distdl_jax.advice.table import advice_table
from distdl_jax.costs.cost import OPTIMISERS, Cost, cost
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.machine import quantities
from distdl_jax.machine.machine import Machine, load
from distdl_jax.nn.sequential import Sequential
from distdl_jax.partition import Partition
from distdl_jax.planning import planning_world
from distdl_jax.tensors import TensorSpec
from distdl_jax.validation import MOST_WORKERS, checked_dtype, checked_integer, checked_integers


@dataclass(frozen=True)
class Advice:
    """The fastest partitions of a network that were found, and what others would cost; `dj.advise` makes it.

    - `network`: an `nn.Sequential` with the chosen partitions, and an `nn.Repartition` wherever they differ.
    - `x_spec`: the global shape and the partition of the network's input.
    - `placement`: the chosen grids, and what they cost.
    - `runners_up`: other placements, fastest first.
    - `gap`: no placement of those that were compared is faster than this one by more than this share of its time.

    Printed, it is a table.
    """

    network: Sequential
    x_spec: TensorSpec
    placement: Placement
    runners_up: tuple[Placement, ...]
    gap: float
    _search: Search = field(repr=False, compare=False)
    _choice: Choice = field(repr=False, compare=False)
    _optimiser: str = field(repr=False, compare=False)

    @cached_property
    def cost(self) -> Cost:
        """What each worker stores, computes and sends, and the seconds: `dj.cost` of the network on the machine."""
        clock = self._search.costs.clock
        return cost(self.network, self.x_spec, machine=clock.machine, optimiser=self._optimiser, dtype=clock.dtype)

    def why(self, layer: int | str, grid: Sequence[int]) -> Placement:
        """Return the fastest placement in which a layer has a certain grid; all others may have any.

        **Arguments:**

        - `layer`: its place in the described network: 3, or "3.1" for layer 1 of a skip. A normalisation has the grid
          of the layer before.
        - `grid`: a number of workers for each dimension of the layer's input.

        **Raises:** `InvalidArgumentError` where there is no such layer, or it can't be on that grid; `PlanError` where
        nothing fits the memory then.
        """
        graph, place = self._search.graph, str(layer)
        if place not in graph.node_of:
            raise InvalidArgumentError(
                f"`layer` (={layer!r}) must be the place of a described layer: {', '.join(graph.node_of)}."
            )
        node, wanted = graph.node_of[place], checked_integers("grid", grid)
        shape, most = graph.nodes[node].x_shape, self._search.costs.workers
        if len(wanted) != len(shape) or min(wanted, default=0) < 1 or math.prod(wanted) > most:
            raise InvalidArgumentError(
                f"`grid` (={wanted}) must have {len(shape)} numbers of workers, 1 or more, and at most {most} in all."
            )
        search = self._search.with_grid(node, wanted)
        if search.prices[node][search.grids[node].index(wanted)] is None:
            raise InvalidArgumentError(f"`grid` (={wanted}) is none that layer {place} can have.")
        return _placement(search, _fastest(search, node, wanted)[0][0])

    def __str__(self) -> str:
        return advice_table(self._search, self._choice, self.placement, self.runners_up, self.gap)


def advise(
    network: Sequence[Any],
    x_shape: Sequence[int],
    *,
    workers: int | Partition,
    memory: int | str | None = None,
    machine: Machine | str | None = None,
    optimiser: str = "adam",
    dtype: DTypeLike = jnp.float32,
) -> Advice:
    """Choose the partitions with which a training step of a network is fast, and fits the memory: without a message.

    For every layer grids of all numbers of workers that divide `workers` are compared: by the layers' plans and the
    times of a machine, for the worker that takes longest, with the repartitions between layers on other grids. The
    fastest of all combinations is found exactly. A grid is the partition of a layer's input and output; the grids that
    are compared are all, or, where those are many, the ones that an estimate says to be fastest.

    **Arguments:**

    - `network`: a list of descriptions like `nn.conv2d(out_channels=8, kernel_size=3)`, of functions of an array, which
      are applied to each block by itself, and of skips, `nn.skip(...)`.
    - `x_shape`: the global shape of the input, with the batch.
    - `workers`: how many there are; the network is then on `dj.planning_world(workers)`, to look at. Or a partition, as
      `dj.Partition()`: then the network is on its workers, and trains there. Every worker gets the same.
    - `memory`: the most that a worker can store, in bytes, or as "40 GiB". Default: any amount.
    - `machine`: a `dj.Machine`, or the name or path of one. Default: "infiniband-hdr".
    - `optimiser`, `dtype`: as in `dj.cost`.

    **Returns:** the `Advice`.

    **Raises:** `InvalidTypeError` for a layer that is no description; `InvalidArgumentError` where an argument is not
    accepted; `PlanError` where `x_shape` does not fit a layer, a layer does not say what it does, or nothing fits the
    memory: it says what would be needed at least.

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
    P = (
        workers
        if isinstance(workers, Partition)
        else planning_world(checked_integer("workers", workers, least=1, most=MOST_WORKERS))
    )
    clock = Stopwatch(machine if isinstance(machine, Machine) else load(machine or "infiniband-hdr"), number)
    prices = Prices(P.size, clock, OPTIMISERS[optimiser])
    search = Search.of(Graph(network, shape, number), prices, None if memory is None else _bytes(memory))
    choices, bound = _fastest(search)
    best = choices[0]
    grids = search.grids_of(best)
    seconds = search.problem.time(best)
    return Advice(
        network=Builder(search.graph, grids, P).network(),
        x_spec=TensorSpec(shape, P.grid(grids[0])),
        placement=_placement(search, best),
        runners_up=tuple(_placement(search, choice) for choice in choices[1:]),
        gap=max(0.0, 1 - bound / seconds) if seconds else 0.0,
        _search=search,
        _choice=best,
        _optimiser=optimiser,
    )


def _fastest(search: Search, node: int | None = None, grid: Shape | None = None) -> tuple[list[Choice], float]:
    """Return the fastest choices that fit the memory, and a bound on all; refuse a memory that none fits."""
    solution = search.solve(node, grid)
    if not (choices := search.fitting(solution.choices)):
        needed = min(map(search.memory, solution.choices), default=solution.least_memory)
        limit = 0.0 if search.limit is None else search.limit
        raise PlanError(
            f"`memory` ({memory_text(limit)}) is too little for the worker that stores most: with the partitions of "
            f"{search.costs.workers} workers or fewer that were compared it needs {memory_text(needed)} or more."
        )
    return choices, solution.bound


def _placement(search: Search, choice: Choice) -> Placement:
    grids = search.grids_of(choice)
    named = {place: grids[node] for place, node in search.graph.node_of.items()}
    return Placement(search.problem.time(choice), search.memory(choice), named)


def _bytes(memory: int | str) -> float:
    """Return a number of bytes, given as such or as text."""
    if not isinstance(memory, str):
        return float(checked_integer("memory", memory, least=1))
    try:
        return quantities.parse(memory, "bytes")
    except ValueError as error:
        raise InvalidArgumentError(f"`memory` (={memory!r}) {error}.") from None
