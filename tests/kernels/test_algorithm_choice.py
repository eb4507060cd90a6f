"""The choice of a convolution's algorithms: by the records, by the file, by measuring; the same on all workers."""

import json
from dataclasses import replace
from importlib.resources import files
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax.kernels import problem as problems
from distdl_jax.kernels.convolution import chosen_here, chosen_unseen, convolution
from distdl_jax.kernels.cpu import choice, timing
from distdl_jax.kernels.cpu import convolution as algorithms_here
from distdl_jax.kernels.cpu.onednn.shared_library import version
from distdl_jax.kernels.cpu.timing import Measurement, machine
from distdl_jax.kernels.cpu.tuning_cache import add, read
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.problem import DIRECTIONS, PLAIN, Algorithms, Problem
from distdl_jax.layer.split_halo import Side, SplitHalo
from distdl_jax.nn import conv_base as layers
from distdl_jax.nn import conv_plan
from distdl_jax.settings import Settings

SMALL = Problem((2, 8, 6, 5), (8, 8, 3, 3), Placement((1, 1), ((1, 1), (1, 1)), (1, 1)), 1, "float32")
LARGE = replace(SMALL, x=(2, 8, 256, 256))


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Sets how algorithms are chosen; the file is a new one, unless `path` says otherwise."""

    def use(how, path=tmp_path / "kept.json", onednn="off"):
        settings = replace(Settings(), tuning=how, tuning_file=path, onednn=onednn)
        for module in (problems, choice, algorithms_here):
            monkeypatch.setattr(module, "current_settings", lambda: settings)
        monkeypatch.setattr(choice, "_measured_before", {})
        choice._read.cache_clear()
        return path

    yield use
    choice._read.cache_clear()


def no_measuring(*_):
    raise AssertionError("something is measured")


def keep(path, problem, **seconds):
    problem = problem.smaller(choice.ENOUGH)
    measured = {name: Measurement(each, 0) for name, each in seconds.items()}
    assert add(path, machine(), {choice._subject(problem, direction): measured for direction in DIRECTIONS})


def test_the_records_decide_where_nothing_else_is_known():
    """Every other algorithm than the plain one was 1.2 times faster in all records of its class, on two processors."""
    records = json.loads((files("distdl_jax.kernels.cpu") / "records.json").read_text())
    rows = [(processor, row) for processor, of_one in records.items() for row in of_one]
    taken, class_of = set(), choice._class
    for _, row in rows:
        problem = choice.from_record(row)
        for direction, name in zip(DIRECTIONS, chosen_unseen(problem), strict=True):
            if name == "plain":
                continue
            taken.add(name)
            like_it = [
                (processor, other.get(direction, {}))
                for processor, other in rows
                if class_of(choice.from_record(other), direction) == class_of(problem, direction)
            ]
            of_class = [(who, times["plain"] / times[name]) for who, times in like_it if name in times]
            assert min(gain for _, gain in of_class) >= 1.2
            assert len({processor for processor, _ in of_class}) >= 2
    assert "rewritten" in taken


def test_what_was_measured_here_decides(tuned, monkeypatch):
    monkeypatch.setattr(choice, "measure", no_measuring)
    path = tuned("read")
    unseen = chosen_unseen(LARGE)
    assert chosen_here(LARGE, True) == unseen
    for fast in ("plain", "rewritten"):
        tuned("read")
        keep(path, LARGE, **{"plain": 2.0, "rewritten": 2.0, fast: 1.0})
        assert chosen_here(LARGE, True) == Algorithms(fast, fast, fast)
        assert chosen_here(replace(LARGE, dtype="bfloat16"), True) == PLAIN
        assert chosen_here(replace(LARGE, x=(2, 8, 256, 255)), True) == unseen
        tuned("off")
        assert chosen_here(LARGE, True) == unseen
    tuned("on")
    keep(path, LARGE, one_of_another_version=0.1, plain=1.0, rewritten=2.0)
    assert chosen_here(LARGE, False) == PLAIN


@pytest.mark.skipif(version() == "none", reason="oneDNN's convolutions are not compiled here")
def test_where_onednn_computes(tuned, monkeypatch):
    """Nowhere; where it was measured to be the fastest; or wherever it can, and nothing is measured."""
    monkeypatch.setattr(choice, "measure", no_measuring)
    unseen = chosen_unseen(LARGE)
    everywhere = Algorithms("onednn", "onednn", "onednn")
    for setting, fast, expected in (("off", 0.1, PLAIN), ("on", 0.1, everywhere), ("on", 1.5, PLAIN)):
        path = tuned("read", onednn=setting)
        keep(path, LARGE, plain=1.0, rewritten=2.0, onednn=fast)
        assert chosen_here(LARGE, True) == expected
    tuned("off", onednn="on")
    assert chosen_here(LARGE, True) == unseen
    tuned("on", onednn="always")
    for problem in (LARGE, SMALL):
        assert chosen_here(problem, True) == chosen_unseen(problem) == everywhere
        assert "onednn" not in chosen_here(replace(problem, dtype="float64"), False)
    monkeypatch.setattr(choice, "version", lambda: "none")
    with pytest.raises(dj.SetupError, match=r"DISTDL_JAX_ONEDNN \(=always\) needs oneDNN's convolutions"):
        chosen_here(LARGE, True)


@pytest.mark.parametrize(("plain", "elsewhere"), [(4.1, "rewritten"), (3.9, "plain")])
def test_what_is_far_better_in_one_direction_is_taken_in_those_not_measured(tuned, monkeypatch, plain, elsewhere):
    monkeypatch.setattr(choice, "measure", no_measuring)
    monkeypatch.setattr(choice, "_unseen", lambda *_: "plain")
    path = tuned("read")
    subject = choice._subject(LARGE.smaller(choice.ENOUGH), "weight_gradient")
    assert add(path, machine(), {subject: {"plain": Measurement(plain, 0), "rewritten": Measurement(1.0, 0)}})
    monkeypatch.setattr(choice, "candidates", lambda *_: ("plain", "rewritten"))
    assert chosen_here(LARGE, True) == Algorithms(elsewhere, elsewhere, "rewritten")


def test_by_the_records_what_is_far_better_in_one_direction_is_no_worse_in_another():
    records = json.loads((files("distdl_jax.kernels.cpu") / "records.json").read_text())
    rows = [row for of_one in records.values() for row in of_one]
    ratios = [
        row[other]["rewritten"] / row[other]["plain"]
        for row in rows
        for one, other in permutations(DIRECTIONS, 2)
        if {"plain", "rewritten"} <= row.get(one, {}).keys() & row.get(other, {}).keys()
        and row[one]["plain"] >= choice.FAR_BETTER * row[one]["rewritten"]
    ]
    assert len(ratios) >= 400
    assert sum(ratio > 1.1 for ratio in ratios) <= 1
    assert max(ratios) < 1.3


def test_what_is_missing_is_measured_once(tuned, monkeypatch):
    path = tuned("on")
    monkeypatch.setattr(choice, "LARGE_ENOUGH", 1)
    monkeypatch.setattr(choice, "SECONDS", 1000)
    algorithms = chosen_here(SMALL, True)
    found = read(path, machine())
    assert set(found) == {choice._subject(SMALL, direction) for direction in DIRECTIONS}
    assert all(set(measured) == {"plain", "rewritten"} for measured in found.values())
    monkeypatch.setattr(choice, "measure", no_measuring)
    assert chosen_here(SMALL, True) == algorithms
    tuned("on")  # as another process
    assert chosen_here(SMALL, True) == algorithms


@pytest.mark.skipif(version() == "none", reason="oneDNN's convolutions are not compiled here")
def test_halos_are_measured_where_they_lie(tuned, monkeypatch):
    """To join them is timed, too; where oneDNN isn't among the algorithms, and all join them, it is left out."""
    monkeypatch.setattr(choice, "LARGE_ENOUGH", 1)
    timed = []

    def measured(ways, shapes, dtype):
        arrays = [jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype) for shape in shapes]
        found = {name: jax.tree.leaves(jax.jit(way)(*arrays)) for name, way in ways.items()}
        timed.append((shapes, found))
        return {name: Measurement(1.0 + (name != "onednn"), 0) for name in found}

    monkeypatch.setattr(choice, "measure", measured)
    problem = replace(SMALL, split_input=SplitHalo((Side(2, 0, 1), Side(3, 1, 1))))
    path = tuned("on", onednn="on")
    assert chosen_here(problem, True) == Algorithms("onednn", "onednn", "onednn")
    sides = "0 before and 1 after apart in dimension 2, 1 before and 1 after apart in dimension 3"
    assert all(sides in subject for subject in read(path, machine()))
    for shapes, found in timed:
        assert shapes[:3] == ((2, 8, 5, 3), (2, 8, 1, 3), (2, 8, 6, 2))
        for results in found.values():
            for got, want in zip(results, found["plain"], strict=True):
                assert np.allclose(got, want, rtol=1e-5, atol=1e-4)
    assert len(timed) == 3 and all(set(found) == {"plain", "rewritten", "onednn"} for _, found in timed)
    timed.clear()
    tuned("on", path.with_name("other.json"))
    assert chosen_here(problem, True) == chosen_here(SMALL, True)
    assert [shapes[0] for shapes, _ in timed] == 3 * [SMALL.x]


