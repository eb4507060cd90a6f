"""Wrong arguments of a primitive raise on every worker that it concerns, and the sentence names what is wrong.

Also where one worker alone is wrong: the others would wait for it for ever. After each error the workers still agree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix.partitions import on
from mpi4py import MPI

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax import nn

pytestmark = pytest.mark.world(4)

BAD, KIND = dj.InvalidArgumentError, dj.InvalidTypeError


class Mistake(NamedTuple):
    """`call` gets a function that makes partitions, and this worker's rank; `workers` are those that are to raise."""

    call: Callable[[Callable[..., Any], int], Any]
    words: tuple[str, ...]
    error: type[Exception] = dj.PlanError
    workers: Any = range(4)


def array(*shape: int, dtype: Any = float) -> Any:
    return jnp.zeros(shape, dtype)


MISTAKES = {
    # Arguments that are wrong wherever they are looked at.
    "broadcast to fewer": Mistake(
        lambda P, r: F.broadcast(array(2), P(3), P(2, 2)),
        ("shape 3 does not broadcast", "2 x 2", "must be 1 or equal"),
        BAD,
    ),
    "sum_reduce the other way": Mistake(
        lambda P, r: F.sum_reduce(array(2), P(1), P(2)),
        ("P_y must broadcast to P_x", "shape 2 does not broadcast to one of shape 1"),
        BAD,
    ),
    "a halo of two dimensions on a partition of one, which one worker is not in": Mistake(
        lambda P, r: F.halo_exchange(array(2), P(3), ((1, 1), (0, 0))),
        ("`halo` (=((1, 1), (0, 0))) must be 1 pairs", "one for each dimension of P_x"),
        BAD,
    ),
    "different dimensions": Mistake(
        lambda P, r: F.repartition(array(2, 2), P(2, 2), P(4)), ("`P_x` (2 x 2)", "`P_y` (4)", "dimensions"), BAD
    ),
    "gather along nowhere": Mistake(
        lambda P, r: F.all_gather(array(2, 2), P(2, 2), (0, 2)), ("`axes` (=(0, 2))", "0 to 1"), BAD
    ),
    "from a dimension to itself": Mistake(
        lambda P, r: F.all_to_all(array(2, 2), P(2, 2), 1, -1),
        ("`split_axis` (=1) and `concat_axis` (=-1)", "two different dimensions", "2 x 2"),
        BAD,
    ),
    "more than there are": Mistake(
        lambda P, r: F.top_k(array(2, 2), P(2, 2), 5), ("`k` (=5)", "(4, 4)", "along dimension 1")
    ),
    "numbers of rows that are no integers": Mistake(
        lambda P, r: F.take(array(2), P(2), [0.0, 1.0]), ("`indices` (of dtype float64)", "must hold integers"), KIND
    ),
    "numbers of rows that are traced": Mistake(
        lambda P, r: jax.jit(lambda ids: F.segment_sum(array(2), P(2), ids, 3))(np.array([0, 1])),
        ("`segment_ids` (=", "known while tracing", "reduce_scatter(jax.ops.segment_sum"),
        KIND,
    ),
    "a segment too many": Mistake(
        lambda P, r: F.segment_sum(array(2), P(2), [0, 3], 3),
        ("`segment_ids` holds 3", "0 to 2", "`num_segments` is 3"),
        BAD,
    ),
    "rows on a partition of too few dimensions": Mistake(
        lambda P, r: F.take(array(2), P(2), [[0, 1]], 0, P(2)),
        ("`P_y` (2)", "as many dimensions as the result, 2", "2 x 1"),
        BAD,
    ),
    "a layer checks when it is made": Mistake(lambda P, r: nn.Broadcast(P(3), P(2, 2)), ("does not broadcast",), BAD),
    "so does a sum": Mistake(lambda P, r: nn.SumReduce(P(1), P(4)), ("does not broadcast",), BAD),
    "and an all-sum": Mistake(lambda P, r: nn.AllSumReduce(P(4), (1,)), ("dimension 1", "0 to 0"), BAD),
    # Blocks that don't fit together: which worker holds what is in the sentence, on all workers.
    "no array on one worker": Mistake(
        lambda P, r: F.broadcast(None if r == 2 else array(2), P(1, ranks=(2,)), P(4)),
        ("`x` (=None) must be an array", "zero_volume_tensor"),
        KIND,
    ),
    "terms of different shapes": Mistake(
        lambda P, r: F.sum_reduce(array(2, 3 + (r == 3)), P(2, 2), P(1, 2)),
        ("`x` must have the same shape", "float64[2, 3] on worker 1", "float64[2, 4] on worker 3"),
    ),
    "terms of different dtypes": Mistake(
        lambda P, r: F.all_sum_reduce(array(2, dtype=np.float32 if r == 1 else float), P(4), 0),
        ("float32[2] on worker 1", "float64[2] on worker 0"),
    ),
    "a placeholder of another kind": Mistake(
        lambda P, r: F.broadcast(array(2) if r == 0 else array(0, dtype=int), P(1), P(4)),
        ("`x` is int64[0] on worker 1", "the data is float64", "zero_volume_tensor(dtype=...)"),
    ),
    "a placeholder of another kind, moved": Mistake(
        lambda P, r: F.repartition(array(2) if r == 0 else array(0, dtype=bool), P(1), P(4)),
        ("`x` is bool[0] on worker 1", "the data is float64"),
    ),
    "blocks of different dtypes": Mistake(
        lambda P, r: F.repartition(array(2 * (r < 2), dtype=np.float32 if r == 1 else float), P(2), P(3)),
        ("one dtype", "float64 on worker 0", "float32 on worker 1"),
        workers=range(3),
    ),
    "blocks that form no grid": Mistake(
        lambda P, r: F.repartition(array(2 + (r == 3), 2), P(2, 2), P(1, 4)),
        ("don't form a 2 x 2 grid", "dimension 0", "[3, 2] on worker 3", "[2, 2] on worker 2"),
    ),
    "blocks of too few dimensions": Mistake(
        lambda P, r: F.halo_exchange(array(2) if r == 1 else array(2, 2), P(2, 2), ((1, 1), (0, 0))),
        ("as many dimensions as its partition (2 x 2)", "[2] on worker 1"),
    ),
    "a halo of one number, on one worker": Mistake(
        lambda P, r: F.halo_exchange(array(2 * (r < 3)), P(3), (1,) if r == 1 else ((1, 1),)),
        ("`halo` (=(1,)) must be 1 pairs",),
        BAD,
        workers=range(3),
    ),
    "a halo that takes away more than there is": Mistake(
        lambda P, r: F.halo_exchange(array(2), P(4), ((-2, -1) if r == 2 else (0, 0),)),
        ("`halo` doesn't fit", "(-2, -1)", "block of 2"),
        BAD,
    ),
    "gathered blocks that form no grid": Mistake(
        lambda P, r: F.all_gather(array(2, 2 + (r == 1)), P(2, 2), 1), ("don't form a 2 x 2 grid", "[2, 3] on worker 1")
    ),
    "rows that nobody has": Mistake(
        lambda P, r: F.take(array(2 * (r < 2)), P(2), [0, 4], 0, P(3)),
        ("`indices` holds 4", "dimension 0 of `x` has 4 rows"),
        workers=range(3),
    ),
    "numbers of rows that differ between workers": Mistake(
        lambda P, r: F.take(array(2), P(4), [0, r]), ("row numbers (of shape 2, checksum",)
    ),
    "entries without a number": Mistake(
        lambda P, r: F.segment_sum(array(2 * (r < 2)), P(2), [0, 1, 0], 2),
        ("`segment_ids` (of shape 3)", "a number for each entry of `x`, of shape 4"),
        workers=range(2),
    ),
    "scattered terms of different shapes": Mistake(
        lambda P, r: F.reduce_scatter(array((2, 3, 0, 0)[r]), P(2), 0),
        ("same length in dimension 0", "[2, 3]"),
        workers=range(2),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake(name: str) -> None:
    mistake, P, rank = MISTAKES[name], dj.Partition(), MPI.COMM_WORLD.rank

    def call() -> Any:
        return mistake.call(lambda *shape, ranks=None: on(*shape, ranks=ranks).partition(P), rank)

    if rank in mistake.workers:
        with pytest.raises(mistake.error) as caught:
            call()
        sentence = str(caught.value)
        missing = [word for word in mistake.words if word not in sentence]
        assert not missing, f"{missing} not in: {sentence}"
        assert isinstance(caught.value, dj.DistDLError) and isinstance(caught.value, ValueError | TypeError)
        assert sentence.endswith(".")
    else:
        call()
    assert F.all_sum_reduce(jnp.ones(()), P, 0) == 4


def test_partitions_of_different_communicators() -> None:
    """Ranks of two communicators don't compare."""
    here, elsewhere = dj.Partition(), dj.Partition(MPI.COMM_WORLD.Dup())
    with pytest.raises(dj.InvalidArgumentError, match="`P_y` is on another communicator"):
        F.broadcast(array(2), here, elsewhere)
