"""Who is in which team: the tables of the DistDL documentation, its broadcast rules, and random shapes, without MPI."""

import itertools
import math
import re
import time

import numpy as np
import pytest
from all_workers import on_all, refusal
from launcher.examples import examples
from speed import python_slowdown

import distdl_jax as dj
from distdl_jax import InvalidArgumentError
from distdl_jax.plans.broadcasting import BroadcastRule

# "backends", all-sum-reduce of a 2 x 3 x 2 partition along dimensions 0 and 2.
ALL_SUM_TEAMS = {0: (0, 1, 6, 7), 1: (2, 3, 8, 9), 2: (4, 5, 10, 11)}
# "backends", broadcast from a 1 x 3 x 1 partition of the workers 1, 2, 3 to a 2 x 3 x 2 partition: the root first.
TEAMS = {0: (1, 0, 6, 7), 1: (2, 3, 8, 9), 2: (3, 4, 5, 10, 11), None: ()}
ROOT_OF = {0: None, 1: 0, 2: 1, 3: 2, **dict.fromkeys(range(4, 12))}
COPY_IN = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 0, 7: 0, 8: 1, 9: 1, 10: 2, 11: 2}


def table(P):
    return P.grid([1, 3, 1], [1, 2, 3]), P.grid([2, 3, 2])


@pytest.mark.parametrize("axes", [{"axes_reduce": (0, 2)}, {"axes_keep": 1}, {"axes_reduce": (-1, 0)}], ids=str)
def test_table_of_the_all_sum_reduction(axes):
    teams = on_all(12, lambda P: table(P)[1].create_allreduction_partition(**axes).ranks)
    assert teams == [next(team for team in ALL_SUM_TEAMS.values() if worker in team) for worker in range(12)]


def test_table_of_the_broadcast():
    def teams(P):
        P_x, P_y = table(P)
        return tuple(team.ranks for team in P_x.create_broadcast_partition_to(P_y))

    assert on_all(12, teams) == [(TEAMS[ROOT_OF[worker]], TEAMS[COPY_IN[worker]]) for worker in range(12)]


def numpy_sources(source, destination, transpose_src=False, transpose_dest=False):
    """For each rank of the destination the source's rank, by numpy's own broadcasting of an array of ranks."""
    ranks = np.arange(math.prod(source)).reshape(source)
    ranks = ranks.T if transpose_src else ranks
    target = destination[::-1] if transpose_dest else destination
    copies = np.broadcast_to(ranks, target)
    return (copies.T if transpose_dest else copies).ravel().tolist()


@pytest.mark.parametrize(
    ("source", "destination", "how"),
    [
        ((1, 1, 3), (3, 3, 2), {}),  # example 5
        ((1, 3), (3, 1), {"transpose_src": True, "transpose_dest": True}),
        ((1, 1), (4,), {}),  # more dimensions than the destination
    ],
    ids=str,
)
def test_shapes_that_do_not_broadcast_are_refused_by_every_worker(source, destination, how):
    size, shapes = max(math.prod(source), math.prod(destination)), (source, destination)
    mirrored = {_other(name): value for name, value in how.items()}

    def broadcast(P):
        P_x, P_y = map(P.grid, shapes)
        P_x.create_broadcast_partition_to(P_y, **how)

    def reduction(P):
        P_y, P_x = map(P.grid, shapes)
        P_x.create_reduction_partition_to(P_y, **mirrored)

    sentence = refusal(size, broadcast, InvalidArgumentError)
    assert all(f"shape {' x '.join(map(str, shape))}" in sentence for shape in shapes)
    assert sentence.count("(transposed: ") == len(how)
    assert refusal(size, reduction, InvalidArgumentError) == sentence


def _other(name):
    return {"transpose_src": "transpose_dest", "transpose_dest": "transpose_src"}[name]


def broadcasts(rng):
    """Two partitions that broadcast, on teams that are anything: ranks of both, shapes, transposes, world size."""
    while True:
        destination = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 4)))
        how = {name: bool(rng.random() < 0.4) for name in ("transpose_src", "transpose_dest")}
        target = destination[::-1] if how["transpose_dest"] else destination
        kept = int(rng.integers(1, len(target) + 1))
        source = tuple(1 if rng.random() < 0.4 else d for d in target[len(target) - kept :])
        source = source[::-1] if how["transpose_src"] else source
        world = max(math.prod(source), math.prod(destination)) + int(rng.integers(5))
        if world <= 36:
            ranks = [tuple(rng.permutation(world)[: math.prod(shape)].tolist()) for shape in (source, destination)]
            return ranks[0], source, ranks[1], destination, how, world


@pytest.mark.parametrize("batch", range(10))
def test_random_teams_fit_together(batch):
    """Against numpy: one root and one copy for each; all workers of a team have the same view; sums mirror copies."""
    for number in range(examples(15)):
        _check_teams(*broadcasts(np.random.default_rng([batch, number])))


