"""Measuring gives back what a machine is made of, refuses rounds that differ, and works over MPI."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jobs import FAST_TO_COMPILE, run

import distdl_jax as dj
from distdl_jax.machine.__main__ import main
from distdl_jax.machine.fit import fit_machine
from distdl_jax.machine.machine import Machine
from distdl_jax.machine.measure_messages import MESSAGE_SIZES
from distdl_jax.machine.places import Place, Places, own_place
from distdl_jax.machine.samples import (
    ARRAYS,
    Arithmetic,
    Collective,
    Copied,
    Exchange,
    Message,
    Overhead,
    Overlapped,
    Samples,
    Streamed,
    combined,
)
from distdl_jax.machine.segments import fit_segments
from distdl_jax.plans.work import Work

OPERATION, KERNEL, CALL, ARRAY = 1e-6, 2e-6, 3e-5, 4e-6
SHORT, EAGER, LONG = 0.4e-6, (0.7e-6, 5e9), (6e-6, 9e9)
KINDS = ("matrix product", "convolution", "pooling", "normalisation")

TOGETHER = 12e9
"""Bytes a second that the workers of the host send together."""

TWO = Places((Place("a"), Place("a")))


def message_time(size):
    if size <= 128:
        return SHORT
    latency, bandwidth = EAGER if size <= 32768 else LONG
    return latency + size / bandwidth


def exchange_time(size):
    return LONG[0] + size * 2 / TOGETHER


def machine_times():
    """The seconds of all that is measured on a machine that is known."""
    product = Arithmetic("matrix product", "float32", "forward", (64, 64, 64), 2 * 64**3)
    times = {Message("host", size): OPERATION + message_time(size) for size in MESSAGE_SIZES}
    times |= {Exchange("host", size, 2): OPERATION + exchange_time(size) for size in MESSAGE_SIZES if size > 32768}
    times |= {Collective("allreduce", 2, 1, size): OPERATION + 3e-6 + size / 1e9 for size in (8, 4096)}
    synced = OPERATION + times[Collective("allreduce", 2, 1, 8)]
    times |= {Collective("bcast", 2, 1, size, True): synced + 2e-6 + size / 2e9 for size in (8, 4096)}
    times |= {Streamed(2**18): 2**18 / 40e9, Streamed(2**26): 2**26 / 6e9, Streamed(2**26, True): 2**26 / 10e9}
    times |= {product: KERNEL + 2 * 64**3 / 50e9, replace(product, alone=True): (KERNEL + 2 * 64**3 / 50e9) / 1.2}
    times |= {Overhead("operation"): OPERATION, Overhead("kernel"): KERNEL, Overhead("call"): CALL}
    times[Overhead("arrays")] = CALL + (ARRAYS - 1) * (ARRAY + KERNEL)
    times |= {Overlapped(2**20, does): time for does, time in (("message", 2.0), ("arithmetic", 3.0), ("both", 3.5))}
    return {**times, Copied(2**20): 2**20 / 4e9}


def samples(times, factor=lambda subject, round: 1.0):
    """Three rounds of five times, each of which differs a little."""
    draw = random.Random(1)
    return Samples(
        {
            subject: tuple(
                tuple(time * factor(subject, number) * draw.gauss(1, 0.005) for _ in range(5)) for number in range(3)
            )
            for subject, time in times.items()
        }
    )


def machine_of(measured, places=TWO):
    return Machine("known", "made up", "none", "today", **fit_machine(measured, places, 8e9))


@pytest.fixture(scope="module")
def known():
    return machine_of(samples(machine_times()))


def test_segments_are_found_between_the_sizes_where_they_change(known):
    segments = known.levels["host"].segments
    assert [segment.latency for segment in segments] == pytest.approx([SHORT, EAGER[0], LONG[0]], rel=0.1)
    assert [segment.bandwidth for segment in segments] == pytest.approx([np.inf, EAGER[1], LONG[1]], rel=0.05)
    assert 64 <= segments[0].up_to <= 256
    assert 16384 <= segments[1].up_to <= 65536
    assert 0 < known.quality.fit_error < 0.03


def test_a_machine_foresees_what_was_measured_of_it(known):
    for size in MESSAGE_SIZES:
        assert known.message_seconds(size, "host") == pytest.approx(message_time(size), rel=0.03)
    for size in (2**20, 2**22):
        assert known.message_seconds(size, "host", pairs=2) == pytest.approx(exchange_time(size), rel=0.03)
    assert known.collective_seconds("allreduce", 2, 4096) == pytest.approx(3e-6 + 4096e-9, rel=0.03)
    assert known.collective_seconds("bcast", 2, 4096) == pytest.approx(2e-6 + 2048e-9, rel=0.05)
    assert [known.call_seconds, known.operation_seconds] == pytest.approx([CALL, OPERATION], rel=0.02)
    assert known.calls.array == pytest.approx(ARRAY, rel=0.05)
    assert known.copy_seconds(4e9) == pytest.approx(1.0, rel=0.02)
    assert known.hidden(2**20) == pytest.approx(0.75, rel=0.05)
    assert known.noise == pytest.approx(0.005, rel=0.5)
    assert known.guesses == ("compute.float64",)


def test_arithmetic_takes_as_long_as_it_took(known):
    product = Work("matrix product", flops=2 * 64**3, shape=(64, 64, 64))
    assert known.work_seconds(product, "forward", "float32") == pytest.approx(KERNEL + 2 * 64**3 / 50e9, rel=0.02)
    assert known.host.alone == pytest.approx(1.2, rel=0.02)
    for size, bandwidth in ((2**18, 40e9), (2**26, 6e9), (2**28, 6e9)):
        seconds = known.work_seconds(Work("elementwise", read=size // 2, written=size // 2), "forward", "float32")
        assert seconds == pytest.approx(KERNEL + size / bandwidth, rel=0.02)
    alone = known.work_seconds(Work("elementwise", read=2**26), "forward", "float32", busy=1)
    assert alone == pytest.approx(KERNEL + 2**26 / 10e9, rel=0.02)


def test_a_measured_machine_is_read_as_it_was_written(known, tmp_path):
    known.save(tmp_path / "known.toml")
    assert str(dj.machine.load(tmp_path / "known.toml")) == str(known) == (tmp_path / "known.toml").read_text()


@pytest.mark.parametrize("seed", range(20))
def test_longer_messages_never_take_less_time(seed):
    draw = random.Random(seed)
    spread = draw.choice([0.1, 1.0, 3.0])
    times = {Message("host", size): message_time(size) * np.exp(draw.gauss(0, spread)) for size in MESSAGE_SIZES}
    machine = machine_of(samples({**machine_times(), **times}))
    segments = machine.levels["host"].segments
    assert 1 <= len(segments) <= 3
    ends = [segment.up_to for segment in segments[:-1]]
    assert np.all(np.diff(ends) > 0)
    sizes = np.sort([*np.geomspace(1, 2**24, 500), *ends, *np.nextafter(ends, np.inf)])
    for pairs in (1, 2):
        seconds = machine.message_seconds(sizes, "host", pairs=pairs)
        assert np.all(seconds > 0)
        assert np.all(np.diff(seconds) >= -1e-3 * seconds[1:])  # numbers have four digits


def test_times_that_do_not_grow_are_fitted_all_the_same():
    (segment,), _ = fit_segments([8, 1024, 2**20], [3e-6, 2e-6, 1e-6])
    assert segment.latency == pytest.approx(3e-6)
    assert np.isfinite(segment.bandwidth)


SLOW = {
    "messages": Message,
    "matrix products and convolutions": Arithmetic,
    "arrays in memory": Streamed,
}


@pytest.mark.parametrize("name", SLOW)
def test_rounds_that_differ_are_refused(name):
    def factor(subject, number):
        return 1.5 if isinstance(subject, SLOW[name]) and number == 1 else 1.0

    with pytest.raises(dj.SetupError) as refused:
        machine_of(samples(machine_times(), factor))
    sentence = str(refused.value)
    others = SLOW.keys() - {name}
    assert f"differ in {name} by 50 %" in sentence or f"differ in {name} by 4" in sentence
    assert not any(other in sentence for other in others)
    assert "bind-to core" in sentence


def test_a_single_number_that_differs_is_said(known):
    def factor(subject, number):
        return 1.5 if subject in (Message("host", 64), Copied(2**20)) and number == 1 else 1.0

    machine = machine_of(samples(machine_times(), factor))
    assert machine.levels["host"].source.startswith("measured; rounds differ by over 20 % in 1 of 14 numbers")
    assert machine.host.source.startswith("measured; rounds differ by over 20 % in 1 of 4 numbers")
    assert machine.quality.rounds_differ < 0.02
    assert known.levels["host"].source == "measured"
    assert known.quality.rounds_differ < 0.02


def test_one_round_says_nothing_of_differences():
    one = Samples({subject: rounds[:1] for subject, rounds in samples(machine_times()).rounds.items()})
    assert machine_of(one).quality.source.startswith("guess")


def test_meetings_take_as_long_as_on_the_slowest_worker():
    message, copied = Message("host", 8), Copied(8)
    both = combined([{message: [[1.0, 5.0]], copied: [[1.0, 5.0]]}, {message: [[2.0, 4.0]], copied: [[2.0, 4.0]]}])
    assert both.rounds == {message: ((2.0, 5.0),), copied: ((1.5, 4.5),)}


def hosts_of(*caches, workers=2):
    """Workers in turn on processors with these caches, on each of two hosts."""
    return Places(tuple(Place(host, frozenset(cache)) for host in "ab" for cache in caches for _ in range(workers)))


def test_levels_are_those_of_hosts_and_caches():
    near = hosts_of({"0-3"}, {"4-7"})
    assert [near.level(0, other) for other in (1, 2, 4)] == ["shared cache", "host", "network"]
    assert (near.workers_per_host, near.workers_per_cache) == (4, 2)
    assert near.pairs("shared cache") == ((0, 1), (2, 3))
    assert near.pairs("host") == ((0, 2), (1, 3))
    assert near.pairs("network") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert dict((hosts, team) for team, hosts in near.teams() if len(team) == 2) == {1: (0, 1), 2: (0, 4)}
    assert (tuple(range(8)), 2) in near.teams()


def test_workers_that_all_share_a_cache_are_on_one_level():
    one = hosts_of({"0-3"})
    assert one.level(0, 1) == "host"
    assert (one.workers_per_cache, one.pairs("shared cache")) == (2, ())


def test_workers_that_may_run_anywhere_share_no_cache():
    loose = hosts_of({"0-3", "4-7"})
    assert loose.level(0, 1) == "host"
    assert loose.workers_per_cache == 1
    assert Places((Place("a"),)).workers_per_cache == 1
    assert Places((Place("a"),)).pairs("host") == ()


def test_this_worker_runs_somewhere():
    place = own_place()
    assert place.host
    assert bool(place.caches) == any(Path("/sys/devices/system/cpu").glob("cpu*/cache/index*/shared_cpu_list"))


def test_threads_are_not_measured():
    def program():
        with pytest.raises(dj.SetupError, match="threads of one process"):
            dj.machine.measure()

    dj.simulate(2, program)


@pytest.mark.limit(600)
def test_two_workers_measure_a_machine(tmp_path):
    path = tmp_path / "here.toml"
    status, output = run(
        2, "-m", "distdl_jax", "machine", "measure", "--quick", "--out", path, limit=300, flags=FAST_TO_COMPILE
    )
    assert status == 0, output
    assert "2 workers on 1 host" in output
    machine = dj.machine.load(path)
    assert (machine.name, machine.workers_per_host) == ("here", 2)
    assert not machine.levels["host"].source.startswith("guess")
    seconds = machine.message_seconds(np.geomspace(1, 2**24, 100), "host")
    assert np.all(seconds > 0)
    assert np.all(np.diff(seconds) >= 0)
    assert {point.kind for point in machine.compute.points} == {*KINDS, "optimiser"}
    assert {point.kind for point in machine.collectives.points} == {"allreduce", "bcast", "reduce"}


def test_the_command_names_and_shows_machines(capsys):
    assert main(["list"]) == 0
    assert "omni-path" in capsys.readouterr().out
    assert main(["show", "omni-path"]) == 0
    assert 'name = "omni-path"' in capsys.readouterr().out
    assert main(["show", "nowhere"]) == 1
    assert "must be a file" in capsys.readouterr().err
