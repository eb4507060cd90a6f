"""The cost of a layer on each grid, and the short list of plans for all of them.

The list has the plans that the estimate ranks fastest, and the obvious ones; all fit into memory.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

import numpy as np

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.nn.networks.sequential import Sequential
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.planning import planning_world
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.tools.advise.network import DescribedNetwork, Grids, Node, Shape
from distdl_jax.tools.cost.classes import repartition_counts
from distdl_jax.tools.cost.cost import Cost, cost, count
from distdl_jax.tools.cost.machines import Machine
from distdl_jax.transports.progress import progress

MOST_COUNTED, FEWEST_GRIDS, MOST_GRIDS = 120, 8, 24
"""The approximate number of node counts, and the number of grids for each, among those that seem fastest."""


@dataclass(frozen=True)
class Price:
    """The cost of a node on the worker for which it is largest.

    - `seconds`: of a step, estimated. `messages`, `bytes`: that the worker sends.
    - `stored`: bytes of parameters, gradients, the optimiser state, and residuals.
    - `y_grid`: the grid of the output.
    """

    seconds: float
    messages: int
    bytes: int
    stored: int
    y_grid: Shape


@dataclass(frozen=True)
class Prices:
    """The prices of the nodes of a network, each counted once.

    - `workers`: their number. `optimiser`, `dtype`: as in `dj.cost`. `copies`: numbers for each parameter.
    """

    network: DescribedNetwork
    workers: int
    machine: Machine
    optimiser: str
    copies: int
    dtype: np.dtype
    _known: dict[Any, Price | None] = field(default_factory=dict)
    _moves: dict[Any, float] = field(default_factory=dict)

    @cached_property
    def P(self) -> Partition:
        """All workers, for planning. There is one such world, since `dj.cost` traces a layer once in each."""
        return planning_world(self.workers)

    def node(self, node: Node, grid: Shape) -> Price | None:
        """Return the price of a node; None if one of its layers can't be on that grid."""
        key = node.key, grid
        if key not in self._known:
            try:
                self._known[key] = self._count(node, grid)
            except (InvalidArgumentError, InvalidTypeError, PlanError):
                self._known[key] = None
        return self._known[key]

    def _count(self, node: Node, grid: Shape) -> Price:
        """Count one node."""
        P = self.P.grid(grid)
        layers, y_grid = self.network.node_on(node, grid, P)
        spec, of_x = TensorSpec(node.x_shape, P), node.differentiates_x
        found = count(Sequential(*layers), spec, self.dtype, self.copies, of_x=of_x)
        names = ("operations", "bytes", "flops", "memory_traffic", "parameters")
        counts = {name: np.sum([getattr(row.amounts, name) for row in found.layers], axis=0) for name in names}
        stored = (2 + self.copies) * counts.pop("parameters") + sum(found.activations.values())
        messages, nbytes = counts["operations"], counts["bytes"]
        seconds = self.machine.seconds(*counts.values())
        return Price(float(np.max(seconds)), int(messages.max()), int(nbytes.max()), int(stored.max()), y_grid)

    def move(self, shape: Shape, grid: Shape, other: Shape) -> float:
        """Return the seconds of a repartition of a tensor of a global shape."""
        key = shape, grid, other
        if key not in self._moves:
            owned, needed = (ProductGrid.balanced(shape, each, range(math.prod(each))) for each in (grid, other))
            messages, elements = repartition_counts(owned, needed)
            nbytes = elements * self.dtype.itemsize
            self._moves[key] = float(np.max(self.machine.seconds(messages, nbytes, 0, 2 * nbytes), initial=0.0))
        return self._moves[key]

    def grids(self, dims: int) -> list[Shape]:
        """Return the grids on which nodes with `dims` dimensions are counted, those that seem fastest first."""
        nodes = [node for node in self.network.nodes if len(node.x_shape) == dims]
        found = [
            grid
            for size in range(1, self.workers + 1)
            if self.workers % size == 0
            for grid in factorisations(size, dims)
            if any(all(p <= n for p, n in zip(grid, node.x_shape, strict=True)) for node in nodes)
        ]
        distinct = len({node.key for node in self.network.nodes})
        most = max(FEWEST_GRIDS, min(MOST_GRIDS, MOST_COUNTED // distinct))
        if len(found) <= most:
            return found
        pure = [grid for grid in found if max(grid) == self.workers]
        guesses = [self._guess(node) for node in nodes]
        found.sort(key=lambda grid: sum(guess(grid) for guess in guesses))
        return [*pure, *(grid for grid in found if grid not in pure)][:most]

    def _guess(self, node: Node) -> Any:
        """Return a function that estimates the seconds of a node on any grid, from its prices with one dimension cut.

        The cost of a cut along one dimension is assumed independent of the cuts along the others, except for the size
        of the blocks; an impossible cut costs as much as the whole node.
        """
        dims = len(node.x_shape)
        whole = self.node(node, (1,) * dims)
        seconds = whole.seconds if whole else 0.0
        cuts = []
        for d in range(dims):
            price = self.node(node, tuple(2 if e == d else 1 for e in range(dims)))
            cuts.append((price.messages, price.bytes) if price else None)

        def guess(grid: Shape) -> float:
            total, workers = 0.0, math.prod(grid)
            for p, cut in zip(grid, cuts, strict=True):
                if p > 1:
                    messages, nbytes = cut or (0, 0)
                    total += self.machine.seconds(messages, nbytes * p / workers, 0, 0) if cut else seconds
            return total + seconds / workers

        return guess


@lru_cache
def factorisations(n: int, dims: int) -> tuple[Shape, ...]:
    """Return all grids of `n` workers.

    >>> factorisations(4, 2)
    ((4, 1), (2, 2), (1, 4))
    """
    return tuple(_factorisations(n, dims))


def _factorisations(n: int, dims: int) -> Iterator[Shape]:
    if dims == 1:
        yield (n,)
        return
    for p in range(n, 0, -1):
        if n % p == 0:
            for rest in _factorisations(n // p, dims - 1):
                yield p, *rest


FEWEST, MOST = 4, 8
"""The number of plans to measure."""

NEAR = 3.0
"""Beyond the minimum, only plans that are estimated to take at most this many times as long as the fastest."""

PENALTIES = (1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1e6)
"""Prices of memory, tried if it is limited: seconds of the fastest plan for all the memory that it stores."""


@dataclass(frozen=True)
class Candidate:
    """A grid for each node, the estimated seconds of a step, and the bytes stored, summed over the nodes."""

    grids: Grids
    seconds: float
    stored: int


@dataclass
class Search:
    """The grids of all nodes, and the fastest paths through them."""

    prices: Prices
    limit: float | None = None
    _grids: dict[int, list[Shape]] = field(default_factory=dict)
    _costs: dict[Grids, Cost] = field(default_factory=dict)

    @property
    def network(self) -> DescribedNetwork:
        """The network."""
        return self.prices.network

    def states(self, number: int) -> dict[Shape, Price]:
        """Return the possible grids of a node, and their prices."""
        node = self.network.nodes[number]
        dims = len(node.x_shape)
        if dims not in self._grids:
            self._grids[dims] = self.prices.grids(dims)
        found = {
            grid: price
            for grid in self._grids[dims]
            if all(p <= n for p, n in zip(grid, node.x_shape, strict=True))
            and (price := self.prices.node(node, grid)) is not None
        }
        if not found:
            raise PlanError(f"`network[{node.items[0][0]}]` ({node.name}) can't be counted on any grid of workers.")
        return found

    def count_all(self) -> None:
        """Count all nodes on all grids, and show the progress."""
        for number in progress(range(len(self.network.nodes)), label="advice: counting layers", unit="layer"):
            self.states(number)

    def fastest(
        self, count: int = 1, penalty: float = 0.0, forced: Mapping[int, Shape] | None = None
    ) -> list[Candidate]:
        """Return the paths with the smallest seconds, plus `penalty` seconds for each byte stored.

        `forced`: grids of some nodes, by their number; a node that can't have it may have any.
        """
        ways: dict[Shape, list[tuple[float, Candidate]]] = {}
        nodes = self.network.nodes
        for number, node in enumerate(nodes):
            states, before = self.states(number), ways
            if (grid := (forced or {}).get(number)) and (price := self.prices.node(node, grid)):
                states = {grid: price}
            ways = {}
            for grid, price in states.items():
                moved: Iterable[tuple[float, Candidate]] = [(0.0, Candidate((), 0.0, 0))]
                if number:
                    moved = self._moved(number, grid, before)
                ways[grid] = [
                    (
                        value + price.seconds + penalty * price.stored,
                        Candidate((*way.grids, grid), way.seconds + price.seconds, way.stored + price.stored),
                    )
                    for value, way in heapq.nsmallest(count, moved, key=lambda each: each[0])
                ]
        best = heapq.nsmallest(count, chain.from_iterable(ways.values()), key=lambda each: each[0])
        return [way for _, way in best]

    def _moved(
        self, number: int, grid: Shape, ways: Mapping[Shape, list[tuple[float, Candidate]]]
    ) -> Iterable[tuple[float, Candidate]]:
        """Yield all paths to the previous nodes, with the repartition from there to a grid."""
        node, before = self.network.nodes[number], self.network.nodes[number - 1]
        for last, several in ways.items():
            price = self.prices.node(before, last)
            assert price is not None
            seconds = 0.0 if price.y_grid == grid else self.prices.move(node.x_shape, price.y_grid, grid)
            seconds *= 1 + node.differentiates_x
            for value, way in several:
                yield value + seconds, Candidate(way.grids, way.seconds + seconds, way.stored)

    def uniform(self, grid: Shape) -> Candidate:
        """Return the fastest plan in which all nodes that can have a grid do."""
        nodes = self.network.nodes
        same = {number: grid for number, node in enumerate(nodes) if len(node.x_shape) == len(grid)}
        return self.fastest(forced=same)[0]

    def incumbents(self) -> dict[str, Candidate]:
        """Return the obvious plans, by name: the batch is split, or the longest other dimension of the input."""
        shape, nodes = self.network.x_shape, self.network.nodes
        longest = max(range(1, len(shape)), key=lambda d: shape[d])
        found: dict[str, Candidate] = {}
        if (p := self._parts(shape[0])) > 1 or self.prices.workers == 1:
            batch = {number: (p, *(1,) * (len(node.x_shape) - 1)) for number, node in enumerate(nodes)}
            found["the batch split"] = self.fastest(forced=batch)[0]
        if (p := self._parts(shape[longest])) > 1:
            grid = tuple(p if d == longest else 1 for d in range(len(shape)))
            found[f"the split of dimension {longest}"] = self.uniform(grid)
        return found

    def _parts(self, length: int) -> int:
        """Return the number of workers over which a dimension can be split, a divisor of the total."""
        workers = self.prices.workers
        return next(p for p in range(min(length, workers), 0, -1) if workers % p == 0)

    def shortlist(self) -> tuple[list[Candidate], dict[str, int]]:
        """Return the plans worth measuring, and the obvious ones among them, by name.

        The obvious ones come first, the others by estimated seconds. Raises `PlanError` if no plan fits into memory.
        """
        self.count_all()
        obvious = self.incumbents()
        fastest = self.fastest(MOST)
        candidates = [*obvious.values(), *fastest[:2]]
        candidates += [self.uniform(grid) for grid in self._grids[len(self.network.x_shape)]]
        if self.limit is not None:
            price = fastest[0].seconds / max(fastest[0].stored, 1)
            candidates += [self.fastest(penalty=share * price)[0] for share in PENALTIES]
        ordered = sorted(candidates, key=lambda way: way.seconds) + fastest[2:]
        distinct = list(dict.fromkeys([*obvious.values(), *ordered]))
        chosen: list[Candidate] = []
        trained = [number for number, node in enumerate(self.network.nodes) if node.has_params]
        seen = set[Grids]()
        for way in distinct:
            place = tuple(way.grids[number] for number in trained)
            is_new = way in obvious.values() or not trained or place not in seen
            is_near = way in obvious.values() or way.seconds <= NEAR * fastest[0].seconds
            if is_new and ((len(chosen) < MOST and is_near) or len(chosen) < FEWEST) and self.fits(way.grids):
                chosen.append(way)
                seen.add(place)
        if not chosen:
            least = min(self.memory(way.grids) for way in distinct)
            raise PlanError(
                f"`memory` ({memory_text(self.limit or 0)}) is too little for the fullest worker: of the "
                f"{len(distinct)} plans for {self.prices.workers} workers that were counted, the smallest needs "
                f"{memory_text(least)}."
            )
        return chosen, {name: chosen.index(way) for name, way in obvious.items() if way in chosen}

    def plan(self, grids: Grids) -> Candidate:
        """Return the plan with these grids, with its estimate."""
        return self.fastest(forced=dict(enumerate(grids)))[0]

    def fits(self, grids: Grids) -> bool:
        """Say whether the worker that stores most is within the limit."""
        return self.limit is None or self.memory(grids) <= self.limit

    def memory(self, grids: Grids) -> int:
        """Return the largest peak memory of a worker in a step, in bytes."""
        return int(self.cost(grids).memory.max())

    def cost(self, grids: Grids) -> Cost:
        """Return the cost of the whole network."""
        if grids not in self._costs:
            P = self.prices.P
            spec = TensorSpec(self.network.x_shape, P.grid(grids[0]))
            options = {"optimiser": self.prices.optimiser, "dtype": self.prices.dtype}
            self._costs[grids] = cost(self.network.on(grids, P), spec, **options)  # type: ignore[arg-type]
        return self._costs[grids]


def memory_text(nbytes: float) -> str:
    """Return bytes to three digits.

    >>> memory_text(3 * 2**29), memory_text(5000), memory_text(12)
    ('1.5 GiB', '4.88 KiB', '12 B')
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
