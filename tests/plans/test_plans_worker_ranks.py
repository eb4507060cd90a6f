"""Ranks that follow each other answer as the plain tuple of the same ranks, whatever they are asked; and whatever is
made of values by class of workers equals what is made of dictionaries."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from distdl_jax.plans.alike import ByClass, derived, of_team, on_grids, representatives
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


def drawn(rng: np.random.Generator) -> tuple[ByClass[str], dict[int, str]]:
    """Labels on a grid of some workers, in any order: by class, and written out."""
    shape = rng.integers(1, 5, rng.integers(1, 4))
    ranks = (rng.permutation(shape.prod()) if rng.random() < 0.5 else np.arange(shape.prod())) + rng.integers(4)
    labels = [rng.choice(list("abc"), p).tolist() for p in shape]
    cells = ("".join(line[i] for line, i in zip(labels, index, strict=True)) for index in np.ndindex(*shape))
    values = dict(zip(ranks.tolist(), cells, strict=True))
    return ByClass(ranks.tolist(), labels, values.__getitem__), values


def check(values: Any, expected: dict[int, Any]) -> None:
    assert dict(values) == expected and values == expected
    some = [values[worker] for worker in representatives(values)]
    assert set(some) == set(expected.values())
    assert all(worker not in values for worker in (-1, 1000))


@pytest.mark.parametrize("seed", range(60))
def test_values_of_drawn_grids(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = [drawn(rng) for _ in range(3)]
    if seed % 2:
        pairs[1] = pairs[0]
    several, written = zip(*pairs, strict=True)
    union = {worker: value for values in reversed(written) for worker, value in values.items()}
    check(on_grids(*several), union)
    check(derived(lambda worker: several[0][worker] * 2, several[0]), {w: 2 * v for w, v in written[0].items()})
    for other, its in zip(several[1:], written[1:], strict=True):
        assert (several[0] == other) == (written[0] == its)
    both = on_grids(*several)
    pair = {worker: (value, union[worker]) for worker, value in written[1].items()}
    check(derived(lambda worker: (several[1][worker], both[worker]), several[1], both), pair)
    team = tuple(rng.permutation(sorted(written[2]))[:3].tolist())
    check(of_team(both, team), {worker: union[worker] for worker in team})
    assert list(of_team(union, team)) == list(team)
