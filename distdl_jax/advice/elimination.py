"""The cheapest choices on a graph of choices, in ascending order, by eliminating one node after another."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

Choice = tuple[int, ...]
"""A state for each node."""


@dataclass(frozen=True)
class Factor:
    """Costs that depend on the states of some nodes: an axis of `costs` for each of `nodes`, which ascend."""

    nodes: tuple[int, ...]
    costs: np.ndarray

    def over(self, nodes: Sequence[int]) -> np.ndarray:
        """Return the costs with an axis for each of `nodes`, ascending, of length 1 where they don't depend on it."""
        lengths = dict(zip(self.nodes, self.costs.shape, strict=True))
        return self.costs.reshape([lengths.get(node, 1) for node in nodes])

    def at(self, states: Mapping[int, int], free: int) -> np.ndarray:
        """Return the costs of the states of the node `free`, where `states` are those of all others."""
        index = tuple(slice(None) if node == free else states[node] for node in self.nodes)
        costs: np.ndarray = self.costs[index]
        return costs


class Elimination:
    """A graph whose nodes are eliminated, each with the least cost of its states as a function of its neighbours'.

    It is exact for every graph. The largest table has an axis for each node that is a neighbour at the time, at most
    two on graphs that are made of chains and of skips within each other.

    - `least`: the cost of the cheapest choice.

    Source: Jia et al. (2018), arXiv:1802.04924; Dechter (1999), bucket elimination.
    """

    def __init__(self, factors: Sequence[Factor], nodes: int) -> None:
        remaining, self._buckets = list(factors), dict[int, list[Factor]]()
        self.least = 0.0
        left = set(range(nodes))
        while left:
            node = min(left, key=lambda node: (len(_neighbours(node, remaining)), node))
            left.remove(node)
            bucket = [factor for factor in remaining if node in factor.nodes]
            remaining = [factor for factor in remaining if node not in factor.nodes]
            self._buckets[node] = bucket
            scope = sorted({node}.union(*(factor.nodes for factor in bucket)))
            costs = _least_over(scope.index(node), [factor.over(scope) for factor in bucket])
            others = tuple(each for each in scope if each != node)
            if others:
                remaining.append(Factor(others, costs))
            else:
                self.least += float(costs)

    def ascending(self) -> Iterator[tuple[float, Choice]]:
        """Yield choices and their costs, cheapest first, all of them; only those that are asked for are computed."""
        order = list(reversed(self._buckets))
        ties = itertools.count()
        heap: list[tuple[float, int, dict[int, int]]] = [(self.least, next(ties), {})]
        while heap:
            cost, _, states = heapq.heappop(heap)
            while len(states) < len(order):  # along the cheapest states; the others wait for their turn
                node = order[len(states)]
                costs = reduce(np.add, [factor.at(states, node) for factor in self._buckets[node]])
                best = int(np.argmin(costs))
                for state in np.flatnonzero(np.isfinite(costs)):
                    if state != best:
                        above = cost + float(costs[state] - costs[best])
                        heapq.heappush(heap, (above, next(ties), {**states, node: int(state)}))
                states = {**states, node: best}
            if np.isfinite(cost):
                yield cost, tuple(states[node] for node in range(len(order)))


def _neighbours(node: int, factors: Sequence[Factor]) -> set[int]:
    return set().union(*(factor.nodes for factor in factors if node in factor.nodes)) - {node}


def _least_over(axis: int, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the least sum of `arrays` along an axis, slice by slice: all sums at once would take much memory."""
    length = max(array.shape[axis] for array in arrays)
    slices = (
        reduce(np.add, [array.take(state if array.shape[axis] > 1 else 0, axis=axis) for array in arrays])
        for state in range(length)
    )
    return reduce(np.minimum, slices)
