"""Layers one after the other fit, or are refused on every worker when the network is made."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import nn

GRIDS = [
    (shape, ranks)
    for shape in ((1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 1, 3), (1, 2, 2), (2, 1, 2))
    for ranks in itertools.islice(itertools.permutations(range(4), int(np.prod(shape))), 0, 24, 5)
]


def grid(P: dj.Partition, shape: Sequence[int], ranks: Sequence[int]) -> dj.CartesianPartition:
    return P.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)


@pytest.mark.simulated(4)
def test_what_is_accepted_leaves_each_block_where_it_was() -> None:
    """All pairs of partitions: the same block of each element on both, or a refusal that names the two."""
    P = dj.Partition()
    for one, other in itertools.product(GRIDS, GRIDS):
        before, after = grid(P, *one), grid(P, *other)
        layers = [nn.Repartition(before, before), nn.Repartition(after, after)]
        if _owners(one) == _owners(other):
            assert len(nn.Sequential(*layers)) == 2
        else:
            sentence = r"`layers\[1\]` \(Repartition\) takes its input from .*: a `Repartition` between them moves it"
            with pytest.raises(dj.InvalidArgumentError, match=sentence):
                nn.Sequential(*layers)
            assert len(nn.Sequential(layers[0], nn.Repartition(before, after), layers[1])) == 3


def _owners(its: tuple[Sequence[int], Sequence[int]]) -> Any:
    """Who has each element of a tensor with twelve in each dimension."""
    shape, ranks = its
    owners = np.asarray(ranks).reshape(shape)
    for d, p in enumerate(shape):
        owners = np.repeat(owners, 12 // p, axis=d)
    return owners.tobytes()


@pytest.mark.simulated(4)
def test_functions_copies_and_networks_within() -> None:
    P = dj.Partition()
    rows, columns, one = (grid(P, shape, range(int(np.prod(shape)))) for shape in ((2, 1, 1), (1, 1, 2), (1, 1, 1)))
    pools = {P_x: nn.DistributedMaxPool1d(P_x, 1) for P_x in (rows, columns, one)}
    turn = lambda x: jnp.swapaxes(x, 0, 2)  # noqa: E731
    all_sum = nn.AllSumReduce(columns, (2,))
    for fits in (
        [pools[rows], turn, pools[columns]],  # the same two workers: only the function knows what is where
        [all_sum, pools[one]],  # of copies one is enough
        [nn.Sequential(pools[columns], all_sum), nn.Dropout(one, 0.1)],
        [nn.Remat(nn.Residual(pools[rows])), jax.nn.relu, nn.Dropout(P.create_partition_inclusive([0, 1]), 0.1)],
        [nn.Repartition(rows, one), pools[one]],
    ):
        assert len(nn.Sequential(*fits)) == len(fits)
    for misfits in (
        [pools[rows], pools[columns]],
        [pools[rows], turn, pools[one]],
        [nn.Sequential(all_sum, pools[columns]), pools[one]],
        [nn.Remat(nn.Residual(pools[rows])), jax.nn.relu, pools[one]],
    ):
        with pytest.raises(
            dj.InvalidArgumentError, match=r"`layers\[.\]` \(DistributedMaxPool1d\) takes its input from"
        ):
            nn.Sequential(*misfits)
