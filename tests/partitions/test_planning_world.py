"""Partitions of a planning world: values seen from one of its workers, between which nothing moves."""

from __future__ import annotations

import re

import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import InvalidArgumentError, InvalidTypeError, SetupError


def test_nothing_moves_in_a_planning_world():
    P = dj.planning_world(3, rank=1)
    with pytest.raises(SetupError, match="no data can move in it"):
        _ = P.world.transport
    with pytest.raises(SetupError, match="no data can move in it"):
        P.world.agree((0, 1), "nothing", None)
    with pytest.raises(SetupError, match="no data can move in it"):
        dj.functional.repartition(np.ones(2), P, P)


def test_a_planning_world_is_seen_from_one_of_its_workers():
    for P, rank in ((dj.planning_world(3), 0), (dj.planning_world(3, rank=2), 2)):
        assert (P.active, P.rank, P.index, P.size, P.shape, P.ranks) == (True, rank, rank, 3, (3,), (0, 1, 2))
    assert dj.planning_world(3) != dj.planning_world(3)


@pytest.mark.parametrize(
    ("n", "rank", "kind", "sentence"),
    [
        (0, 0, InvalidArgumentError, "`n` (=0) must be 1 or more"),
        (2.0, 0, InvalidTypeError, "`n` (=2.0) must be an integer"),
        (2, 2, InvalidArgumentError, "`rank` (=2) must be one of the 2 workers, 0 to 1"),
        (2, -1, InvalidArgumentError, "`rank` (=-1) must be one of"),
        (2, None, InvalidTypeError, "`rank` (=None) must be an integer"),
    ],
)
def test_wrong_arguments_of_a_planning_world(n, rank, kind, sentence):
    with pytest.raises(kind, match=re.escape(sentence)):
        dj.planning_world(n, rank)
