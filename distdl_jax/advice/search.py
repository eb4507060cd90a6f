"""The search for the grids of all layers of a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distdl_jax.advice.elimination import Choice
from distdl_jax.advice.graph import Graph, Link, Shape
from distdl_jax.advice.solver import Problem, Solution, solve
from distdl_jax.advice.states import Price, Prices, chosen_grids
from distdl_jax.progress_line import progress


@dataclass(frozen=True)
class Search:
    """The grids of each node, what each costs, and what repartitions between them do.

    - `limit`: bytes of a worker; None for no limit.
    - `grids`: of each node; `prices`: of each of these.
    """

    graph: Graph
    costs: Prices
    limit: float | None
    grids: tuple[tuple[Shape, ...], ...]

    @classmethod
    def of(cls, graph: Graph, costs: Prices, limit: float | None) -> Search:
        """Return the search among the grids that are worth a look."""
        return cls(graph, costs, limit, tuple(map(tuple, chosen_grids(graph, costs))))

    @cached_property
    def prices(self) -> list[list[Price | None]]:
        """What each grid of each node costs; None where it can't be."""
        next_saves = [False] * len(self.graph.nodes)
        for link in self.graph.links:
            if not link.adds:
                next_saves[link.source] |= self.graph.nodes[link.target].pieces[0].saves_x
        priced = list(zip(self.graph.nodes, self.grids, next_saves, strict=True))
        return [
            [self.costs.node(node, grid, saves) for grid in grids]
            for node, grids, saves in progress(priced, label="advice: planning layers", unit="layer")
        ]

    @cached_property
    def problem(self) -> Problem:
        """Times, memories and repartitions, for the solver."""
        times = [np.array([math.inf if p is None else p.seconds for p in prices]) for prices in self.prices]
        memories = [np.array([0.0 if p is None else float(p.stored) for p in prices]) for prices in self.prices]
        edges: dict[tuple[int, int], np.ndarray] = {}
        for link in progress(self.graph.links, label="advice: planning repartitions", unit="link"):
            ends = link.source, link.target
            edges[ends] = edges.get(ends, 0.0) + self._moves(link)
        return Problem(times, memories, edges)

    def _moves(self, link: Link) -> np.ndarray:
        """Return the seconds of the link's tensor between all grids of the two nodes."""
        return np.array(
            [
                [self.move(link, i, j) for j in range(len(self.grids[link.target]))]
                for i in range(len(self.grids[link.source]))
            ]
        )

    def move(self, link: Link, i: int, j: int) -> float:
        """Return the seconds of a link's tensor from the i-th grid of its source to the j-th of its target."""
        ends = self.ends(link, i, j)
        if ends is None:
            return math.inf
        return (1 + link.differentiates) * self.costs.repartition(link.shape, *ends)

    def ends(self, link: Link, i: int, j: int) -> tuple[Shape, Shape] | None:
        """Return the two grids of a link's tensor; None where a layer does not take its grid."""
        source, target = self.prices[link.source][i], self.prices[link.target][j]
        if source is None or target is None:
            return None
        return source.y_grid, target.y_grid if link.adds else self.grids[link.target][j]

    def solve(self, node: int | None = None, grid: Shape | None = None) -> Solution:
        """Return the fastest choices; where a node is given, those in which it has a grid."""
        if node is None or grid is None:
            return solve(self.problem, self.limit)
        return solve(self.problem.forced(node, self.grids[node].index(grid)), self.limit)

    def with_grid(self, node: int, grid: Shape) -> Search:
        """Return a search in which a node may have one more grid, and all others of as many dimensions, too."""
        if grid in self.grids[node]:
            return self
        more = list(self.grids)
        for place, each in enumerate(self.graph.nodes):
            if len(each.x_shape) == len(grid) and grid not in more[place]:
                fits = all(p <= n for p, n in zip(grid, each.x_shape, strict=True))
                more[place] = (*more[place], grid) if fits or place == node else more[place]
        return Search(self.graph, self.costs, self.limit, tuple(more))

    def memory(self, choice: Choice) -> int:
        """Return the bytes of the worker that stores most: nodes, and arrays that are there on two grids."""
        total = sum(self._price(node, state).stored for node, state in enumerate(choice))
        for link in self.graph.links:
            u, v = self.graph.nodes[link.source], self.graph.nodes[link.target]
            ends = self.ends(link, choice[link.source], choice[link.target])
            if not link.adds and ends is not None and ends[0] != ends[1] and u.pieces and u.pieces[-1].saves_y:
                total += v.pieces[0].saves_x * self.costs.block_bytes(link.shape, ends[0])
        return total

    def _price(self, node: int, state: int) -> Price:
        price = self.prices[node][state]
        assert price is not None  # of a choice of finite time
        return price

    def grids_of(self, choice: Choice) -> tuple[Shape, ...]:
        """Return the grid of each node."""
        return tuple(grids[state] for grids, state in zip(self.grids, choice, strict=True))

    def fitting(self, choices: Sequence[Choice]) -> list[Choice]:
        """Return the choices that are within the limit with all their arrays."""
        return [choice for choice in choices if self.limit is None or self.memory(choice) <= self.limit]
