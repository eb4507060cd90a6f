"""The times of a step are those of a machine's numbers, worked out by hand; table, JSON and picture have the same."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import fields, replace

import numpy as np
import pytest
from layers.test_output_specs import LAYERS

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.costs.cost import Cost
from distdl_jax.costs.links import MachineLinks
from distdl_jax.costs.uncertainty import GUESS, MODEL
from distdl_jax.machine.tables import (
    Calls,
    CollectivePoint,
    Collectives,
    Compute,
    HiddenPoint,
    Host,
    Level,
    Overlap,
    Quality,
    RatePoint,
    Segment,
)

CALL, ARRAY, KERNEL, OPERATION = 1e-3, 1e-4, 1e-5, 1e-6
RATE, BANDWIDTH, COPIED = 1e9, 4e9, 2e9
LATENCY, PER_BYTE, COLLECTIVE = 1e-4, 1e-8, 2e-3
DIRECTIONS = ("forward", "input gradient", "parameter gradient")


def machine(workers: int = 4, source: str = "measured", noise: float = 0.0) -> dj.Machine:
    """Return one on which every number is round: hosts of `workers`, and a network ten times as slow."""
    given = {"source": source}
    rates = tuple(RatePoint("matrix product", "float32", direction, (8, 8, 8), RATE) for direction in DIRECTIONS)
    kinds = ("allreduce", "bcast", "reduce")
    points = tuple(CollectivePoint(kind, n, hosts, 4, COLLECTIVE) for kind in kinds for n in (2, 9) for hosts in (1, 2))

    def level(slower: int) -> Level:
        short = Segment(slower * LATENCY, 1 / (slower * PER_BYTE), 1000)
        long = Segment(2 * slower * LATENCY, 1 / (slower * PER_BYTE))
        return Level(**given, host_bandwidth=1.5 / (slower * PER_BYTE), segments=(short, long))

    return dj.Machine(
        name="round",
        about="",
        mpi="",
        measured_on="",
        host=Host(
            **given,
            workers=workers,
            workers_per_cache=workers,
            memory=1e9,
            memory_bandwidth=100 * BANDWIDTH,
            worker_bandwidth=BANDWIDTH,
            copy_bandwidth=COPIED,
            alone=1.0,
        ),
        levels={"host": level(1), "network": level(10)},
        calls=Calls(**given, call=CALL, array=ARRAY, kernel=KERNEL, operation=OPERATION),
        compute=Compute(**given, float32=RATE, float64=RATE, points=rates),
        collectives=Collectives(**given, points=points),
        overlap=Overlap(**given),
        quality=Quality(**given, noise=noise),
    )


def linear_cost(workers: int, rows: int, machine: dj.Machine, **options: object) -> Cost:
    """Return the cost of a layer from 8 numbers to 8, on workers that have parts of the batch."""
    P = dj.planning_world(workers)
    P_x, P_W = P.grid((workers, 1)), P.grid((workers, 1, 1))
    layer = nn.DistributedLinear(P_x, P_x, P_W, 8, 8, bias=False)
    return dj.cost(layer, dj.TensorSpec((rows, 8), P_x), machine=machine, **options)


def product(rows: int) -> float:
    """Return the seconds of the product of so many rows."""
    return KERNEL + 2 * rows * 8 * 8 / RATE


def test_one_workers_step_is_the_sum_of_its_parts() -> None:
    """A call, the product, the gradient of the weight, and adam: 14 operations on each parameter, or 40 bytes.

    The machine's file says nothing of optimisers: a share of the most that a core can do.
    """
    cost = linear_cost(1, 1000, machine())
    (layer,) = cost.layers
    assert layer.times.forward == pytest.approx([product(1000)])
    assert layer.times.backward == pytest.approx([product(1000)])
    assert layer.times.update == pytest.approx([KERNEL + max(10 * 4 * 64 / BANDWIDTH, 14 * 64 / (0.04 * RATE))])
    call = CALL + 4 * ARRAY  # the input, the weight, and what adam stores of it
    assert cost.once.forward == pytest.approx([call])
    assert cost.seconds.mean == pytest.approx(call + layer.times.total[0])
    assert not layer.times.exposed.any()
    assert linear_cost(1, 1000, machine(), optimiser="sgd").layers[0].times.update[0] < layer.times.update[0]
    assert linear_cost(1, 1000, machine(), backward=False).seconds.mean == pytest.approx(
        CALL + 2 * ARRAY + product(1000)
    )


def test_an_optimiser_takes_what_was_measured_of_such_parameters() -> None:
    """Of kernels with nine taps another rate than of matrices."""
    taps = tuple(RatePoint("optimiser", "float32", "forward", (n,), rate) for n, rate in ((1, RATE), (9, RATE / 8)))
    known = machine()
    known = replace(known, compute=replace(known.compute, points=(*known.compute.points, *taps)))
    P = dj.planning_world(1).grid((1, 1, 1, 1))
    conv = nn.DistributedConv2d(P, in_channels=8, out_channels=8, kernel_size=3, bias=False)
    (layer,) = dj.cost(conv, dj.TensorSpec((1, 8, 16, 16), P), machine=known).layers
    assert layer.times.update == pytest.approx([KERNEL + 14 * 8 * 8 * 9 / (RATE / 8)])
    (layer,) = linear_cost(1, 1000, known).layers
    assert layer.times.update == pytest.approx([KERNEL + 14 * 8 * 8 / RATE])


def test_a_worker_with_fewer_rows_waits_for_the_other() -> None:
    """In the sum of the loss over both: for as long as the other one multiplies more rows."""
    cost = linear_cost(2, 3001, machine())
    (layer,) = cost.layers
    assert layer.times.forward == pytest.approx([product(1501), product(1500)])
    assert cost.once.transfer == pytest.approx([COLLECTIVE] * 2)
    waiting = layer.times.waiting + cost.once.waiting
    assert waiting.min() == pytest.approx(0)
    assert waiting.max() >= product(1501) - product(1500) - 1e-12
    assert cost.seconds.mean == pytest.approx(max(layer.times.total + cost.once.total))


def test_a_halo_is_cut_out_sent_and_joined() -> None:
    """One number to the neighbour and one from it, with copies of what is sent and of the block of 101."""
    P = dj.planning_world(2).grid((1, 1, 2))
    pool = nn.DistributedMaxPool1d(P, 3, 1, 1)
    times = dj.cost(pool, dj.TensorSpec((1, 1, 200), P), machine=machine(), backward=False).layers[0].times
    assert times.transfer == pytest.approx([LATENCY + 4 * PER_BYTE * 2 / 1.5] * 2)
    pooled = KERNEL + 4 * (101 + 100) / BANDWIDTH
    assert times.forward == pytest.approx([KERNEL + 4 * (1 + 101) / COPIED + pooled] * 2)


def test_messages_of_one_host_share_its_bandwidth() -> None:
    """All senders of a host, or all receivers, have 1.5 times the bandwidth of one; each level is counted apart."""
    links = MachineLinks(machine(2), 6, "float32")
    between = np.array([0, 1, 4]), np.array([2, 3, 3]), np.array([500, 500, 100])
    # host 1 receives all three
    expected = [10 * (LATENCY + nbytes * PER_BYTE * 3 / 1.5) for nbytes in (500, 500, 100)]
    assert links.message_seconds(*between) == pytest.approx(expected)
    two = links.message_seconds(np.array([0, 2]), np.array([1, 4]), np.array([500, 2000]))
    assert two == pytest.approx([LATENCY + 500 * PER_BYTE, 10 * (2 * LATENCY + 2000 * PER_BYTE)])
    assert links.eager(np.array([0, 0]), np.array([1, 3]), np.array([1000, 1001])).tolist() == [True, False]
    assert links.used == {"host", "network"}


def test_published_messages_leave_out_the_operation_around_them() -> None:
    """Measured ones are of programs and have it in them."""
    one = np.array([0]), np.array([1]), np.array([100])
    measured, published = (
        MachineLinks(machine(source=source), 2, "float32").message_seconds(*one)[0]
        for source in ("measured", "published: a table")
    )
    assert published - measured == pytest.approx(OPERATION)


def test_the_interval_has_its_reasons() -> None:
    """The model's own error without noise and guesses; more with them."""
    sure = linear_cost(2, 4000, machine()).seconds
    assert (sure.low, sure.high) == pytest.approx(((1 - MODEL) * sure.mean, (1 + MODEL) * sure.mean), rel=1e-6)
    assert len(sure.reasons) == 1
    noisy = linear_cost(2, 4000, machine(noise=0.1)).seconds
    assert noisy.low < noisy.mean < noisy.high and noisy.mean > sure.mean
    assert any("10%" in reason and "step to step" in reason for reason in noisy.reasons)
    guessed = linear_cost(1, 4000, machine(source="guess")).seconds
    assert guessed.high == pytest.approx((1 + min(MODEL + GUESS, 0.9)) * guessed.mean)
    assert "calls (4)" in guessed.reasons[-1] and "levels" not in "".join(guessed.reasons)


