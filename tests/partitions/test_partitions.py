"""Partitions as values: what each method gives on every worker, and what is refused, worked out without MPI."""

import copy
import itertools
import pickle

import jax
import numpy as np
import pytest
from all_workers import on_all

import distdl_jax as dj
from distdl_jax.partitions.partition import CartesianPartition, Partition


def seen(P):
    return P.active, P.rank, P.index, P.size, P.shape, P.dim, P.ranks


def test_a_planning_world_is_seen_from_one_of_its_workers():
    """Between which nothing moves."""
    assert on_all(3, seen) == [(True, rank, rank, 3, (3,), 1, (0, 1, 2)) for rank in range(3)]
    P = dj.planning_world(3)
    assert P.rank == 0 and dj.planning_world(3) != P
    for moves in (
        lambda: P.world.transport,
        lambda: P.world.agree((0, 1), "nothing", None),
        lambda: dj.functional.repartition(np.ones(2), P, P),
    ):
        with pytest.raises(dj.SetupError, match="no data can move in it"):
            moves()


def test_inclusive_takes_the_ranks_in_the_given_order():
    """Ranks are places in the partition that is asked, so a part of a part composes."""
    chosen = on_all(5, lambda P: seen(P.create_partition_inclusive([4, 0, 2])))
    places = {4: 0, 0: 1, 2: 2}
    expected = [
        (worker in places, places.get(worker), places.get(worker), 3, (3,), 1, (4, 0, 2)) for worker in range(5)
    ]
    assert chosen == expected

    def part_of_part(P):
        return P.create_partition_inclusive([4, 0, 2]).create_partition_inclusive(np.array([2, 0])).ranks

    assert on_all(5, part_of_part) == [(2, 4)] * 5


def test_a_grid_is_the_partition_of_its_ranks_with_a_topology():
    """By default on the first workers; ranks are places in the partition that is asked, as for its other methods."""

    def same(P):
        part = P.create_partition_inclusive([4, 0, 2])
        two_steps = [
            (P.grid([2, 2]), P, range(4), [2, 2]),
            (P.grid([]), P, [0], []),
            (P.grid(iter([1, 2]), iter([3, 1])), P, [3, 1], [1, 2]),
            (P.grid(np.array([1, 2]), np.array([3, 1])), P, [3, 1], [1, 2]),
            (part.grid([2]), part, [0, 1], [2]),
            (part.grid([1, 3], [2, 0, 1]), part, [2, 0, 1], [1, 3]),
        ]
        assert part.grid([1, 3], [2, 0, 1]).ranks == (2, 4, 0)
        return [
            given == team.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)
            for given, team, ranks, shape in two_steps
        ]

    assert on_all(5, same) == [[True] * 6] * 5


def test_union_keeps_the_caller_first_and_each_worker_once():
    def union(P):
        a, b = P.create_partition_inclusive([3, 1]), P.create_partition_inclusive([4, 1, 0])
        return a.create_partition_union(b).ranks, b.create_partition_union(a).ranks, a.create_partition_union(a) == a

    assert on_all(5, union) == [((3, 1, 4, 0), (4, 1, 0, 3), True)] * 5


def test_union_of_grids_has_no_topology():
    P = dj.planning_world(4)
    union = P.grid([1, 2], [0, 1]).create_partition_union(P.grid([2, 1], [2, 3]))
    assert type(union) is Partition and union.shape == (4,)


def test_a_grid_numbers_its_workers_in_row_major_order():
    """The index of each place is numpy's, and only the team's workers have one."""
    order = [6, 2, 0, 5, 1, 3]

    def place(P):
        grid_ = P.grid([2, 3], order)
        assert [grid_.cartesian_index(rank) for rank in range(6)] == list(np.ndindex(2, 3))
        return grid_.rank, grid_.index, grid_.shape, grid_.dim

    for worker, found in enumerate(on_all(7, place)):
        rank = order.index(worker) if worker in order else None
        index = None if rank is None else tuple(map(int, np.unravel_index(rank, (2, 3))))
        assert found == (rank, index, (2, 3), 2)


