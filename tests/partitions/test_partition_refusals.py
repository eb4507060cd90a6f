"""Arguments that a partition refuses, in the same sentence on every worker."""

from typing import Any

import pytest
from all_workers import refusal

import distdl_jax as dj
from distdl_jax import InvalidArgumentError, InvalidTypeError, SetupError
from distdl_jax.partitions.partition import CartesianPartition, Partition

REFUSED: dict[type[Exception], list[tuple[Any, str]]] = {
    InvalidArgumentError: [
        (lambda P: P.create_partition_inclusive([0, 4]), "`ranks` (=(0, 4)) names rank 4, but"),
        (lambda P: P.create_partition_inclusive([-1]), "`ranks` (=(-1,)) names rank -1, but"),
        (lambda P: P.create_partition_inclusive([1, 2, 1]), "(=(1, 2, 1)) names rank 1 twice"),
        (lambda P: P.create_cartesian_topology_partition([2, 3]), "`shape` (=(2, 3)) has 6 cells"),
        (lambda P: P.create_cartesian_topology_partition([]), "`shape` (=()) has 1 cells"),
        (lambda P: P.grid([0], []), "`shape` (=(0,)) has 0 cells, but the team has 0 workers"),
        (lambda P: P.grid([2, 3]), "`shape` (=(2, 3)) has 6 cells, but the team has 4 workers"),
        (lambda P: P.grid([-1, -1]), "`shape` (=(-1, -1)) has 1 cells"),
        (lambda P: P.grid([2], [1]), "`shape` (=(2,)) has 2 cells, but the team has 1 workers"),
        (lambda P: P.grid([2], [1, 1]), "`ranks` (=(1, 1)) names rank 1 twice"),
        (lambda P: P.grid([2], [0, 4]), "`ranks` (=(0, 4)) names rank 4, but"),
        (lambda P: P.create_partition_union(dj.planning_world(4)), "`other` is on another comm"),
        (lambda P: P.create_broadcast_partition_to(dj.planning_world(4)), "`P_y` is on another"),
        (lambda P: P.grid([2], [0, 1]).create_broadcast_partition_to(P), "shape 2 does not broad"),
        (lambda P: P.grid([2, 2], range(4)).cartesian_index(4), "`rank` (=4) must be a rank of"),
        (lambda P: P.grid([2, 2], range(4)).cartesian_index(-1), "the 2 x 2 partition of 4 work"),
        (lambda P: P.grid([2, 2], range(4)).neighbor_ranks(7), "`rank` (=7) must be a rank of"),
        (
            lambda P: P.grid([2, 2], range(4)).create_cartesian_subtopology_partition([True]),
            "`remain_dims` (=(True,)) has 1 entries, but the 2 x 2 partition of 4 workers has 2 dimensions",
        ),
        (
            lambda P: P.grid([2, 2], range(4)).slice(dim=2),
            "`dim` (=(2,)) names dimension 2, but the partition (shape 2 x 2) has dimensions 0 to 1",
        ),
        (lambda P: P.grid([2, 2], range(4)).slice(dim=(0, -2)), "`dim` (=(0, -2)) names a dimension twice"),
        (
            lambda P: P.grid([2, 2], range(4)).slice(dim=(0, 1), index=(1, 2)),
            "`index` (=(1, 2)) must be -2 to 1 along dimension 1: the 2 x 2 partition of 4 workers has 2 there",
        ),
        (
            lambda P: P.grid([2, 2], range(4)).slice(dim=(0, 1), index=[1]),
            "`index` (=[1]) must be one index, or one for each `dim` (=(0, 1))",
        ),
        (lambda P: P.broadcast_data(1, root=4), "`root` (=4) must be a rank of the partition of 4"),
        (
            lambda P: P.create_partition_inclusive([0, 1]).broadcast_data(
                1, root=1, P_data=P.create_partition_inclusive([1, 3])
            ),
            "`root` (=1) is worker 3 in `P_data`, which is not in the partition of 2 workers",
        ),
        (lambda _: dj.planning_world(0), "`n` (=0) must be 1 or more"),
        (lambda _: dj.planning_world(2, 2), "`rank` (=2) must be one of the 2 workers, 0 to 1"),
        (lambda _: dj.planning_world(2, -1), "`rank` (=-1) must be one of"),
    ],
    InvalidTypeError: [
        (lambda _: dj.planning_world(2.0), "`n` (=2.0) must be an integer"),
        (lambda _: dj.planning_world(2, None), "`rank` (=None) must be an integer"),
        (lambda P: P.create_partition_inclusive([0.0, 1.0]), "`ranks` (=[0.0, 1.0]) must be"),
        (lambda P: P.create_partition_inclusive([float("inf")]), "`ranks` (=[inf]) must be"),
        (lambda P: P.create_partition_inclusive("01"), "`ranks` (='01') must be"),
        (lambda P: P.create_partition_inclusive(2), "`ranks` (=2) must be a sequence of integers"),
        (lambda P: P.create_partition_inclusive(None), "`ranks` (=None) must be"),
        (lambda P: P.create_cartesian_topology_partition(4), "`shape` (=4) must be a sequence"),
        (lambda P: P.grid(2), "`shape` (=2) must be a sequence of integers"),
        (lambda P: P.grid([2], 2), "`ranks` (=2) must be a sequence of integers"),
        (lambda P: P.create_partition_union([0]), "`other` (=[0]) must be a partition"),
        (lambda P: P.create_broadcast_partition_to(3), "`P_y` (=3) must be a partition"),
        (lambda P: P.create_reduction_partition_to(None), "`P_y` (=None) must be a partition"),
        (lambda P: P.grid([2, 2], range(4)).cartesian_index(1.5), "`rank` (=1.5) must be an integer"),
        (lambda P: P.grid([2, 2], range(4)).slice(dim=1.5), "`dim` (=1.5) must be an integer or"),
        (lambda P: P.grid([2, 2], range(4)).slice(index=True), "`index` (=True) must be an integer"),
        (lambda P: P.broadcast_data(1, root="a"), "`root` (='a') must be an integer"),
        (lambda P: P.broadcast_data(1, P_data=7), "`P_data` (=7) must be a partition"),
        (lambda P: Partition("world"), "`comm` (='world') must be an mpi4py intracommunicator"),
        (lambda P: CartesianPartition(), "Partition().grid([2, 2])"),
    ],
    SetupError: [(lambda P: P.create_partition_inclusive([0, 1, 2, 3]).broadcast_data(1), "made for planning")],
}


@pytest.mark.parametrize(
    ("work", "kind", "sentence"), [(work, kind, sentence) for kind, rows in REFUSED.items() for work, sentence in rows]
)
def test_wrong_arguments_raise_the_same_sentence_on_every_worker(work, kind, sentence):
    """It names the argument and its value; inactive workers raise it too. The errors are the built-in ones as well."""
    assert sentence in refusal(4, work, kind)
    assert issubclass(kind, dj.DistDLError) and issubclass(kind, ValueError | TypeError | RuntimeError)


def test_long_lists_of_ranks_are_cut_short_in_errors():
    sentence = refusal(100, lambda P: P.create_partition_inclusive([*range(100), 5]), InvalidArgumentError)
    assert "names rank 5 twice" in sentence and "101 in all" in sentence and len(sentence) < 200
