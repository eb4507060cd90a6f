"""Machines of five numbers, and the seconds that are estimated from them."""

import json
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import nn

OWN = {"latency": 1e-5, "bandwidth": 1e9, "flops": 1e10, "memory_bandwidth": 1e10, "memory": 1e9}


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("latency", 2.4, dj.InvalidArgumentError, "must be a number of seconds"),  # microseconds
        ("bandwidth", 25, dj.InvalidArgumentError, "25e9 for 25 GB/s"),
        ("flops", "80 Gflop/s", dj.InvalidTypeError, "80e9 for 80 Gflop/s"),
        ("memory_bandwidth", True, dj.InvalidTypeError, "must be a number of bytes per second"),
        ("memory", float("nan"), dj.InvalidArgumentError, "4e9 for 4 GB"),
        ("source", 3, dj.InvalidTypeError, "must be a string"),
    ],
)
def test_a_number_in_another_unit_is_refused(name: str, value: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        dj.Machine(**{**OWN, name: value})  # type: ignore[arg-type]


def test_machines_by_name() -> None:
    """All are known with a source; another name, and a path, are refused with the names that there are."""
    assert all(dj.machine.load(name).source for name in dj.machine.names())
    for other in ("cray", "machine.toml", 3):
        with pytest.raises(dj.InvalidArgumentError, match="must be one of infiniband-hdr, "):
            dj.machine.load(other)  # type: ignore[arg-type]
        with pytest.raises(dj.InvalidArgumentError, match="must be one of infiniband-hdr, "):
            dj.cost(nn.Sequential(jax.nn.relu), dj.TensorSpec((4,), dj.planning_world(1).grid([1])), machine=other)  # type: ignore[arg-type]


def test_a_machine_printed_is_a_call_that_makes_it() -> None:
    machine = dj.Machine(**OWN, source="here")
    assert eval(str(machine), {"Machine": dj.Machine}) == machine


def network(P: dj.Partition) -> tuple[nn.Sequential, dj.TensorSpec]:
    grid = P.grid([1, 1, 2, 2])
    layers = nn.Sequential(
        nn.DistributedConv2d(grid, in_channels=1, out_channels=3, kernel_size=3, padding=1),
        jax.nn.relu,
        nn.Repartition(grid, P.grid([4, 1, 1, 1])),
    )
    return layers, dj.TensorSpec((4, 1, 9, 8), grid)


def test_seconds_of_a_network_are_those_of_its_counts() -> None:
    """Of each layer and worker; a step is that of the slowest worker. Without a machine there are none."""
    machine = dj.Machine(**OWN)
    cost = dj.cost(*network(dj.planning_world(4)), machine=machine)
    total = np.zeros(4)
    for layer in cost.layers:
        amounts = layer.amounts
        sent = amounts.messages + amounts.collectives_forward + amounts.collectives_backward
        want = sent * 1e-5 + amounts.bytes / 1e9 + amounts.flops / 1e10 + amounts.memory_traffic / 1e10
        assert layer.seconds is not None
        np.testing.assert_allclose(layer.seconds, want)
        total += want
    assert cost.seconds == pytest.approx(total.max())
    without = dj.cost(*network(dj.planning_world(4)))
    assert without.seconds is None and "estimate" not in without.table()


def test_a_table_a_picture_and_json_show_each_layer() -> None:
    """The picture is SVG with a row for each layer, also without a machine; JSON has all that the table has."""
    cost = dj.cost(*network(dj.planning_world(4)), machine="workstation")
    drawn = cost.draw()
    ElementTree.fromstring(drawn.svg)
    written = json.loads(cost.to_json())
    assert written["version"] == 2 and written["seconds"] == cost.seconds
    for layer, row in zip(cost.layers, written["layers"], strict=True):
        assert layer.title in cost.table() and layer.title in drawn.svg
        assert row["amounts"]["flops_forward"] == layer.amounts.flops_forward.tolist()
        assert row["activations"] == cost.activations[layer.place].tolist()
    assert "not suited for ranking" in cost.table()


@pytest.mark.world(2)
def test_a_machine_is_measured_by_all_workers(world_size: int) -> None:
    machine = dj.machine.measure()
    found = dj.Partition().allgather_data(str(machine))
    assert found is not None and set(found) == {str(machine)}
    assert machine.source == f"measured by {world_size} workers on 1 host"


@pytest.mark.world(1)
@pytest.mark.simulated(2)
def test_a_machine_is_not_measured_by_one_worker_or_by_threads(world_size: int) -> None:
    with pytest.raises(dj.InvalidArgumentError, match="two or more workers, each a separate process"):
        dj.machine.measure()
