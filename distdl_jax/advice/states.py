"""What layers cost on a grid of workers, and the grids that are worth a look."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from distdl_jax.advice.estimate import Estimate
from distdl_jax.advice.graph import Graph, Node, Piece, Shape
from distdl_jax.advice.seconds import Stopwatch, looked_at
from distdl_jax.costs.layers import PlacedLayer
from distdl_jax.costs.step_program import step_events
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.planning import planning_world
from distdl_jax.plans.alike import derived, representatives
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.plans.work import Work
from distdl_jax.primitives.plan import Action
from distdl_jax.tensors import TensorSpec

ALL_PLANNED = 48
"""Up to so many grids of a layer, all are planned; of more, those that an estimate says to be the fastest."""

PLANNED = 3
"""Of many grids, so many are planned, and the fastest of each number of workers."""

NEAR = 3.0
"""Only grids on which a layer takes at most so many times as long as on the best one, by the estimate."""


@dataclass(frozen=True)
class Price:
    """What some layers cost the worker that they cost most.

    - `seconds`: of a training step.
    - `stored`: bytes of parameters, gradients and the optimiser's numbers, and of saved activations.
    - `y_grid`: where they leave their output.
    """

    seconds: float
    stored: int
    y_grid: Shape


@dataclass
class Prices:
    """Costs of layers on the first workers of a world, each computed once.

    - `workers`: how many there are; `copies`: how many numbers the optimiser stores for a parameter.
    """

    workers: int
    clock: Stopwatch
    copies: int
    _known: dict[Any, Price | None] = field(default_factory=dict)
    _estimates: dict[Any, Estimate] = field(default_factory=dict)
    _moves: dict[tuple[Shape, Shape, Shape], float] = field(default_factory=dict)

    def repartition(self, shape: Shape, grid: Shape, other: Shape) -> float:
        """Return the seconds of a repartition."""
        key = shape, grid, other
        if key not in self._moves:
            self._moves[key] = self.clock.repartition(*key)
        return self._moves[key]

    def node(self, node: Node, grid: Shape, next_saves_x: bool) -> Price | None:
        """Return the cost of a node on a grid; None where one of its layers does not take such a partition.

        - `next_saves_x`: whether what comes next saves its input, so that this node need not count it.
        """
        seconds, stored = 0.0, 0
        for number, piece in enumerate(node.pieces):
            if (price := self.piece(piece, grid)) is None:
                return None
            following = node.pieces[number + 1 : number + 2]
            twice = following[0].saves_x if following else next_saves_x
            seconds, stored, grid = seconds + price.seconds, stored + price.stored, price.y_grid
            if piece.saves_y and not twice:
                stored += self.block_bytes(piece.y_shape, grid)
        return Price(seconds, stored, grid)

    def piece(self, piece: Piece, grid: Shape) -> Price | None:
        """Return the cost of one layer on a grid, but for a saved output; None where it does not take it."""
        key = piece.layer, piece.x_shape, piece.differentiates_x, grid
        if key not in self._known:
            self._known[key] = self._price(piece, grid)
        return self._known[key]

    def estimate(self, piece: Piece) -> Estimate:
        """Return the estimate of a layer."""
        key = piece.layer, piece.x_shape, piece.differentiates_x
        if key not in self._estimates:
            self._estimates[key] = Estimate.of(piece, self.clock, self.copies)
        return self._estimates[key]

    def _price(self, piece: Piece, grid: Shape) -> Price | None:
        P = planning_world(math.prod(grid)).grid(grid)
        blocks = TensorSpec(piece.x_shape, P).block_shapes
        x = derived(lambda worker: ShapeDtype(blocks[worker], self.clock.dtype), blocks)
        try:
            layer = piece.on(P)
            plan = piece.plan(layer, x, P)
            seconds = self.clock.layer(plan.actions, grid, piece.differentiates_x)
        except (InvalidArgumentError, PlanError):
            return None
        itemsize, specs = self.clock.dtype.itemsize, PlacedLayer("", layer, piece.name).param_specs
        shapes = [[spec.block_shapes[worker] for worker in representatives(spec.block_shapes)] for spec in specs]
        largest = [max(each, key=math.prod) for each in shapes]
        parameters = sum(map(math.prod, largest)) * itemsize
        seconds += sum(self.clock.update(shape, self.copies, math.prod(grid)) for shape in largest if math.prod(shape))
        stored = (2 + self.copies) * parameters + piece.saves_x * self.block_bytes(piece.x_shape, grid)
        stored += max(sum(work.saved or 0 for work in _works(plan.actions, worker)) for worker in looked_at(P.shape))
        P_y = getattr(layer, "output_partition", P)
        return Price(seconds, stored, grid if P_y == P else P_y.shape)

    def block_bytes(self, shape: Shape, grid: Shape) -> int:
        """Return the bytes of the largest block."""
        return math.prod(-(-n // p) for n, p in zip(shape, grid, strict=True)) * self.clock.dtype.itemsize


def _works(actions: Sequence[Action], worker: int) -> Iterator[Work]:
    for event in step_events(actions, worker, backward=False):
        if isinstance(event.does, Work):
            yield event.does


@lru_cache
def factorisations(workers: int, dims: int) -> tuple[Shape, ...]:
    """Return all grids of so many workers, with so many dimensions.

    >>> factorisations(4, 2)
    ((1, 4), (2, 2), (4, 1))
    """
    if dims == 1:
        return ((workers,),)
    divisors = (d for d in range(1, workers + 1) if workers % d == 0)
    return tuple((d, *rest) for d in divisors for rest in factorisations(workers // d, dims - 1))


def possible_grids(node: Node, workers: int) -> list[Shape]:
    """Return the grids, of all divisors of `workers`, on which no block of the node's tensors is empty."""
    shapes = [node.x_shape]
    for piece in node.pieces:
        if len(piece.y_shape) != len(node.x_shape):
            break
        shapes.append(piece.y_shape)
    most = [min(lengths) for lengths in zip(*shapes, strict=True)]
    teams = (d for d in range(1, workers + 1) if workers % d == 0)
    every = itertools.chain.from_iterable(factorisations(team, len(most)) for team in teams)
    return [grid for grid in every if all(p <= n for p, n in zip(grid, most, strict=True))]


