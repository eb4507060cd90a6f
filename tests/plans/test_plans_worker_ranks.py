"""Ranks that follow each other: they answer as the plain tuple of the same ranks, whatever they are asked."""

import copy
import pickle

import numpy as np
import pytest

from distdl_jax.plans.worker_ranks import ConsecutiveRanks, positions, union, worker_ranks

RANKS = [(), (0,), (4,), (0, 1, 2), (3, 4, 5, 6), (1, 0), (0, 2), (2, 1, 3)]


@pytest.mark.parametrize("ranks", RANKS)
def test_equals_the_tuple(ranks):
    found = worker_ranks(list(ranks))
    assert (found, hash(found), repr(found)) == (ranks, hash(ranks), repr(ranks))
    assert ranks == found and (found != ranks) is False and {ranks: 1}[found] == 1
    assert isinstance(found, ConsecutiveRanks) == (len(ranks) > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1)))
    assert pickle.loads(pickle.dumps(found)) == ranks == copy.deepcopy(found)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("rank", [-1, 0, 2, 3, 7, True, 2.0, np.int64(3), "0", None])
def test_finds_what_the_tuple_finds(ranks, rank):
    found = worker_ranks(ranks)
    assert (rank in found) == (rank in ranks)
    if rank in ranks:
        assert found.index(rank) == ranks.index(rank)
        assert positions(found)[rank] == ranks.index(rank)
    else:
        with pytest.raises(ValueError):
            found.index(rank)
        assert rank not in positions(found)
    assert dict(positions(found)) == {worker: place for place, worker in enumerate(ranks)}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("others", RANKS)
def test_compares_and_unites_as_tuples(ranks, others):
    a, b = worker_ranks(ranks), worker_ranks(others)
    assert (a == b, a != b) == (ranks == others, ranks != others)
    assert union(a, b) == tuple(sorted({*ranks, *others}))


def test_many_ranks_take_no_loop():
    ranks = worker_ranks(range(10**6))
    places = positions(ranks)
    assert all(places[rank] == rank and rank in ranks for rank in range(0, 10**6, 10))  # hours, if each were a search
    assert union(ranks, ranks[3:9]) is ranks
    assert len(pickle.dumps(ranks)) < 200 and pickle.loads(pickle.dumps(ranks)) is ranks is worker_ranks(range(10**6))
