"""The short list has the fastest of all plans and the obvious ones, within the limit; counts are those of dj.cost."""

import itertools
import math
import re
from functools import cache

import jax
import numpy as np
import pytest

from distdl_jax import nn
from distdl_jax.errors import PlanError
from distdl_jax.tools.advise.network import DescribedNetwork, Grids
from distdl_jax.tools.advise.search import FEWEST, MOST, MOST_GRIDS, Prices, Search, factorisations, memory_text
from distdl_jax.tools.cost.machines import Machine

FLOAT = np.dtype("float32")
MACHINE = Machine(latency=5e-6, bandwidth=5e9, flops=2e10, memory_bandwidth=1e10, memory=16e9)
CONV = nn.conv2d(out_channels=4, kernel_size=3, padding=1)
NETWORKS = {
    "chain": ([CONV, jax.nn.relu, nn.max_pool2d(kernel_size=2), nn.flatten(), nn.linear(out_features=4)], (3, 2, 8, 6)),
    "residual": (
        [nn.conv2d(out_channels=4, kernel_size=1), nn.batch_norm(), nn.skip(CONV, nn.group_norm(num_groups=2), CONV)],
        (2, 3, 9, 8),
    ),
    "two": ([CONV, jax.nn.relu, nn.conv2d(out_channels=2, kernel_size=3)], (4, 2, 12, 12)),
    "skip first": ([nn.skip(CONV, jax.nn.relu, nn.skip(CONV)), nn.avg_pool2d(kernel_size=2)], (2, 4, 6, 5)),
}


@cache
def prices(name: str, workers: int) -> Prices:
    network, x_shape = NETWORKS[name]
    return Prices(DescribedNetwork(network, x_shape, FLOAT), workers, MACHINE, "adam", 2, FLOAT)


def search(name: str, workers: int, limit: float | None = None) -> Search:
    return Search(prices(name, workers), limit)


def every_plan(within: Search) -> dict[Grids, float]:
    """Return the seconds of all combinations of grids without empty blocks, added up along the network."""
    nodes, prices = within.network.nodes, within.prices
    states = []
    for node in nodes:
        dims = len(node.x_shape)
        sizes = [size for size in range(1, prices.workers + 1) if prices.workers % size == 0]
        grids = itertools.chain.from_iterable(factorisations(size, dims) for size in sizes)
        full = [grid for grid in grids if all(p <= n for p, n in zip(grid, node.x_shape, strict=True))]
        states.append({grid: price for grid in full if (price := prices.node(node, grid))})

    def seconds(grids: Grids) -> float:
        total = sum(state[grid].seconds for state, grid in zip(states, grids, strict=True))
        for number in range(1, len(nodes)):
            left, node = states[number - 1][grids[number - 1]].y_grid, nodes[number]
            if left != grids[number]:
                total += (1 + node.differentiates_x) * prices.move(node.x_shape, left, grids[number])
        return total

    return {grids: seconds(grids) for grids in itertools.product(*states)}


@pytest.mark.parametrize(("name", "workers"), [*((name, 2) for name in NETWORKS), ("two", 4)])
def test_the_fastest_ways_are_those_of_a_search_of_all(name: str, workers: int) -> None:
    """The eight fastest plans, and the fastest with a node on a certain grid."""
    within = search(name, workers)
    plans = every_plan(within)
    found = within.fastest(8)
    assert [way.seconds for way in found] == pytest.approx(sorted(plans.values())[:8])
    assert all(way.seconds == pytest.approx(plans[way.grids]) for way in found)
    last = len(within.network.nodes) - 1
    for grid in within.states(last):
        expected = min(seconds for grids, seconds in plans.items() if grids[last] == grid)
        assert within.fastest(forced={last: grid})[0].seconds == pytest.approx(expected)


@pytest.mark.parametrize(("name", "workers"), [*((name, 2) for name in NETWORKS), ("two", 4)])
def test_the_short_list(name: str, workers: int) -> None:
    """It has the fastest plan and both obvious ones, four to eight plans in all, each once."""
    within = search(name, workers)
    plans, obvious = within.shortlist()
    assert FEWEST <= len(plans) == len({way.grids for way in plans}) <= MOST
    assert min(way.seconds for way in plans) == pytest.approx(min(every_plan(within).values()))
    shape, p = within.network.x_shape, math.gcd(workers, within.network.x_shape[0])
    if p > 1:
        assert {math.prod(grid) == grid[0] for grid in plans[obvious["the batch split"]].grids} == {True}
    longest = 1 + int(np.argmax(shape[1:]))
    assert plans[obvious[f"the split of dimension {longest}"]].grids[0][longest] > 1


@pytest.mark.parametrize("name", ["residual", "skip first"])  # behind a flatten data moves
def test_the_counts_of_nodes_are_those_of_the_network(name: str) -> None:
    """Without repartitions, messages and bytes of the nodes of one grid add up to what dj.cost says of the whole."""
    within = search(name, 2)
    grid = (1, 1, 2, 1)
    plan = within.uniform(grid)
    cost = within.cost(plan.grids)
    prices = [within.prices.node(node, grid) for node in within.network.nodes]
    amounts = cost.workers
    messages = amounts.messages + amounts.collectives_forward + amounts.collectives_backward
    assert sum(price.messages for price in prices if price) == messages.max()
    assert sum(price.bytes for price in prices if price) == cost.bytes.max()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_memory_is_respected(share: float) -> None:
    """Each plan of the list is within a limit; the least that the error of too small a one names is enough."""
    free = search("two", 2)
    least = min(free.memory(grids) for grids in every_plan(free))
    with pytest.raises(PlanError, match=re.escape(f"the smallest needs {memory_text(least)}")):
        search("two", 2, least - 1).shortlist()
    limit = least + share * (max(free.memory(way.grids) for way in free.shortlist()[0]) - least)
    within = search("two", 2, limit)
    plans, _ = within.shortlist()
    assert plans and all(within.memory(way.grids) <= limit for way in plans)


def test_many_workers_are_counted_on_few_grids() -> None:
    """On 8 workers a list is made of the grids that a guess says to be fast, the obvious ones among them."""
    described = DescribedNetwork([CONV], (8, 3, 32, 32), FLOAT)
    within = Search(Prices(described, 8, MACHINE, "adam", 2, FLOAT))
    plans, obvious = within.shortlist()
    assert len(plans) <= MOST and len(obvious) == 2
    assert len(within.states(0)) <= MOST_GRIDS
