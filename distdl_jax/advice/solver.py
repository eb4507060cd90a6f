"""The fastest choices of states within a memory limit, with a bound on what any other choice could reach."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distdl_jax.advice.elimination import Choice, Elimination, Factor

EXPANSIONS = 20_000
"""How many choices are looked at, at most, until the gap is closed."""


@dataclass(frozen=True)
class Problem:
    """Nodes with states: the time and memory of each state, and the time between the states of two nodes.

    - `times`, `memories`: an array for each node, an entry for each of its states.
    - `edges`: from pairs of nodes (u, v), u < v, to an array of times: states of u x states of v.
    """

    times: Sequence[np.ndarray]
    memories: Sequence[np.ndarray]
    edges: Mapping[tuple[int, int], np.ndarray]

    def factors(self, price: float = 0.0) -> list[Factor]:
        """Return the costs: times, and memory at a `price` for a byte."""
        pairs = zip(self.times, self.memories, strict=True)
        nodes = [Factor((node,), time + price * memory) for node, (time, memory) in enumerate(pairs)]
        return nodes + [Factor(edge, times) for edge, times in self.edges.items()]

    def time(self, choice: Choice) -> float:
        """Return the time of a choice."""
        nodes = sum(float(times[state]) for times, state in zip(self.times, choice, strict=True))
        return nodes + sum(float(times[choice[u], choice[v]]) for (u, v), times in self.edges.items())

    def memory(self, choice: Choice) -> float:
        """Return the memory of a choice."""
        return sum(float(memory[state]) for memory, state in zip(self.memories, choice, strict=True))

    def forced(self, node: int, state: int) -> Problem:
        """Return the problem in which a node has to be in a state."""
        times = list(self.times)
        times[node] = np.where(np.arange(len(times[node])) == state, times[node], np.inf)
        return replace(self, times=times)


@dataclass(frozen=True)
class Solution:
    """What was found.

    - `choices`: the fastest within the limit, fastest first; none where nothing fits.
    - `bound`: no choice within the limit is faster than this.
    - `least_memory`: of any choice.
    """

    choices: tuple[Choice, ...]
    bound: float
    least_memory: float


def solve(problem: Problem, limit: float | None = None, best: int = 10) -> Solution:
    """Return the `best` fastest choices whose memory is within `limit`.

    Without a limit, or where the fastest choice is within it, the result is exact. Else memory gets a price, found by
    bisection, at which the cheapest choice is within the limit but hardly more: its cost is a bound. Then choices are
    looked at in ascending cost until no other can be faster, or `EXPANSIONS` were.
    """
    nodes = len(problem.times)
    free = Elimination(problem.factors(), nodes)
    pairs = zip(problem.times, problem.memories, strict=True)
    least = sum(float(memories[np.isfinite(times)].min()) for times, memories in pairs)
    if limit is None:
        limit = np.inf
    if least > limit:
        return Solution((), np.inf, least)
    price = 0.0
    first = next(free.ascending(), None)
    if first is not None and problem.memory(first[1]) > limit:
        price = _price(problem, limit)
        free = Elimination(problem.factors(price), nodes)
    found: list[tuple[float, Choice]] = []
    bound = np.inf
    for count, (cost, choice) in enumerate(free.ascending()):
        bound = cost - price * limit if price else cost
        if (len(found) == best and bound >= found[-1][0]) or count == EXPANSIONS:
            break
        if problem.memory(choice) <= limit:
            bisect.insort(found, (problem.time(choice), choice))
            del found[best:]
    else:
        bound = np.inf  # all were looked at
    fastest = found[0][0] if found else np.inf
    return Solution(tuple(choice for _, choice in found), min(bound, fastest), least)


def _price(problem: Problem, limit: float) -> float:
    """Return a price of memory, in time for a byte, at which the cheapest choice just fits the limit."""

    def fits(price: float) -> bool:
        _, choice = next(Elimination(problem.factors(price), len(problem.times)).ascending())
        return problem.memory(choice) <= limit

    low, high = 0.0, 1e-15
    while not fits(high):
        low, high = high, high * 32
        if high > 1e15:
            break  # only the choice with the least memory fits
    for _ in range(14):
        middle = (low * high) ** 0.5 if low else high / 32
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
