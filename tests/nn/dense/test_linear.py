"""The linear layer gives, block for block, what the sequential layer gives: y = x W^T + b and all its gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix.partitions import On
from sequential import Beside, check_beside

import distdl_jax as dj
from distdl_jax import nn

Ranks = tuple[int, ...]


def linear(
    x: Ranks, y: Ranks, W: Ranks, shape: tuple[int, ...], n_in: int, n_out: int, lead: tuple[int, ...] = (3,),
    bias: bool = True, batches: tuple[int, ...] | None = None, sharded: bool = False,
) -> Beside:  # fmt: skip
    """A layer on the world ranks `x`, `y` and `W`, row-major on a grid of `shape`, P_fo x P_fi or P_n x P_fo x P_fi.

    `batches` are the lengths of the blocks of a batch that is split, where they are not balanced.
    """
    slices, rows, columns = (1, *shape)[-3:]
    P_x, P_y = (On((slices, *(1,) * (len(lead) - 1), p), ranks) for p, ranks in ((columns, x), (rows, y)))
    sizes = (batches or lead[0], *lead[1:])

    def layer(P: dj.Partition) -> nn.DistributedLinear:
        # P_x and P_y may have as many dimensions of one worker in between as there are.
        P_in, P_W = P.grid([slices, columns], x), P.grid(shape, W)
        return nn.DistributedLinear(P_in, P_y.partition(P), P_W, n_in, n_out, bias=bias, sharded=sharded)

    def whole(params: Any, x: Any) -> Any:
        return x @ params["weight"].T + params.get("bias", 0.0)

    name = f"linear {x} {y} {W} {shape} {sizes} {n_in} {n_out} {bias} {sharded}"
    return Beside(name, (*sizes, n_in), layer, whole, P_x, P_y, (*sizes, n_out))


CASES = {
    1: [linear((0,), (0,), (0,), (1, 1), 4, 3, lead=(2, 1, 3))],
    2: [
        linear((1,), (0, 1), (0, 1), (2, 1), 4, 3),
        linear((0,), (1,), (1,), (1, 1), 4, 3),  # all of it elsewhere than the input
        linear((1, 0), (1,), (0, 1), (1, 2), 1, 3),  # a worker with an empty block of one feature
        linear((0, 1), (1, 0), (1, 0), (2, 1, 1), 4, 1, sharded=True),  # one worker has no share of the parameters
        *(linear((0, 1), (0, 1), (0, 1), (2, 1, 1), 3, 2, lead=(n,)) for n in (0, 1)),  # workers without a sample
    ],
    4: [
        linear((3, 1), (0, 2), (2, 0, 3, 1), (2, 2), 6, 4, lead=(2, 3)),  # permuted
        linear((3,), (0, 1, 2), (0, 1, 2), (3, 1), 3, 2),  # 2 over 3: an empty block of the output
        linear((0,), (1, 2), (3, 2), (2, 1), 3, 4),  # the input's worker has no weight
        linear((0, 1, 2), (3,), (1, 2, 3), (1, 3), 7, 2, bias=False),  # 7 features over 3 workers
        linear((3, 0, 1), (2,), (0, 1, 2), (1, 3), 2, 3),  # 2 over 3: an empty block of the input
        linear((3, 0, 2, 1), (1, 2), (2, 3, 1, 0), (2, 1, 2), 5, 3, lead=(3, 2)),  # with the input's features
        linear((0, 3), (2, 0, 1, 3), (1, 2, 3, 0), (2, 2, 1), 4, 3, lead=(5,)),  # with the output's features
        linear((0, 1), (1, 0), (2, 3), (2, 1, 1), 3, 4, bias=False),  # disjoint from the weight's
        linear((0, 1, 2, 3), (3, 2, 1, 0), (0, 1, 2, 3), (4, 1, 1), 2, 3, lead=(6,), batches=(0, 4, 2, 0)),
        linear((3, 1), (0, 2), (1, 0, 3, 2), (1, 2, 2), 7, 5),  # three dimensions, and the batch whole
        linear((3, 0, 2, 1), (1, 2), (2, 3, 1, 0), (2, 1, 2), 5, 3, sharded=True),
        linear((0, 3), (2, 0, 1, 3), (1, 2, 3, 0), (2, 2, 1), 4, 6, lead=(5,), bias=False, sharded=True),
    ],
    12: [
        linear((0, 1, 2, 3), (4, 5, 6), tuple(range(12)), (3, 4), 16, 12, lead=(1,)),  # the documentation's
        linear((4, 5, 6, 7), (11, 0, 1, 2, 3, 9), tuple(range(12)), (2, 3, 2), 7, 5),
        linear((4, 5, 6), (11, 0, 1, 2, 3, 9, 4, 5, 6), (*range(1, 10),), (3, 3, 1), 2, 8, sharded=True),
    ],
}


@pytest.mark.world(1, 2, 4)
@pytest.mark.simulated(12)
def test_output_and_gradients_are_those_of_the_sequential_layer(world_size: int) -> None:
    check_beside(CASES[world_size])


@pytest.mark.simulated(4)
def test_precisions_mix_as_in_numpy() -> None:
    layer = linear((0, 1), (3, 2), (0, 1, 2, 3), (2, 2), 7, 5).layer(dj.Partition())
    params = layer.init(jax.random.key(0), float)
    x = jnp.ones((3, 4 - layer.P_x.rank), "float32") if layer.P_x.active else dj.zero_volume_tensor(3, "float32")
    y, wide = (jax.jit(layer)(params, each) for each in (x, x.astype(float)))
    assert y.dtype == float
    np.testing.assert_allclose(y, wide, atol=1e-6)


@pytest.mark.world(4)
def test_wrong_blocks_raise_on_every_worker_of_the_layer() -> None:
    """One worker holds the wrong block; all say so, and go on together afterwards."""
    rank, layer = dj.Partition().rank, linear((0, 1), (3, 2), (0, 1, 2, 3), (2, 2), 7, 5).layer(dj.Partition())
    params = layer.init(jax.random.key(0), float)
    weight, bias = (params[name] for name in ("weight", "bias"))
    x = jnp.ones((3, 4 - rank)) if rank < 2 else dj.zero_volume_tensor(dtype=float)
    for sentence, given, block in (
        ("`x` has shape (3, 4), but block 1 must be ... x 3: 7 features, balanced over 2 workers", params,
         jnp.ones((3, 4)) if rank == 1 else x),
        ("`x` has shape (4,), but block 0 must be ... x 4", params, jnp.ones(4) if rank == 0 else x),
        ('`params["weight"]` has shape (5, 7), but this worker\'s block of 5 x 7 on 2 x 2 workers is (2, 3)',
         {**params, "weight": jnp.ones((5, 7)) if rank == 3 else weight}, x),
        ('`params["bias"]` has shape (1,), but this worker\'s block of 5 on 2 workers is (3,)',
         {**params, "bias": jnp.ones(1) if rank == 0 else bias}, x),
        ("`params` must hold \"bias\" on every worker, but holds ['weight']",
         {"weight": weight} if rank == 2 else params, x),
    ):  # fmt: skip
        with pytest.raises(dj.PlanError) as caught:
            jax.jit(layer)(given, block)
        assert sentence in str(caught.value)
    y = jax.jit(layer)(params, x)
    assert y.shape == {3: (3, 3), 2: (3, 2)}.get(rank, y.shape)


@pytest.mark.world(4)
def test_blocks_of_a_split_batch_have_one_shape() -> None:
    P = dj.Partition()
    layer = nn.DistributedLinear(P.grid([2, 2]), P.grid([2, 1]), P.grid([2, 1, 2]), 4, 4)
    params = layer.init(jax.random.key(0))
    for rows, features, sentence in (
        ((3, 2, 2, 2), (2, 2, 2, 2), "must have the same shape"),
        ((3, 3, 2, 2), (2, 2, 2, 4), "`x` has shape (2, 4), but block 1 must be ... x 2: 4 features, balanced over 2"),
    ):
        with pytest.raises(dj.PlanError) as caught:
            jax.jit(layer)(params, jnp.ones((rows[P.rank], features[P.rank])))
        assert sentence in str(caught.value)


def test_repr() -> None:
    one = dj.planning_world(1).grid([1, 1])
    assert repr(nn.DistributedLinear(one, one, one, 3, 2)) == (
        "DistributedLinear(3 -> 2, bias=True, P_x 1 x 1, P_y 1 x 1, P_W 1 x 1)"
    )