def _check_teams(ranks_x, source, ranks_y, destination, how, world):
    mirrored = {_other(name): value for name, value in how.items()}

    def views(P):
        P_x, P_y = P.grid(source, ranks_x), P.grid(destination, ranks_y)
        P_send, P_recv = P_x.create_broadcast_partition_to(P_y, **how)
        back_send, back_recv = P_y.create_reduction_partition_to(P_x, **mirrored)
        assert (back_send, back_recv) == (P_recv, P_send)
        return P_send.ranks, P_recv.ranks

    seen = on_all(world, views)
    expected = numpy_sources(source, destination, **how)
    for worker, (send, recv) in enumerate(seen):
        assert bool(send) == (worker in ranks_x) and bool(recv) == (worker in ranks_y)
        assert not send or send[0] == worker
        if recv:
            assert recv[0] == ranks_x[expected[ranks_y.index(worker)]]
            assert recv == seen[recv[0]][0], "the root has another view of the team"
    # Every worker of P_y is in the team of one root, and a root is in its own only if it holds a copy.
    copies = [worker for root in ranks_x for worker in seen[root][0] if seen[worker][1][:1] == (root,)]
    assert sorted(copies) == sorted(ranks_y)
    for root in ranks_x:
        members = set(seen[root][0]) - {root}
        assert all(seen[member][1] == seen[root][0] for member in members)


@pytest.mark.parametrize("batch", range(6))
def test_random_all_sum_reductions_are_rows_of_the_grid(batch):
    """Each worker's team is the slice of numpy's array of ranks with the kept indices fixed, and the teams are few."""
    for number in range(examples(10)):
        _check_rows(np.random.default_rng([batch, number]))


def _check_rows(rng):
    shape = (5,) * 4
    while math.prod(shape) > 32:
        shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 5)))
    axes = tuple(axis for axis in range(len(shape)) if rng.random() < 0.5)
    keep = tuple(axis for axis in range(len(shape)) if axis not in axes)
    size = math.prod(shape)
    order = rng.permutation(size).tolist()
    ranks = np.array(order).reshape(shape)

    def team(P):
        P_x = P.grid(shape, order)
        team = P_x.create_allreduction_partition(axes)
        assert team == P_x.create_allreduction_partition(axes_keep=keep)
        index = tuple(slice(None) if axis in axes else P_x.index[axis] for axis in range(len(shape)))
        assert team.ranks == tuple(ranks[index].ravel())
        return team.ranks

    assert len(set(on_all(size, team))) == math.prod(shape[axis] for axis in keep)


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        ({"axes_reduce": (0, 3)}, "`axes_reduce` (=(0, 3)) names dimension 3, but the partition (shape 2 x 3 x 2) has"),
        ({"axes_keep": -4}, "`axes_keep` (=(-4,)) names dimension -4"),
        ({"axes_reduce": (1, 1)}, "`axes_reduce` (=(1, 1)) names a dimension twice"),
        ({"axes_reduce": (0, -3)}, "names a dimension twice"),
        ({}, "Exactly one of `axes_reduce` (=None) and `axes_keep` (=None)"),
        ({"axes_reduce": 0, "axes_keep": 1}, "Exactly one of `axes_reduce` (=0) and `axes_keep` (=1)"),
        ({"axes_reduce": (0.5,)}, "`axes_reduce` (=(0.5,)) must be"),
        ({"axes_reduce": "ab"}, "`axes_reduce` (='ab') must be"),
    ],
    ids=str,
)
def test_wrong_axes_are_named_on_every_worker(axes, sentence):
    assert sentence in refusal(12, lambda P: table(P)[1].create_allreduction_partition(**axes), Exception)


@pytest.mark.parametrize(
    ("source", "destination"),
    [((1, 64), (64, 64)), ((64, 1), (64, 64)), ((1, 16, 1), (16, 16, 16))],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_planning_for_4096_workers_is_quick(source, destination, record_property):
    """All workers ask for their own teams in one process, which takes half a second; the limit is for busy hosts."""
    everyone, began = tuple(range(4096)), time.process_time()

    def plan(rank):
        P = dj.planning_world(4096, rank)
        P_y = P.grid(destination)
        P_x = P.grid(source, everyone[: math.prod(source)])
        P_recv = P_x.create_broadcast_partition_to(P_y)[1]
        assert P_recv == P_y.create_reduction_partition_to(P_x)[0]
        return P_recv.size, P_y.create_allreduction_partition(0).size

    sizes = set(map(plan, everyone))
    seconds = time.process_time() - began
    record_property("seconds", seconds)
    assert seconds < 5 * python_slowdown()
    copies, reduced = 4096 // math.prod(source), destination[0]
    # Roots that hold no copy of their own subtensor make teams of one more.
    assert sizes <= {(copies, reduced), (copies + 1, reduced)}


def test_the_rule_agrees_with_numpy_on_every_small_shape():
    """Every pair of shapes of up to three dimensions of 1 to 3 workers, all transposes: same verdict, same sources."""
    shapes = [shape for d in (1, 2, 3) for shape in itertools.product((1, 2, 3), repeat=d)]
    accepted = 0
    for source, destination, ts, td in itertools.product(shapes, shapes, (False, True), (False, True)):
        try:
            expected = numpy_sources(source, destination, ts, td)
        except ValueError:
            with pytest.raises(InvalidArgumentError, match=re.escape(" x ".join(map(str, source)))):
                BroadcastRule(source, destination, ts, td)
            continue
        rule = BroadcastRule(source, destination, ts, td)
        assert [rule.source_of(rank) for rank in range(math.prod(destination))] == expected
        for rank in range(math.prod(source)):
            assert rule.destinations(rank) == tuple(i for i, root in enumerate(expected) if root == rank)
        accepted += 1
    assert accepted > 300
