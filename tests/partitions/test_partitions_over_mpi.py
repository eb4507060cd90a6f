"""Partitions in real MPI worlds: data for everyone, communicators, and that what is planned is what MPI does."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jobs import run
from launcher.settings import long_run
from mpi4py import MPI

import distdl_jax as dj
from distdl_jax import nn


@pytest.mark.world(3, 4)
def test_partition_of_the_world(world_size):
    """The first partition is COMM_WORLD's, whoever asks and how often; ranks are its ranks."""
    comm = MPI.COMM_WORLD
    P = dj.Partition()
    assert dj.Partition(comm) == P and hash(P) == hash(dj.Partition(comm))
    assert (P.rank, P.size, P.ranks) == (comm.rank, world_size, tuple(range(world_size)))
    messages = P.world.communicators.messages
    assert messages.Get_size() == world_size and MPI.Comm.Compare(messages, comm) == MPI.CONGRUENT


@pytest.mark.world(4)
def test_partitions_of_other_communicators():
    """Ranks refer to the communicator that the first partition was made from; worlds don't mix."""
    comm = MPI.COMM_WORLD
    half = comm.Split(comm.rank % 2, -comm.rank)
    P = dj.Partition(half)
    assert (P.rank, P.size, P.ranks) == (half.rank, 2, (0, 1))
    assert P.allgather_data(comm.rank) == [comm.rank % 2 + 2, comm.rank % 2]
    first, second = P.allgather_data([1, 2])
    assert first == second and first is not second  # whoever changes one does not change the other
    with pytest.raises(dj.InvalidArgumentError, match="is on another communicator"):
        P.create_partition_union(dj.Partition())
    half.Free()
    # What was made from a communicator outlives it, and a new one with the same handle is another world.
    assert P.allgather_data("still here") == ["still here"] * 2
    assert P.create_partition_inclusive([1]).allgather_data(P.rank) == ([1] if P.rank == 1 else None)
    again = comm.Dup()
    assert dj.Partition(again).size == 4 and dj.Partition(again) != P
    for nobody in (MPI.COMM_NULL, comm.Split(MPI.UNDEFINED)):
        with pytest.raises(dj.InvalidArgumentError, match="COMM_NULL"):
            dj.Partition(nobody)


STRUCTURED = {"shape": (3, 0, 2), "dtype": np.dtype("complex64"), "nested": [(1, "two"), None], "array": np.eye(3)}


def same(a, b):
    return np.array_equal(a.pop("array"), b.pop("array")) and a == b


@pytest.mark.world(3, 4)
def test_broadcast_data_from_every_root(world_size):
    """Receivers pass nothing and learn everything; also in a partition with another order, on its own ranks."""
    P = dj.Partition()
    backwards = P.create_partition_inclusive(range(world_size)[::-1])
    for root in range(world_size):
        data = {**STRUCTURED, "root": root} if P.rank == root else None
        assert same(P.broadcast_data(data, root=root), {**STRUCTURED, "root": root})
        assert backwards.broadcast_data(P.rank, root=root) == world_size - 1 - root


@pytest.mark.world(3, 4)
def test_broadcast_data_from_a_subpartition(world_size):
    """The second mode: the root is a rank of `P_data`, the receivers are the calling partition's workers."""
    P = dj.Partition()
    P_data = P.create_partition_inclusive([2, 0])
    for root, worker in enumerate((2, 0)):
        mine = f"known to {P.rank}" if P_data.active else None
        assert P.broadcast_data(mine, root=root, P_data=P_data) == f"known to {worker}"
    # Into a partition that holds some workers only: the others get nothing and need not call.
    P_some = P.create_partition_inclusive([1, 2])
    got = P_some.broadcast_data(P.rank, root=0, P_data=P.create_partition_inclusive([2]))
    assert got == (2 if P.rank in (1, 2) else None)


@pytest.mark.world(3, 4)
def test_allgather_data_is_in_the_order_of_the_ranks(world_size):
    P = dj.Partition()
    assert P.allgather_data(("rank", P.rank)) == [("rank", rank) for rank in range(world_size)]
    backwards = P.grid([world_size, 1], range(world_size)[::-1])
    assert backwards.allgather_data(P.rank) == list(range(world_size))[::-1]
    pair = P.create_partition_inclusive([2, 1])
    assert pair.allgather_data({"of": P.rank}) == (None if P.rank not in (1, 2) else [{"of": 2}, {"of": 1}])


@pytest.mark.world(4)
def test_subtopologies_are_those_of_mpi():
    """MPI's own Cart_sub gives the same workers, in the same order and shape, for every choice of dimensions."""
    comm = MPI.COMM_WORLD
    for shape in ([2, 2], [4, 1], [1, 2, 2], [4]):
        cart = comm.Create_cart(shape, reorder=False)
        P = dj.Partition().create_cartesian_topology_partition(shape)
        assert P.index == tuple(cart.coords)
        assert P.neighbor_ranks() == [
            tuple(None if rank == MPI.PROC_NULL else rank for rank in cart.Shift(axis, 1)) for axis in range(P.dim)
        ]
        for remain in itertools.product([False, True], repeat=len(shape)):
            sub = cart.Sub(remain)
            ours = P.create_cartesian_subtopology_partition(remain)
            assert ours.ranks == tuple(sub.allgather(comm.rank))
            assert (ours.rank, ours.shape, ours.index) == (sub.rank, tuple(sub.dims), tuple(sub.coords))
            sub.Free()
        cart.Free()


@pytest.mark.world(4)
def test_many_layers_use_the_communicators_of_one():
    """Layers on the same teams, made anew each time, eagerly and under jit: no communicator after the first round.

    In a long run three hundred of them.
    """
    P = dj.Partition()

    def layers():
        P_row, P_grid = P.grid([1, 2], [3, 1]), P.grid([2, 2], range(4))
        return (
            nn.Broadcast(P_row, P_grid),
            nn.SumReduce(P_grid, P_row),
            nn.AllSumReduce(P_grid, (0,)),
            nn.DistributedLinear(P_row, P_row, P_grid, 4, 5),
            nn.Repartition(P_row, P.grid([2, 1], [0, 2])),
        )

    def round_(x):
        broadcast, back, total, linear, move = layers()
        y = total(back(broadcast(x)))
        return y, move(linear(params, x))

    params = layers()[3].init(jax.random.key(0), float)
    x = jnp.ones((4, 2)) if P.rank in (1, 3) else dj.zero_volume_tensor()
    first = round_(x)
    before = len(P.world.communicators)
    for _ in range(40 if long_run() else 4):
        round_(x)  # 5 layers eagerly

    @jax.jit
    def many(x):
        return [round_(x) for _ in range(20 if long_run() else 3)]

    jax.tree.map(np.testing.assert_allclose, many(x)[-1], first)
    assert len(P.world.communicators) == before
    assert before >= 1


ABORTING = """
import time
import distdl_jax as dj
P = dj.Partition()
if P.rank == 1:
    raise ValueError("worker one has had enough")
time.sleep(10_000)
"""


def test_an_uncaught_exception_ends_the_job():
    """Under plain `mpiexec python`, with the others waiting in Python (for others see tests/watchdog/faults)."""
    status, output = run(3, "-c", ABORTING)
    assert status not in (0, -1) and "ValueError: worker one has had enough" in output, output
    assert "Worker 1 of 3 raised; the job ends." in output
