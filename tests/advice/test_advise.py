"""The advice is the best of all placements, costs what its network costs, fits the memory, and says what is wrong."""

import itertools
import math
from pathlib import Path

import jax
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.advice.command import advise_on_file
from distdl_jax.advice.graph import Graph
from distdl_jax.advice.seconds import Stopwatch
from distdl_jax.advice.states import Prices, possible_grids
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError

FLOAT = np.dtype("float32")
ONE = dj.planning_world(1).grid([1, 1])
CONV = nn.conv2d(out_channels=4, kernel_size=3, padding=1)
CHAIN = [CONV, jax.nn.relu, nn.max_pool2d(kernel_size=2), nn.flatten(), nn.linear(out_features=4)]
RESIDUAL = [nn.conv2d(out_channels=4, kernel_size=1), nn.batch_norm(), nn.skip(CONV, nn.group_norm(num_groups=2), CONV)]
SKIP_FIRST = [nn.skip(CONV, jax.nn.relu, nn.skip(CONV)), nn.avg_pool2d(kernel_size=2)]
NETWORKS = {
    "chain": (CHAIN, (3, 2, 8, 6)),
    "residual": (RESIDUAL, (2, 3, 9, 8)),
    "skip first": (SKIP_FIRST, (2, 4, 6, 5)),
}


def prices(workers: int) -> Prices:
    return Prices(workers, Stopwatch(dj.machine.load("infiniband-hdr"), FLOAT), copies=2)


@pytest.mark.parametrize("workers", [2, 6])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_placement_is_the_fastest_of_all(name: str, workers: int) -> None:
    """All grids of all layers are tried, and their costs summed along the network."""
    network, x_shape = NETWORKS[name]
    graph, costs = Graph(network, x_shape, FLOAT), prices(workers)
    nodes = []
    for node in graph.nodes:
        found = {grid: costs.node(node, grid, next_saves_x=True) for grid in possible_grids(node, workers)}
        nodes.append({grid: price for grid, price in found.items() if price is not None})

    def seconds(grids: tuple[tuple[int, ...], ...]) -> float:
        total = sum(node[grid].seconds for node, grid in zip(nodes, grids, strict=True))
        for link in graph.links:
            leaves = nodes[link.source][grids[link.source]].y_grid
            comes = nodes[link.target][grids[link.target]].y_grid if link.adds else grids[link.target]
            total += (2 if link.differentiates else 1) * costs.repartition(link.shape, leaves, comes)
        return total

    advice = dj.advise(network, x_shape, workers=workers)
    fastest = min(seconds(grids) for grids in itertools.product(*nodes))
    assert advice.placement.seconds == pytest.approx(fastest, rel=1e-12)
    assert advice.gap == pytest.approx(0, abs=1e-12)
    assert [each.seconds for each in advice.runners_up] == sorted(each.seconds for each in advice.runners_up)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_seconds_are_those_of_the_networks_plan(name: str) -> None:
    """The whole network's plan, layer by layer, takes as long as the placement says."""
    network, x_shape = NETWORKS[name]
    advice, costs = dj.advise(network, x_shape, workers=4), prices(4)
    P = advice.x_spec.partition
    shapes = {w: dj.ShapeDtype(advice.x_spec.shape_on(w), FLOAT) for w in range(4)}
    actions = advice.network.plan(shapes).actions
    total = sum(
        costs.clock.layer([action for action in actions if action.place == place], P.shape, False)
        for place in {action.place for action in actions}
    )
    for spec in jax.tree.leaves(advice.network.param_specs(), is_leaf=lambda leaf: isinstance(leaf, dj.TensorSpec)):
        largest = max(spec.block_shapes.values(), key=math.prod)
        total += costs.clock.update(largest, 2, math.prod(P.shape))
    assert len(set(advice.placement.grids.values())) <= 2  # no repartition, whose messages count with their mean size
    assert total == pytest.approx(advice.placement.seconds, rel=0.05)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_memory_is_respected(share: float) -> None:
    """A limit between what the fastest placement stores and the least there is, and the least itself in the error."""
    network, x_shape = [CONV, jax.nn.relu, CONV, jax.nn.relu, CONV], (2, 4, 12, 12)
    machine = dj.machine.load("perlmutter-cpu")
    free = dj.advise(network, x_shape, workers=8, machine=machine)
    with pytest.raises(PlanError, match=r"needs [0-9.]+ KiB or more"):
        dj.advise(network, x_shape, workers=8, machine=machine, memory=100)
    least = min(place.memory for place in (free.placement, *free.runners_up))
    limit = round(least + share * (free.placement.memory - least))
    advice = dj.advise(network, x_shape, workers=8, machine=machine, memory=limit)
    assert advice.placement.memory <= limit
    assert advice.placement.seconds >= free.placement.seconds * (1 - 1e-12)
    assert all(each.memory <= limit for each in advice.runners_up)


