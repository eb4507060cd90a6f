"""The table, the picture and the JSON of a cost, and the lower bound of waiting."""

import json
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import nn


def network(P: dj.Partition) -> tuple[nn.Sequential, dj.TensorSpec]:
    grid = P.grid([1, 1, 2, 2])
    layers = nn.Sequential(
        nn.DistributedConv2d(grid, in_channels=1, out_channels=3, kernel_size=3, padding=1),
        jax.nn.relu,
        nn.Repartition(grid, P.grid([4, 1, 1, 1])),
    )
    return layers, dj.TensorSpec((4, 1, 9, 8), grid)


def test_waiting_is_that_of_the_counts() -> None:
    """Of each layer, for the worker with most of both; of all layers, for the worker with most in all."""
    cost = dj.cost(*network(dj.planning_world(4)))
    total = np.zeros(4)
    rows = cost.table(bandwidth=" 8Mbit/s ", latency="1.5e-1 ms").splitlines()
    assert rows[0].endswith("MB stored  ms waiting") and "lower bound" in rows[-1]
    for layer, row in zip(cost.layers, rows[2:], strict=False):
        amounts = layer.amounts
        sent = amounts.messages + amounts.collectives_forward + amounts.collectives_backward
        waiting = sent * 0.15 + amounts.bytes / 1e3  # ms, at 1 MB/s
        assert float(row.split()[-1]) == pytest.approx(waiting.max(), rel=0.01)
        total += waiting
    assert total.max() > 1 and float(rows[-3].split()[-1]) == pytest.approx(total.max(), rel=0.01)
    assert cost.table(latency="0.001 s").splitlines()[-3].split()[-1] == str(cost.workers.operations.max())
    assert cost.table() == str(cost) and "waiting" not in str(cost)


@pytest.mark.parametrize("text", ["10", "10 GB", "-1 GB/s", "0 GB/s", "inf GB/s", "1..2 GB/s", "2 us", "", "9" * 999])
def test_a_number_without_its_unit_is_refused(text: str) -> None:
    cost = dj.cost(*network(dj.planning_world(4)))
    with pytest.raises(dj.InvalidArgumentError, match=r"`bandwidth` .*must be a positive number with a unit.* GiB/s"):
        cost.table(bandwidth=text, latency="2 us")
    with pytest.raises(dj.InvalidArgumentError, match=r"`latency` .*like '2 us'"):
        cost.table(latency="10 GB/s")
    with pytest.raises(dj.InvalidTypeError, match=r"`latency` \(=2e-06\) must be a string like '2 us'"):
        cost.table(latency=2e-6)  # type: ignore[arg-type]


def test_a_table_a_picture_and_json_show_each_layer() -> None:
    """The picture is SVG with a row for each layer; JSON has all that the table has."""
    cost = dj.cost(*network(dj.planning_world(4)))
    drawn = dj.draw(cost)
    ElementTree.fromstring(drawn.svg)
    written = json.loads(cost.to_json())
    assert written["version"] == 3
    for layer, row in zip(cost.layers, written["layers"], strict=True):
        assert layer.title in cost.table() and layer.title in drawn.svg
        assert row["amounts"]["flops_forward"] == layer.amounts.flops_forward.tolist()
        assert row["activations"] == cost.activations[layer.place].tolist()