def chosen_grids(graph: Graph, prices: Prices) -> list[list[Shape]]:
    """Return the grids to look at for each node: all where there are few, else those that an estimate says are fast.

    What is fastest for one node is looked at for all, so that neighbours can have the same.
    """
    possible = [possible_grids(node, prices.workers) for node in graph.nodes]
    many = [bool(node.pieces) and len(grids) > ALL_PLANNED for node, grids in zip(graph.nodes, possible, strict=True)]
    estimates = [
        [prices.estimate(piece) for piece in node.pieces] if large else []
        for node, large in zip(graph.nodes, many, strict=True)
    ]
    alike = _alike(graph, [each for several in estimates for each in several])
    seconds: list[dict[Shape, float]] = [
        {grid: sum(each.seconds(grid) for each in several) for grid in grids if _descends(grid, alike)}
        for grids, several in zip(possible, estimates, strict=True)
    ]
    fastest: dict[int, set[Shape]] = {}
    for node, large, times in zip(graph.nodes, many, seconds, strict=True):
        if large:
            fastest.setdefault(len(node.x_shape), set()).update(heapq.nsmallest(PLANNED, times, key=times.__getitem__))
    chosen = [
        _near(times, fastest[len(node.x_shape)]) if large else grids
        for node, large, grids, times in zip(graph.nodes, many, possible, seconds, strict=True)
    ]
    if len(possible[0]) > ALL_PLANNED and not graph.nodes[0].pieces:
        others = {grid for grids in chosen[1:] for grid in grids if len(grid) == len(graph.x_shape)}
        chosen[0] = [grid for grid in possible[0] if grid in others]
    return chosen


def _near(seconds: Mapping[Shape, float], fastest: Set[Shape]) -> list[Shape]:
    """Return those of `fastest`, and the best of each number of workers, that take hardly longer than the best."""
    limit = NEAR * min(seconds.values())
    ordered = sorted((grid for grid in seconds if seconds[grid] <= limit), key=seconds.__getitem__)
    first = {math.prod(grid): grid for grid in reversed(ordered)}
    return [grid for grid in ordered if grid in fastest or grid in first.values()]


def _alike(graph: Graph, estimates: Sequence[Estimate]) -> list[tuple[int, int]]:
    """Return the pairs of neighbouring dimensions of the input that are equal to all layers."""
    dims = len(graph.x_shape)
    shapes = [shape for piece in graph.pieces for shape in (piece.x_shape, piece.y_shape) if len(shape) == dims]
    return [
        (d, d + 1)
        for d in range(dims - 1)
        if all(shape[d] == shape[d + 1] for shape in (graph.x_shape, *shapes))
        and all(each.movements[d] == each.movements[d + 1] for each in estimates if len(each.movements) == dims)
    ]


def _descends(grid: Shape, alike: Sequence[tuple[int, int]]) -> bool:
    """Say whether dimensions that are alike have descending numbers of workers: so neighbours are on one host."""
    return all(e >= len(grid) or grid[d] >= grid[e] for d, e in alike)