def test_slices_are_those_of_the_array_of_ranks():
    """Along each set of dimensions, at each index, also counted from the end: as numpy takes them, on every worker."""
    shape, order = (2, 3, 2), np.random.default_rng(0).permutation(13)[:12]
    ranks = order.reshape(shape)
    cases = [
        (dims, index)
        for n in range(4)
        for dims in itertools.permutations(range(3), n)
        for index in itertools.product(*(range(-shape[d], shape[d]) for d in dims))
    ]

    def slices(P):
        P_x = P.grid(shape, order)
        for dims, index in cases:
            at: list = [slice(None)] * 3
            for d, i in zip(dims, index, strict=True):
                at[d] = i
            there = ranks[tuple(at)]
            kept = P_x.slice(dims, index)
            assert isinstance(kept, CartesianPartition)
            assert kept == P_x.slice([d - 3 for d in dims], index)
            assert kept.shape == tuple(1 if d in dims else p for d, p in enumerate(shape))
            assert kept.ranks == tuple(there.ravel())
            dropped = P_x.slice(dims, index, keepdims=False)
            assert (dropped.shape, dropped.ranks) == (there.shape, kept.ranks)
        assert P_x.slice() == P_x.slice((0, 1, 2)) == P.grid([1, 1, 1], [order[0]])
        assert P_x.slice(index=1) == P.grid([1, 1, 1], [ranks[1, 1, 1]])
        assert P_x.slice(2, 1) == P_x.slice(-1, np.int64(-1)) == P_x.slice(dim=[2], index=[1])
        return seen(P_x.slice(1, 2))

    P = dj.planning_world(13)
    expected = [seen(dj.planning_world(13, r).grid([2, 1, 2], ranks[:, 2, :].ravel())) for r in range(13)]
    assert on_all(13, slices) == expected
    P_W = P.grid([2, 3, 2])
    assert P_W.slice(1, keepdims=False).ranks == (0, 1, 6, 7), "P_x of a layer, P_n x P_in"
    assert P_W.slice(2, keepdims=False).ranks == (0, 2, 4, 6, 8, 10), "P_y, P_n x P_out"
    assert P.slice(index=-1) == P.grid([1], [12]), "without a topology it has one dimension"


@pytest.mark.parametrize("remain", list(itertools.product([False, True], repeat=3)), ids=str)
def test_subtopologies_are_slices_of_the_grid(remain):
    """The workers of each are those of numpy's array of ranks with the other indices fixed, on the remaining shape."""
    shape, order = (2, 3, 2), np.random.default_rng(0).permutation(13)[:12]
    ranks = order.reshape(shape)

    def slice_of(P):
        sub = P.grid(shape, order).create_cartesian_subtopology_partition(remain)
        if P.rank not in order:
            assert sub.size == 0 and type(sub) is Partition
            return None
        index = tuple(map(int, np.argwhere(ranks == P.rank)[0]))
        there = ranks[tuple(slice(None) if keep else i for keep, i in zip(remain, index, strict=True))]
        assert isinstance(sub, CartesianPartition)
        assert sub.ranks == tuple(there.ravel()) and sub.shape == there.shape
        assert sub.index == tuple(i for i, keep in zip(index, remain, strict=True) if keep)
        return sub.ranks

    teams = {team for team in on_all(13, slice_of) if team}
    assert sum(map(len, teams)) == 12, "every worker of the grid is in exactly one"


def test_workers_outside_know_the_team_and_have_no_place_in_it():
    P = dj.planning_world(4, 3).grid([1, 2], [2, 0])
    assert seen(P) == (False, None, None, 2, (1, 2), 2, (2, 0))
    assert P.cartesian_index(1) == (0, 1) and P.neighbor_ranks(0) == [(None, None), (None, 1)]
    assert P.neighbor_ranks() is None
    assert P.create_allreduction_partition(0).size == 0
    assert P.broadcast_data("ignored") is None and P.allgather_data("ignored") is None