def test_why() -> None:
    """Forcing a grid costs something, the chosen one nothing; text and numbers name layers alike."""
    network, x_shape = NETWORKS["residual"]
    advice = dj.advise(network, x_shape, workers=4)
    same = advice.why(0, advice.placement.grids["0"])
    assert same.seconds == pytest.approx(advice.placement.seconds)
    forced = advice.why("2.0", (1, 1, 1, 1))
    assert forced.grids["2.0"] == (1, 1, 1, 1) and forced.seconds > advice.placement.seconds
    for layer, grid in ((7, (1, 1, 1, 1)), (0, (1, 1, 1)), (0, (5, 1, 1, 1))):
        with pytest.raises(InvalidArgumentError):
            advice.why(layer, grid)


@pytest.mark.parametrize(
    ("network", "x_shape", "error", "message"),
    [
        ([nn.DistributedConv2d], (1, 2, 4, 4), InvalidTypeError, "nn.describe"),
        ([CONV], (4,), InvalidArgumentError, "two lengths"),
        (
            [nn.DistributedLinear(ONE, ONE, ONE, 4, 4)],
            (4, 4),
            InvalidTypeError,
            r"network\[0\].*Linear",
        ),
        ([CONV, 3], (1, 2, 4, 4), InvalidTypeError, r"network\[1\]"),
        ([CONV, nn.conv3d(out_channels=1, kernel_size=1)], (1, 2, 4, 4), PlanError, r"network\[1\].*conv3d"),
        ([nn.skip(CONV)], (1, 2, 4, 4), PlanError, "shape of x"),
        ([], (1, 2), InvalidTypeError, "one or more"),
    ],
)
def test_refused(network: list, x_shape: tuple[int, ...], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        dj.advise(network, x_shape, workers=2)


@pytest.mark.parametrize(
    "options", [{"workers": 0}, {"memory": "4 apples"}, {"optimiser": "none"}, {"machine": "abacus"}]
)
def test_arguments_that_are_refused(options: dict) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(options)) if "machine" not in options else "path_or_name"):
        dj.advise([CONV], (1, 2, 4, 4), **{"workers": 2, **options})


def test_unknown_arguments_of_descriptions() -> None:
    with pytest.raises(InvalidTypeError, match="kernel_size"):
        nn.conv2d(kernel=3)
    with pytest.raises(InvalidTypeError, match="P_x"):
        nn.linear(P_x=dj.planning_world(1).grid([1, 1]))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "network.py"
    file.write_text("from distdl_jax import nn\nnetwork = [nn.linear(out_features=8)]\nx_shape = (64, 32)\n")
    assert advise_on_file([str(file), "--workers", "4", "--memory", "1 GiB"]) == 0
    assert "linear" in (printed := capsys.readouterr().out) and "of 1 GiB" in printed
    file.write_text("network = []\n")
    assert advise_on_file([str(file), "--workers", "4"]) == 1
    assert "`x_shape`" in capsys.readouterr().err