def test_where_nothing_may_be_spent_or_measured(tuned, monkeypatch):
    monkeypatch.setattr(choice, "measure", no_measuring)
    path = tuned("on")
    assert chosen_here(SMALL, True) == chosen_unseen(SMALL)  # not worth it
    assert chosen_here(LARGE, False) == chosen_unseen(LARGE)
    monkeypatch.setattr(choice, "SECONDS", -1)
    assert chosen_here(LARGE, True) == chosen_unseen(LARGE)
    assert not path.exists()


def test_failures_are_nobodys(tuned, monkeypatch, tmp_path):
    """Neither an algorithm that raises nor a file that can't be written ends a program."""
    monkeypatch.setattr(choice, "LARGE_ENOUGH", 1)
    (tmp_path / "file").write_text("in a folder's place")
    tuned("on", tmp_path / "file" / "kept.json")
    algorithms = chosen_here(SMALL, True)
    monkeypatch.setattr(choice, "measure", no_measuring)
    assert chosen_here(SMALL, True) == algorithms  # this process knows it

    def fails(x):
        raise RuntimeError("no such kernel")

    assert timing.measure({"plain": lambda x: x, "other": fails}, [(2,)], "float32") == {}


def test_measured_while_a_function_is_traced():
    """Under its caller's settings it would be part of that function, or of another dtype."""

    @jax.jit
    def traced(x):
        found.update(timing.measure({"one": jnp.sin}, [(3,)], "float32"))
        return x

    found = {}
    traced(jnp.ones(2))
    assert found["one"].seconds > 0
    with jax.disable_jit():
        assert timing.measure({"one": jnp.sin}, [(3,)], "float32").keys() <= {"one"}