def test_what_could_be_hidden_is_the_measured_share_of_messages() -> None:
    """And at most what the layer computes."""
    P = dj.planning_world(2).grid((1, 1, 2))
    pool, spec = nn.DistributedMaxPool1d(P, 3, 1, 1), dj.TensorSpec((1, 1, 2 * 10**6), P)
    hiding = replace(machine(), overlap=Overlap(source="measured", points=(HiddenPoint(4.0, 0.5),)))
    times = dj.cost(pool, spec, machine=hiding, backward=False).layers[0].times
    assert times.hideable == pytest.approx(times.transfer / 2)
    short = dj.cost(pool, dj.TensorSpec((1, 1, 4), P), machine=hiding, backward=False).layers[0].times
    assert short.hideable == pytest.approx(np.minimum(short.transfer / 2, short.forward))


def test_layers_that_are_traced_have_times_too() -> None:
    """By their flops and bytes as a whole, and their messages."""
    P = dj.planning_world(2)
    P_x, P_y = P.grid((1, 2)), P.grid((1, 1))
    layer = nn.Remat(nn.DistributedLinear(P_x, P_y, P.grid((1, 2)), 8, 8))
    network = nn.Sequential(layer, nn.Repartition(P_y, P_x), layer)
    *_, last = dj.cost(network, dj.TensorSpec((16, 8), P_x), machine=machine()).layers
    for seconds in (last.times.forward, last.times.backward, last.times.transfer):
        assert (seconds > 0).all()


