"""What a node costs on a grid, and a repartition between two: exact counts, and an estimate of seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.nn.dense.prelu import DistributedPReLU
from distdl_jax.nn.networks.sequential import Sequential
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.planning import planning_world
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.decomposition import balanced_ranges
from distdl_jax.tools.advise.network import DescribedNetwork, Node, Shape
from distdl_jax.tools.cost.machine import Machine

MOST_COUNTED, FEWEST_GRIDS, MOST_GRIDS = 120, 8, 24
"""How many times nodes are counted, about; and on how many grids each, of those that seem fastest."""


@dataclass(frozen=True)
class Price:
    """What a node costs the worker that it costs most.

    - `seconds`: of a step, estimated. `messages`, `bytes`: that the worker sends.
    - `stored`: bytes of parameters, gradients, the optimiser's numbers, and arrays for the backward pass.
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

    - `workers`: how many there are. `optimiser`, `dtype`: as in `dj.cost`. `copies`: numbers for each parameter.
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
        """Return the price of a node; None where one of its layers can't be on that grid."""
        key = node.key, grid
        if key not in self._known:
            try:
                self._known[key] = self._count(node, grid)
            except (InvalidArgumentError, InvalidTypeError, PlanError):
                self._known[key] = None
        return self._known[key]

    def _count(self, node: Node, grid: Shape) -> Price:
        """Count a node alone; where a gradient of its input is computed, behind a layer that has a parameter."""
        from distdl_jax.tools.cost.cost import cost

        P = self.P.grid(grid)
        layers, y_grid = self.network.node_on(node, grid, P)
        before = [DistributedPReLU(P)] if node.differentiates_x else []
        found = cost(
            Sequential(*before, *layers), TensorSpec(node.x_shape, P), optimiser=self.optimiser, dtype=self.dtype
        )
        rows = [row for row in found.layers if not before or row.place.split(".")[0] != "0"]
        names = ("operations", "bytes", "flops", "memory_traffic", "parameters")
        counts = {name: np.sum([getattr(row.amounts, name) for row in rows], axis=0) for name in names}
        stored = (2 + self.copies) * counts.pop("parameters") + sum(found.activations[row.place] for row in rows)
        messages, nbytes = counts["operations"], counts["bytes"]
        seconds = self.machine.seconds(*counts.values())
        return Price(float(np.max(seconds)), int(messages.max()), int(nbytes.max()), int(stored.max()), y_grid)

    def move(self, shape: Shape, grid: Shape, other: Shape) -> float:
        """Return the seconds of a repartition of a tensor of a global shape."""
        key = shape, grid, other
        if key not in self._moves:
            messages, elements = repartition_counts(*key)
            nbytes = elements * self.dtype.itemsize
            self._moves[key] = float(np.max(self.machine.seconds(messages, nbytes, 0, 2 * nbytes), initial=0.0))
        return self._moves[key]

    def grids(self, dims: int) -> list[Shape]:
        """Return the grids on which nodes of so many dimensions are counted, those that seem fastest first."""
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
        """Return a function that guesses the seconds of a node on any grid, from its price where one dimension is cut.

        What a cut along one dimension costs is taken as independent of the cuts along the others, but for the size of
        the blocks; a cut that the node can't have costs what the whole node does.
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


def repartition_counts(shape: Shape, grid: Shape, other: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Return the messages and the elements that each worker sends when a tensor moves from one grid to another.

    >>> [counts.tolist() for counts in repartition_counts((4, 4), (2, 1), (1, 2))]
    [[1, 1], [4, 4]]
    """
    workers, targets = math.prod(grid), math.prod(other)
    own = messages = elements = np.ones(workers, np.int64)
    index = np.unravel_index(np.arange(workers), grid)
    kept = np.unravel_index(np.minimum(np.arange(workers), targets - 1), other)
    for d, n in enumerate(shape):
        shared = _overlaps(n, grid[d], other[d])
        messages = messages * (shared > 0).sum(1)[index[d]]
        elements = elements * shared.sum(1)[index[d]]
        own = own * shared[index[d], kept[d]]
    own = np.where(np.arange(workers) < targets, own, 0)
    return np.where(elements > 0, messages - (own > 0), 0), elements - own


def _overlaps(n: int, p: int, q: int) -> np.ndarray:
    """Return how many of `n` items each of `p` balanced blocks has in common with each of `q`."""
    (a, b), (c, d) = (np.asarray(balanced_ranges(n, parts)).T for parts in (p, q))
    return np.maximum(np.minimum.outer(b, d) - np.maximum.outer(a, c), 0)