def test_fewer_samples_and_rows_but_never_few_in_place_of_many():
    assert SMALL.smaller(10**9) == SMALL
    assert LARGE.smaller(LARGE.multiplications // 2).x == (1, 8, 256, 256)
    assert LARGE.smaller(LARGE.multiplications // 8).x == (1, 8, 64, 256)
    assert LARGE.smaller(1).x == (1, 8, 10, 256)
    assert replace(LARGE, x=(64, 8, 256, 256)).smaller(1).x == (17, 8, 10, 256)
    strided = replace(LARGE, window=Placement((2, 1), ((0, 3), (1, 1)), (4, 1)))
    assert strided.smaller(1).y[2] >= 8
    line = Problem((1, 8, 2**20), (8, 8, 3), Placement((1,), ((1, 1),), (1,)), 1, "float32")
    assert line.smaller(1) == line


def layer_and_data(P):
    layer = dj.nn.DistributedConv2d(
        P.grid([1, 1, P.size, 1]),
        in_channels=2,
        out_channels=4,
        kernel_size=3,
        padding=1,
    )
    rows = 5 if P.rank else 6  # uneven
    return layer, jnp.asarray(np.random.default_rng(P.rank).normal(size=(2, 2, rows, 7)))


@pytest.fixture
def seen(monkeypatch):
    """Who has chosen, for what, and which worker has computed by which algorithms; each would choose differently."""
    choosing, computing = [], []

    def choose(problem, may_measure):
        rank = dj.Partition().rank
        choosing.append((rank, problem))
        return PLAIN if rank else Algorithms("rewritten", "plain", "rewritten")

    def recorded(problem, parts, weight, algorithms):
        computing.append((dj.Partition().rank, algorithms))
        return convolution(problem, parts, weight, algorithms)

    monkeypatch.setattr(layers, "chosen_here", choose)
    monkeypatch.setattr(conv_plan, "convolution", recorded)
    return choosing, computing


@pytest.mark.world(2)
@pytest.mark.simulated(3)
def test_all_workers_take_the_first_ones_choice(seen):
    choosing, computing = seen
    P = dj.Partition()
    layer, x = layer_and_data(P)
    params = layer.init(jax.random.key(0))
    dj.jit(dj.value_and_grad(lambda params: jnp.sum(layer(params, x) ** 2)))(params)
    mine = {algorithms for rank, algorithms in computing if rank == P.rank}
    assert mine == {Algorithms("rewritten", "plain", "rewritten")}
    assert {rank for rank, _ in choosing} <= {0}
    assert all(problem.x[2] == 7 for _, problem in choosing)  # that of most work: worker 0's rows, and one of a halo