def test_json_has_every_number() -> None:
    """Under the names of the attributes."""
    cost = linear_cost(2, 3001, machine(noise=0.1))
    read = json.loads(cost.to_json())
    assert read["version"] == 1
    assert read["seconds"] == {**cost.seconds._asdict(), "reasons": list(cost.seconds.reasons)}
    found = [(read["workers"], cost.workers), (read["once"], cost.once)]
    for entry, layer in zip(read["layers"], cost.layers, strict=True):
        assert (entry["place"], entry["name"]) == (layer.place, layer.name)
        found += [(entry["amounts"], layer.amounts), (entry["times"], layer.times)]
    for numbers, amounts in found:
        assert numbers == {each.name: getattr(amounts, each.name).tolist() for each in fields(amounts)}


def test_the_table_has_a_row_for_each_layer() -> None:
    """With the busiest worker's amounts, and means of times in ms."""
    cost = linear_cost(2, 3001, machine())
    lines = cost.table().splitlines()
    assert lines[0].split()[:4] == ["layer", "Mflop", "messages", "MB"]
    row = next(line for line in lines if line.startswith("DistributedLinear")).split()
    assert row[1] == f"{2 * 2 * 1501 * 64 / 1e6:.3f}"
    assert row[4] == f"{1e3 * (product(1501) + product(1500)) / 2:.3f}"
    assert lines[-2] == f"a step: {cost.seconds}; times in ms"
    total = next(line for line in lines if line.startswith("all layers"))
    assert total.endswith("100.0%")


def test_the_picture_has_bars_as_long_as_the_times() -> None:
    """Of one scale, side by side."""
    cost = linear_cost(2, 3001, machine())
    drawn = ElementTree.fromstring(cost.draw().svg)
    bars = {
        title.text.rsplit(" ", 2)[0]: float(rect.get("width"))
        for rect in drawn.iter("{http://www.w3.org/2000/svg}rect")
        for title in rect
    }
    forward, call = bars["DistributedLinear: forward"], bars["call, sum of the loss: forward"]
    assert forward / call == pytest.approx(cost.layers[0].times.forward.mean() / (CALL + 4 * ARRAY), rel=1e-2)


def test_what_has_no_times_is_refused() -> None:
    """By the argument's name."""
    P = dj.planning_world(3)
    P_x = P.grid((3, 1))
    layer, spec = nn.DistributedLinear(P_x, P_x, P.grid((3, 1, 1)), 8, 8), dj.TensorSpec((9, 8), P_x)
    with pytest.raises(dj.InvalidArgumentError, match=r"`machine` \(=None\) of `dj.cost` must be one"):
        dj.cost(layer, spec).draw()
    assert "forward" not in dj.cost(layer, spec).table()
    with pytest.raises(dj.InvalidArgumentError, match="'nowhere'"):
        dj.cost(layer, spec, machine="nowhere")
    small = replace(machine(2), levels={"host": machine().levels["host"]})
    with pytest.raises(dj.InvalidArgumentError, match="nothing of more than 2 workers"):
        dj.cost(layer, spec, machine=small)


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "functions"])
def test_every_kind_of_movement_has_times(name: str) -> None:
    """Whatever the layer; the parts of the slowest worker add up to the step's mean."""
    layer, shape = LAYERS[name](dj.planning_world(4))[:2]
    cost = dj.cost(nn.Sequential(layer), dj.TensorSpec(shape, layer.input_partition), machine=machine())
    total = sum(each.times.total for each in cost.layers) + cost.once.total
    assert cost.seconds.low < cost.seconds.mean < cost.seconds.high
    assert max(total) == pytest.approx(cost.seconds.mean, rel=1e-6)
