"""Machines say the times of their files: segments exactly, measured points where there are some, and MPICH's shape."""

from dataclasses import replace
from math import log2

import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax.machine.quantities import UNITS, parse, write
from distdl_jax.machine.tables import CollectivePoint, Collectives, HiddenPoint, Level, Overlap, RatePoint, Segment
from distdl_jax.plans.work import Work


@pytest.fixture(scope="module")
def machine():
    return dj.machine.load("infiniband-hdr")


def with_level(machine, *segments, host_bandwidth=float("inf")):
    level = Level(source="measured", host_bandwidth=host_bandwidth, segments=segments)
    return replace(machine, levels={**machine.levels, "network": level})


def test_messages_take_the_latency_and_bandwidth_of_their_segment(machine):
    two = with_level(machine, Segment(1e-6, up_to=100), Segment(2e-6, 1e9))
    assert two.message_seconds(100, "network") == 1e-6
    np.testing.assert_allclose(two.message_seconds(np.array([0, 1000]), "network"), [1e-6, 3e-6])


def test_pairs_share_the_bandwidth_of_the_host_only_beyond_their_own(machine):
    shared = with_level(machine, Segment(0.0, 1e9), host_bandwidth=4e9)
    times = [shared.message_seconds(1e9, "network", pairs=pairs) for pairs in (1, 4, 8)]
    assert times == [1.0, 1.0, 2.0]


def test_workers_fill_caches_and_hosts_in_order(machine):
    assert [machine.level_of(0, b) for b in (1, 2, 31, 32)] == ["shared cache", "host", "host", "network"]


def test_collectives_without_points_are_mpichs(machine):
    plain = with_level(machine, Segment(1e-6, 1e9))
    plain = replace(plain, host=replace(plain.host, workers=1, workers_per_cache=1))
    n = 2**20
    for team in (4, 16, 64):
        ring = (log2(team) + team - 1) * 1e-6 + 2 * (team - 1) / team * n / 1e9
        tree = log2(team) * (1e-6 + n / 1e9)
        expected = tree if team < 8 else ring
        assert plain.collective_seconds("bcast", team, n, hosts=team) == pytest.approx(expected)
        summed = 2 * log2(team) * 1e-6 + (team - 1) / team * n * (2 / 1e9 + 3 / plain.host.worker_bandwidth)
        assert plain.collective_seconds("allreduce", team, n, hosts=team) == pytest.approx(summed)


def test_measured_points_win_and_lie_on_lines_in_logarithms(machine):
    points = [
        CollectivePoint("reduce", workers, 1, nbytes, workers * nbytes * 1e-9)
        for workers in (2, 8)
        for nbytes in (10.0**4, 10.0**6)
    ]
    measured = replace(machine, collectives=Collectives(source="measured", points=tuple(points)))
    assert measured.collective_seconds("reduce", 8, 1e6) == pytest.approx(8e-3)
    assert measured.collective_seconds("reduce", 4, 1e5) == pytest.approx(4e-4, rel=1e-3)
    more = measured.collective_seconds("reduce", 16, 1e6) / 8e-3
    assert more == pytest.approx(
        machine.collective_seconds("reduce", 16, 1e6) / machine.collective_seconds("reduce", 8, 1e6)
    )


@pytest.mark.parametrize("kind", ["allreduce", "bcast", "reduce", "allgather", "reduce_scatter"])
def test_one_worker_alone_has_nothing_to_do(machine, kind):
    assert machine.collective_seconds(kind, 1, 1e6) == 0.0
    assert np.all(machine.collective_seconds(kind, 96, np.array([0.0, 1e6]), hosts=3) > 0)


def test_arithmetic_takes_the_longer_of_flops_and_bytes(machine):
    points = (RatePoint("matrix product", "float32", "forward", (64, 64, 64), 5e9),)
    known = replace(machine, compute=replace(machine.compute, points=points))
    flops = Work("matrix product", flops=5 * 10**9, read=1, written=1, shape=(64, 64, 64))
    assert known.work_seconds(flops, "forward", "float32") == pytest.approx(1 + known.calls.kernel)
    assert known.work_seconds(flops, "forward", "float64") == pytest.approx(2 + known.calls.kernel)
    assert known.work_seconds(flops, "forward", "float32", busy=1) == pytest.approx(1 / 1.1 + known.calls.kernel)
    data = Work("elementwise", flops=1, read=10**9, written=10**9)
    assert known.work_seconds(data, "forward", "float32", busy=1) == pytest.approx(0.1 + known.calls.kernel)
    assert known.work_seconds(data, "forward", "float32") == pytest.approx(2 * 32 / 280 + known.calls.kernel)


def test_rates_lie_between_those_of_the_nearest_shapes(machine):
    points = tuple(RatePoint("matrix product", "float32", "forward", (n, n, n), n * 1e9) for n in (16, 64))
    known = replace(machine, compute=replace(machine.compute, points=points))
    between = Work("matrix product", flops=10**12, shape=(32, 32, 32))
    assert 10**12 / known.work_seconds(between, "forward", "float32") == pytest.approx(40e9, rel=1e-3)


def test_hidden_shares_lie_between_those_measured(machine):
    points = (HiddenPoint(1.0, 0.0), HiddenPoint(3.0, 0.5))
    hiding = replace(machine, overlap=Overlap(source="measured", points=points))
    np.testing.assert_allclose(hiding.hidden(np.array([0, 1, np.sqrt(8) - 1, 3, 99])), [0, 0, 0.25, 0.5, 0.5])
    assert machine.hidden(10) == 0.0


@pytest.mark.parametrize("quantity", UNITS)
def test_numbers_are_read_as_they_were_written(quantity):
    for number in np.geomspace(1e-9, 1e13, 67):
        assert parse(write(number, quantity), quantity) == pytest.approx(number, rel=1e-5, abs=1e-15)
