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


def pools_on(P: dj.Partition, ranks: tuple[int, int]) -> list[nn.DistributedMaxPool1d]:
    """On rows, on columns, on one worker, and on rows of these workers."""
    grids = [((2, 1, 1), None), ((1, 1, 2), None), ((1, 1, 1), None), ((2, 1, 1), ranks)]
    return [nn.DistributedMaxPool1d(P.grid(*its), 1) for its in grids]


@pytest.mark.simulated(4)
def test_what_is_accepted_leaves_each_block_where_it_was() -> None:
    """All pairs of partitions: the same block of each element on both, or a refusal."""
    P, refused = dj.Partition(), set()
    for one, other in itertools.product(GRIDS, GRIDS):
        before, after = P.grid(*one), P.grid(*other)
        layers = [nn.Repartition(before, before), nn.Repartition(after, after)]
        spec = dj.TensorSpec((12, 12, 12), before)
        x = {worker: dj.ShapeDtype(spec.shape_on(worker), np.dtype("float32")) for worker in range(4)}
        if _owners(one) == _owners(other):
            assert nn.Sequential(*layers).plan(x).outputs == x
            continue
        with pytest.raises(dj.DistDLError) as error:
            nn.Sequential(*layers).plan(x)
        refused.add(type(error.value))
        moved = nn.Sequential(layers[0], nn.Repartition(before, after), layers[1]).plan(x)
        assert moved.outputs[after.ranks[-1]].shape == dj.TensorSpec((12, 12, 12), after).shape_on(after.ranks[-1])
    assert refused == {dj.InvalidArgumentError, dj.PlanError}


def _owners(its: tuple[Sequence[int], Sequence[int]]) -> Any:
    """Who has each element of a tensor with twelve in each dimension."""
    shape, ranks = its
    owners = np.asarray(ranks).reshape(shape)
    for d, p in enumerate(shape):
        owners = np.repeat(owners, 12 // p, axis=d)
    return owners.tobytes()


class Move:
    """A layer of a user's own, which moves its input and names no partition."""

    def __init__(self, P_in: dj.Partition, P_out: dj.Partition) -> None:
        self.between = P_in, P_out

    def init(self, key: Any, dtype: Any = None) -> dict:
        return {}

    def param_specs(self) -> dict:
        return {}

    def plan(self, x: Any, params: Any = None) -> Any:
        return nn.Repartition(*self.between).plan(x)

    def __call__(self, params: dict, x: jax.Array) -> jax.Array:
        return dj.functional.repartition(x, *self.between)


class MovingPool(nn.DistributedMaxPool1d):
    """A subclass of a user's own, which moves its output."""

    def __call__(self, *args: Any) -> jax.Array:
        P_x, P_y = self.P_x, self.P_x.create_cartesian_topology_partition(self.P_x.shape[::-1])
        return dj.functional.repartition(super().__call__(*args), P_x, P_y)


def test_a_subclass_of_a_users_own_is_not_refused() -> None:
    rows = dj.planning_world(2).grid([2, 1, 1])
    columns = rows.create_cartesian_topology_partition([1, 1, 2])
    nn.Sequential(MovingPool(rows, 1), nn.DistributedMaxPool1d(columns, 1))
    with pytest.raises(dj.InvalidArgumentError, match="takes its input from"):
        nn.Sequential(nn.DistributedMaxPool1d(rows, 1), nn.DistributedMaxPool1d(columns, 1))


@pytest.mark.simulated(4)
def test_what_may_be_right_is_not_refused() -> None:
    P = dj.Partition()
    of_rows, of_columns, of_one, of_other = pools_on(P, (2, 3))
    rows, columns, one, other = (pool.P_x for pool in (of_rows, of_columns, of_one, of_other))
    x = jnp.arange(16.0).reshape(2, 2, 4)
    turn = lambda x: jnp.swapaxes(x, 0, 2) if x.ndim == 3 else x  # noqa: E731
    means = nn.DistributedAdaptiveAvgPool(columns, 1), nn.DistributedGlobalAvgPool(columns)
    for start, layers, wanted in (
        (rows, [of_rows, turn, of_columns], turn(x)),
        (rows, [nn.Sequential(of_rows, turn), of_columns], turn(x)),
        (rows, [of_rows, nn.Remat(nn.Sequential(turn, of_columns))], turn(x)),
        (rows, [of_rows, lambda x: dj.functional.repartition(x, rows, other), of_other], x),
        (rows, [of_rows, Move(rows, other), jax.nn.relu, of_other], x),
        (rows, [nn.Sequential(nn.Repartition(rows, other), nn.Sequential(jnp.abs)), of_other], x),
        (columns, [nn.AllSumReduce(columns, (2,)), of_one], x[..., :2] + x[..., 2:]),  # of copies one is enough
        *((columns, [mean, jax.nn.relu, of_one], x.mean(2, keepdims=True)) for mean in means),
        (one, [of_one, of_columns], x),  # the second worker's block was empty
    ):
        network = nn.Sequential(*layers)
        mine = dj.TensorSpec(x.shape, start)
        placeholder = jnp.zeros((2, 0) if start != one or P.rank > 1 else (2, 2, 0))
        block = placeholder if mine.box is None else x[tuple(slice(*its) for its in mine.box)]
        y = network(network.init(jax.random.key(0)), block)
        whole = dj.gather(y, dj.TensorSpec(wanted.shape, getattr(layers[-1], "P_x", columns)))
        if P.rank == 0:
            np.testing.assert_array_equal(whole, wanted)


@pytest.mark.simulated(4)
def test_misfits() -> None:
    P = dj.Partition()
    rows, columns, one, turned = pools_on(P, (1, 0))
    for layers in ([rows, columns], [nn.Remat(nn.Residual(rows)), jax.nn.relu, turned]):
        with pytest.raises(dj.InvalidArgumentError, match=r"`layers\[.\]` \(DistributedMaxPool1d\) takes its"):
            nn.Sequential(*layers)
    with pytest.raises(dj.InvalidArgumentError, match=r"`body` takes its input from 2 x 1 x 1 .*, but `shortcut` from"):
        nn.Residual(rows, nn.Repartition(turned.P_x, rows.P_x))
    network = nn.Sequential(rows, jax.nn.relu, one)
    x = jnp.ones((1, 1, 1) if P.rank < 2 else (1, 0))
    if P.rank == 1:
        with pytest.raises(dj.PlanError, match=r"leaves it on 2 x 1 x 1 .*, a block of 1 x 1 x 1 on worker 1, too"):
            network(({}, {}, {}), x)
    else:
        network(({}, {}, {}), x)


@pytest.mark.simulated(4)
def test_what_ends_in_functions_leaves_its_output_where_it_was() -> None:
    P = dj.Partition()
    rows, others, columns = P.grid((2, 1)), P.grid((2, 1), (2, 3)), P.grid((1, 2))
    for to in (others, columns):
        for tail in (jnp.tanh, nn.Sequential(jnp.tanh), nn.Remat(nn.Sequential(jnp.tanh))):
            network = nn.Sequential(nn.Repartition(rows, to, preserve_batch=False), tail)
            spec = network.output_spec(dj.TensorSpec((4, 6), rows))
            assert (spec.global_shape, spec.partition.ranks, spec.partition.shape) == ((4, 6), to.ranks, to.shape)