def test_null_partitions_have_no_workers_and_make_only_null_partitions():
    for worker in range(3):
        P = dj.planning_world(3, worker)
        null = P.create_partition_inclusive([])
        assert seen(null) == (False, None, None, 0, (0,), 1, ())
        assert null == P.create_partition_inclusive(()) and hash(null) == hash(P.create_partition_inclusive(()))
        assert null.create_partition_union(null) == null == null.create_partition_inclusive([])
        assert null.create_partition_union(P) == P == P.create_partition_union(null)
        assert null.create_allreduction_partition(axes_keep=()) == null
        assert null.allgather_data(1) is None
        assert repr(null) == "Partition(no worker; index=None)"


def test_equal_means_the_same_team_in_the_same_order_and_shape():
    """Equal values hash alike; another order, shape, team, topology or world makes another value."""
    P = dj.planning_world(6)
    same = [P.grid([2, 2], [1, 2, 3, 4]), P.grid((2, 2), np.arange(1, 5))]
    others = [
        P.grid([2, 2], [2, 1, 3, 4]),
        P.grid([4, 1], [1, 2, 3, 4]),
        P.grid([2, 2], [1, 2, 3, 5]),
        P.create_partition_inclusive([1, 2, 3, 4]),
        dj.planning_world(6).grid([2, 2], [1, 2, 3, 4]),
        *("a partition", None),
    ]
    assert same[0] == same[1] and hash(same[0]) == hash(same[1]) and len({*same, *others}) == 1 + len(others)
    assert all(same[0] != other for other in others)
    line = P.create_cartesian_topology_partition([6])  # of the same shape, but its index is a tuple
    assert (line.shape, line.ranks, line.index, P.index) == (P.shape, P.ranks, (0,), 0)
    assert line != P and len({line, P}) == 2


def test_repr_says_team_shape_and_place():
    P = dj.planning_world(40, 2)
    shown = {
        P: "Partition(40 workers: 0-39; index=2)",
        P.create_partition_inclusive([7]): "Partition(1 worker: 7; index=None)",
        P.create_partition_inclusive([3, 2]): "Partition(2 workers: 3, 2; index=1)",
        P.grid([2, 2], [5, 2, 9, 4]): "CartesianPartition(2 x 2, workers 5, 2, 9, 4; index=(0, 1))",
        P.grid([1, 2, 3], range(2, 8)): "CartesianPartition(1 x 2 x 3, workers 2-7; index=(0, 0, 0))",
        P.grid([1], [0]): "CartesianPartition(1, worker 0; index=None)",
        P.grid([], [2]): "CartesianPartition((), worker 2; index=())",
    }
    assert [repr(P) for P in shown] == list(shown.values())
    assert len(repr(P.create_partition_inclusive(range(0, 40, 2)))) < 120


@pytest.mark.parametrize("name", ["rank", "shape", "anything"])
def test_nothing_of_a_partition_can_be_set(name):
    for P in (dj.planning_world(2), dj.planning_world(2).grid([2, 1])):
        with pytest.raises(AttributeError):
            setattr(P, name, 1)
        with pytest.raises(AttributeError):
            delattr(P, name)


def test_copies_are_the_partition_itself():
    """So a layer or a pytree that is copied still communicates in the same team."""
    P = dj.planning_world(4).grid([2, 2])
    assert copy.copy(P) is P and copy.deepcopy({"P": [P]})["P"][0] is P


def test_a_partition_is_not_pickled():
    """Nor what holds one: a sentence says so."""
    P = dj.planning_world(4).grid([2, 2])
    for its in (P, [dj.planning_world(2, 1)], dj.TensorSpec((3, 4), P), dj.nn.Dropout(P)):
        with pytest.raises(dj.InvalidTypeError, match=r"Partition\(.*\) can't be pickled: it belongs to the workers"):
            pickle.dumps(its)


def test_partitions_are_static_arguments_of_jit():
    """Equal ones share one trace; another one makes another."""
    traces = []

    def number(P, x):
        traces.append(P)
        return x + P.index[1]

    jitted = jax.jit(number, static_argnums=0)
    P = dj.planning_world(4, 3)
    results = [int(jitted(P.grid(shape, range(4)), 10)) for shape in ([2, 2], [2, 2], [1, 4], [2, 2])]
    assert results == [11, 11, 13, 11] and len(traces) == 2
