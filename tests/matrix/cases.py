"""`PRIMITIVES`: the operators that every test of the matrix runs, each on given partitions and block shapes.

An entry is one call of a function of `movement_cases` or `layer_cases`, which puts together the library's operator, as
every worker builds it, and the reference on all workers' blocks. An operator of a new kind takes a `Case` of its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distdl_jax import functional as F
from distdl_jax import nn
from distdl_jax.functional.grid_sample import plan_grid_sample
from distdl_jax.functional.scans import plan_cumulative
from distdl_jax.functional.windows_and_pixels import plan_pixels, plan_window_partition
from distdl_jax.plans.shape_dtype import ShapeDtype
from matrix import layer_cases as L
from matrix.case import Case, is_shape
from matrix.layer_cases import average_pool, conv, function, hartley, layer, linear
from matrix.movement_cases import (
    all_gather,
    all_reduce,
    all_sum_reduce,
    all_to_all,
    broadcast,
    gather,
    halo_exchange,
    reduce_scatter,
    reduction,
    repartition,
    replicated,
    scatter,
    segment_sum,
    sum_reduce,
    take,
    top_k,
)
from matrix.partitions import block_shapes, blocks, on

_BLOCK = (2, 3)
_TURNED = (3, 1, 2, 0)

ON_FOUR = (
    broadcast(on(1, 2, ranks=(1, 3)), on(2, 2), {1: (2, 3), 3: (1, 4)}),
    broadcast(on(1, ranks=(3,)), on(3), {3: (2, 2)}),
    broadcast(on(1, 2, ranks=(2, 0)), on(2, 2, ranks=(3, 1, 0, 2)), {2: (5,), 0: (0,)}, preserve_batch=False),
    broadcast(on(2, 1, ranks=(3, 0)), on(2, 2), {3: (2, 3), 0: (2, 2)}, transpose_src=True),
    broadcast(on(2, 2), on(2, 2), _BLOCK, transpose_dest=True),
    broadcast(on(2, 2), on(2, 2), _BLOCK, silent=True),
    sum_reduce(on(2, 2), on(1, 2, ranks=(1, 3)), {0: (2, 3), 1: (1, 4), 2: (2, 3), 3: (1, 4)}),
    sum_reduce(on(3), on(1, ranks=(3,)), _BLOCK),
    sum_reduce(on(2, 2, ranks=(3, 1, 0, 2)), on(1, 2, ranks=(2, 0)), _BLOCK, preserve_batch=False),
    sum_reduce(on(2, 2), on(2, 1, ranks=(3, 0)), _BLOCK, transpose_dest=True),
    sum_reduce(on(2, 2), on(2, 2), _BLOCK, silent=True),
    all_sum_reduce(on(2, 2, ranks=_TURNED), (0,), {0: (0, 2), 1: (0, 2), 2: (3,), 3: (3,)}),
    all_sum_reduce(on(1, 3, ranks=(3, 0, 2)), (0, 1), _BLOCK),
    all_reduce(on(2, 2, ranks=_TURNED), "max", (0,), {0: (0, 2), 1: (0, 2), 2: (3,), 3: (3,)}),
    all_reduce(on(1, 3, ranks=(3, 0, 2)), "max", (0, 1), _BLOCK),
    all_reduce(on(2, 2), "min", (1,), _BLOCK),
    all_reduce(on(2, 2), "mean", (0, 1), _BLOCK),
    all_reduce(on(2, 2, ranks=_TURNED), "prod", (0,), {0: (0, 2), 1: (0, 2), 2: (3,), 3: (3,)}),
    reduction(on(2, 2, ranks=_TURNED), "mean", (1,), 3, [0, 4]),
    reduction(on(1, 2, 2, ranks=_TURNED), "max", (0, 2), 2, 3, 3),
    replicated(on(2, 2, ranks=_TURNED), (0,), {0: (0, 2), 1: (0, 2), 2: (3,), 3: (3,)}),
    replicated(on(1, 3, ranks=(3, 0, 2)), (0, 1), _BLOCK),
    gather((3, 2), on(2, 2, 1, ranks=_TURNED), (0,), 2),
    gather((), on(3, ranks=(3, 1, 2)), (0,), 0),
    scatter((2, 5), on(1, 2, 2, ranks=(1, 3, 0, 2)), (1,), 3),
    scatter((2, 2), on(2, ranks=(3, 1)), (0,), 0),
    all_sum_reduce(on(2, 2), (), _BLOCK),
    repartition(on(4, 1), on(1, 4), blocks(on(4, 1), 5, 3)),
    repartition(on(2, 2, ranks=(2, 0, 3, 1)), on(3, 1, ranks=(1, 3, 0)), blocks(on(2, 2, ranks=(2, 0, 3, 1)), 4, 5)),
    repartition(on(2, 1), on(1, 2, ranks=(2, 3)), blocks(on(2, 1), 3, 3), preserve_batch=False),
    repartition(on(1, 1, ranks=(2,)), on(2, 2), blocks(on(1, 1, ranks=(2,)), 3, 5)),
    repartition(on(2, 2), on(1, 1, ranks=(1,)), blocks(on(2, 2), (1, 3), (0, 4))),
    repartition(on(4), on(4), blocks(on(4), (0, 5, 1, 3))),
    repartition(on(2, 2), on(2, 2, ranks=(1, 0, 3, 2)), blocks(on(2, 2), 0, 4)),
    repartition(on(2, 2), on(2, 2), blocks(on(2, 2), 5, 3), silent=True),
    halo_exchange(on(2, 2), blocks(on(2, 2), 4, 5), (1, 1), (2, 1)),
    halo_exchange(on(4), blocks(on(4), (3, 1, 0, 4)), ((0, 3), (2, 1), (1, 2), (5, 0))),
    halo_exchange(
        on(1, 3, ranks=(3, 1, 2)), blocks(on(1, 3, ranks=(3, 1, 2)), 2, 7), (0, 0), ((0, -1), (-1, 2), (1, 0))
    ),
    halo_exchange(on(2, 2), blocks(on(2, 2), 3, 4), (1, 2), (1, 1), periodic=(True, False)),
    halo_exchange(on(3), blocks(on(3), (2, 1, 1)), (5, 1), periodic=(True,)),
    halo_exchange(on(1, 2), blocks(on(1, 2), 3, 3), {0: ((0, 0), (0, 2)), 1: ((0, 0), (1, 0))}),
    halo_exchange(
        on(2, 2),
        blocks(on(2, 2), 4, 4),
        {0: ((0, 1), (0, 1)), 1: ((0, 0), (2, 0)), 2: ((2, 0), (0, 0)), 3: ((1, 0), (-1, 0))},
    ),
    all_gather(on(2, 2), (1,), blocks(on(2, 2), (1, 2), (3, 0))),
    all_gather(on(2, 2, ranks=(3, 0, 1, 2)), (0, 1), blocks(on(2, 2, ranks=(3, 0, 1, 2)), 3, 3)),
    reduce_scatter(on(2, 2), (1,), blocks(on(2, 2), (1, 2), (3, 3))),
    reduce_scatter(on(3, ranks=(2, 3, 0)), (0,), block_shapes(on(3, ranks=(2, 3, 0)), (2,), 4)),
    take(on(2, 2), on(2, 2), [2, 0, 2, 1], 0, blocks(on(2, 2), (1, 2), 3)),
    take(on(2, ranks=(3, 1)), on(2, 1, ranks=(0, 2)), [[4, -1, 0], [3, 4, 4]], -1, blocks(on(2, ranks=(3, 1)), 5)),
    take(on(4), on(4), [0, 1, 2, 3], 0, blocks(on(4), 4), silent=True),
    segment_sum(on(1, 3), on(1, 3, ranks=(3, 1, 0)), [4, 0, 2, 0], 5, 1, blocks(on(1, 3), 2, (1, 0, 3))),
    segment_sum(on(2, 1), on(4), [[0, 1], [2, 1], [0, 0]], 3, 0, blocks(on(2, 1), 3, 2)),
    all_to_all(on(2, 1, 2, ranks=_TURNED), 1, 2, blocks(on(2, 1, 2, ranks=_TURNED), 2, 3, (1, 2))),
    all_to_all(on(2, 2), 0, 1, blocks(on(2, 2), 6, 3)),
    top_k(on(2, 2, ranks=_TURNED), 2, 1, blocks(on(2, 2, ranks=_TURNED), 3, (3, 1))),
    top_k(on(3, 1, ranks=(2, 3, 1)), 2, 0, blocks(on(3, 1, ranks=(2, 3, 1)), (1, 0, 3), 2)),
    linear(on(1, 2), on(1, 2, ranks=(2, 3)), on(2, 2), 5, 3),
    linear(on(1, 2), on(1, 2, ranks=(2, 3)), on(2, 2), 5, 3, of_params=True),
    linear(on(1, 3, ranks=(3, 1, 2)), on(1, 1), on(1, 3), 4, 2, of_params=True),
    linear(on(2, 1, ranks=(1, 0)), on(2, 2), on(2, 2, 1), 2, 3, batch=3),
    linear(on(2, 1), on(2, 1), on(2, 1, 1, ranks=(0, 1)), 3, 2, batch=3, of_params=True),
    linear(on(2, 1), on(2, 2), on(2, 2, 1, ranks=(2, 0, 3, 1)), 3, 3, batch=3, of_params=True, sharded=True),
    linear(on(1, 3, ranks=(3, 1, 2)), on(1, 3), on(3, 1, ranks=(3, 1, 2)), 4, 5),
    # The general algorithm, the channel one, the feature one with the batch split too, and in two dimensions.
    conv(on(1, 2, 2), on(1, 1, 2, ranks=(3, 0)), on(1, 2, 2, ranks=(1, 3, 0, 2)), (5,), (3,), padding=(1,)),
    conv(on(1, 2, 1, ranks=(1, 0)), on(1, 2, 1, ranks=(3, 2)), on(2, 2, 1), (4,), (2,)),
    conv(on(1, 2, 2, ranks=(3, 1, 0, 2)), on(1, 2, 2), on(1, 2, 2), (5,), (3,), padding=(1,)),
    conv(on(2, 1, 2), None, None, (5,), (3,), batch=3, stride=(2,), padding=(1,)),
    conv(on(1, 1, 2, 2), None, None, (3, 5), (3, 2), stride=(1, 2), padding=(1, 1)),
    average_pool(on(1, 2, 2), (5,), (4,), (1,), (1,)),
)

# fmt: off
LAYERS = (
    layer("batch_norm", on(2, 2, ranks=_TURNED), (5, 3), lambda P, _: nn.DistributedBatchNorm(P, 3),
          lambda p, x: L.normalised(x, (0,)) * p["weight"] + p["bias"], linear=False),
    layer("group_norm", on(1, 3, ranks=(2, 0, 3)), (2, 4), lambda P, _: nn.DistributedGroupNorm(P, 2, 4, affine=False),
          lambda p, x: L.normalised(x.reshape(2, 2, 2), (2,)).reshape(2, 4), linear=False),
    layer("pointwise", on(1, 2, 2, ranks=_TURNED), (2, 3, 3), lambda P, _: nn.DistributedPointwise(P, 3, 3, bias=False),
          lambda p, x: np.moveaxis(np.tensordot(x, p["weight"], (1, 1)), -1, 1)),
    layer("upsample", on(1, 1, 2, 2), (1, 2, 3, 1), lambda P, _: nn.DistributedUpsample(P, scale_factor=2),
          lambda p, x: x.repeat(2, 2).repeat(2, 3)),
    layer("flatten", on(1, 2, 2, ranks=_TURNED), (2, 3, 2), lambda P, world: nn.Flatten(P, on(2, 1).partition(world)),
          lambda p, x: x.reshape(len(x), -1), on(2, 1)),
    layer("reshape", on(2, 2, ranks=_TURNED), (3, 4), lambda P, world: nn.Reshape(P, on(1, 3).partition(world), (2, 6)),
          lambda p, x: x.reshape(2, 6), on(1, 3)),
    layer("attention", on(1, 2, 2, ranks=_TURNED), (2, 3, 4),
          lambda P, _: nn.DistributedMultiHeadAttention(P, 4, 2, bias=False),
          L.attention_of_two_heads, linear=False, scale=0.1),
    layer("mixture_of_experts", on(1, 2, 1, ranks=(3, 1)), (2, 3, 2),
          lambda P, world: nn.DistributedMixtureOfExperts(
              P, 2, 3, 2, capacity_factor=0.5, activation=jnp.tanh, P_W=on(2, ranks=(1, 2)).partition(world)),
          lambda p, x: L.mixture_of_experts(p, x, 2, 0.5)[0], linear=False, scale=0.125),
    layer("residual", on(1, 2, ranks=(3, 1)), (2, 3),
          lambda P, world: nn.Residual(nn.DistributedLinear(P, P, on(2, 2).partition(world), 3, 3, bias=False)),
          lambda p, x: x + x @ p["body"]["weight"].T),
    layer("gru_cell", on(2, 2, ranks=_TURNED), (3, 3), lambda P, _: nn.DistributedGRUCell(P, 3, 3, bias=False),
          L.one_step, linear=False, scale=0.1),
    layer("conv_lstm", on(1, 1, 3, ranks=(2, 0, 3)), (1, 1, 4),
          lambda P, _: nn.DistributedConvLSTMCell1d(P, in_channels=1, hidden_channels=1, kernel_size=3, bias=False),
          L.conv_step, linear=False, scale=0.1),
    layer("weight_norm", on(1, 2), (2, 3),
          lambda P, world: nn.WeightNorm(nn.DistributedLinear(
              P, on(1, 2, ranks=(3, 1)).partition(world), on(2, 2).partition(world), 3, 3, bias=False)),
          L.with_rows_of_length, on(1, 2, ranks=(3, 1)), linear=False, scale=0.25),
    hartley(on(2, 2), (3, 2), (0, 1)),
    hartley(on(4, ranks=_TURNED), (3,), (0,)),
    hartley(on(2, 2, 1), (3, 4, 2), (1, 2)),
    layer("spectral", on(1, 1, 3, ranks=(2, 0, 3)), (1, 2, 4), lambda P, _: nn.DistributedSpectralConv1d(P, 2, 1, 2),
          lambda p, x: L.low_frequencies(p["weight"], x), linear=False),
    function("roll", on(2, 2, ranks=_TURNED), (3, 4), lambda x, P: nn.Roll(P, (1, -3), (0, 1))(x),
             lambda x, P: nn.Roll(P, (1, -3), (0, 1)).plan(x), lambda x: np.roll(x, (1, -3), (0, 1))),
    function("window_partition", on(1, 2, 2), (1, 6, 2), lambda x, P: F.window_partition(x, P, 2),
             lambda x, P: plan_window_partition(x, P, 2), lambda x: x.reshape(1, 3, 2, 2), on(1, 2, 1, 2)),
    function("pixel_shuffle", on(1, 1, 3, ranks=(2, 0, 3)), (2, 2, 4), lambda x, P: F.pixel_shuffle(x, P, 2),
             lambda x, P: plan_pixels("pixel_shuffle", x, P, 2),
             lambda x: x.transpose(0, 2, 1).reshape(2, 1, 8)),
    function("cumsum", on(2, 2, ranks=_TURNED), (3, 5), lambda x, P: F.cumsum(x, P, 1),
             lambda x, P: plan_cumulative("cumsum", x, P, 1), lambda x: np.cumsum(x, 1), exact=False),
    function("grid_sample", on(1, 1, 3, ranks=(2, 0, 3)), (1, 2, 4),
             lambda x, P: F.grid_sample(
                 x, F.affine_grid(np.array([[[0.5, 0.25]]]), P, (1, 2, 4), True), P, "bilinear", "zeros", True),
             lambda x, P: plan_grid_sample(
                 x, {worker: ShapeDtype((1, x[worker].shape[2], 1), np.dtype(float)) for worker in P.ranks}, P),
             lambda x: np.stack([(1 - t) * x[..., i] + t * x[..., i + 1]
                                 for i, t in ((1, 0.125), (1, 0.625), (2, 0.125), (2, 0.625))], -1),
             exact=False),
    conv(on(1, 2, 2), on(1, 1, 2, ranks=(3, 0)), on(1, 2, 2, ranks=(1, 3, 0, 2)), (5,), (3,), of_params=True,
         padding=(1,)),
    conv(on(2, 1, 2), None, None, (5,), (3,), batch=3, of_params=True, sharded=True, stride=(2,), padding=(1,)),
)
# fmt: on

OTHER_SIZES = (
    # Three workers, nothing divisible.
    broadcast(on(1, 1, ranks=(2,)), on(1, 3, ranks=(1, 2, 0)), {2: (3, 1)}, world=3),
    sum_reduce(on(3, 1), on(1, ranks=(1,)), _BLOCK, world=3),
    all_reduce(on(3), "max", (0,), _BLOCK, world=3),
    replicated(on(3), (0,), _BLOCK, world=3),
    gather((), on(3), (0,), 1, world=3),
    scatter((5,), on(3, ranks=(2, 0, 1)), (), 1, world=3),
    repartition(on(3, 1), on(1, 3), blocks(on(3, 1), 4, 5, world=3)),
    repartition(on(3), on(2, ranks=(2, 0)), blocks(on(3), 2, world=3)),
    halo_exchange(on(3), blocks(on(3), 4, world=3), (2, 3)),
    all_gather(on(1, 3), (1,), blocks(on(1, 3), 2, 4, world=3)),
    reduce_scatter(on(3), (0,), block_shapes(on(3), (2,), 3)),
    take(on(3, 1), on(2, 1, ranks=(2, 0)), [1, 1, 0], 0, blocks(on(3, 1), 2, 2, world=3)),
    segment_sum(on(3, ranks=(2, 0, 1)), on(3), [2, 0, 2, 1], 3, 0, blocks(on(3, ranks=(2, 0, 1)), 4, world=3)),
    all_to_all(on(1, 3), 0, 1, blocks(on(1, 3), 2, 4, world=3)),
    linear(on(1, 3), on(1, 1), on(1, 3), 4, 2, world=3),
    all_sum_reduce(on(1, 3), (1,), _BLOCK, world=3),
    conv(on(1, 1, 3), None, None, (4,), (3,), world=3, padding=(1,)),
    conv(on(1, 1, 3), None, None, (6,), (3,), world=3, padding=(1,)),
    average_pool(on(1, 1, 3), (6,), (4,), (1,), (2,), world=3),
    # Two workers.
    broadcast(on(1, ranks=(1,)), on(2), {1: (2, 3)}, world=2),
    sum_reduce(on(2, 1, ranks=(1, 0)), on(1, 1), _BLOCK, world=2),
    all_sum_reduce(on(2), (0,), _BLOCK, world=2),
    *(all_reduce(on(1, 2), op, (1,), _BLOCK, world=2) for op in ("max", "min", "mean", "prod")),
    reduction(on(1, 2), "var", (1,), 2, 3, world=2),
    reduction(on(2, 1), "min", (0, 1), 3, 2, world=2),
    replicated(on(2), (0,), _BLOCK, world=2),
    gather((3,), on(1, 2), (0,), 1, world=2),
    scatter((1, 2), on(2, 1, ranks=(1, 0)), (), 0, world=2),
    repartition(on(2, 1), on(1, 2, ranks=(1, 0)), blocks(on(2, 1), 3, 1, world=2)),
    halo_exchange(on(2), blocks(on(2), 3, world=2), (1, 2), periodic=(True,)),
    all_gather(on(2, 1), (0,), blocks(on(2, 1), 1, 3, world=2)),
    reduce_scatter(on(2), (0,), block_shapes(on(2), (3,), 2)),
    take(on(2, 1), on(2, 1), [2, 0, 0], 0, blocks(on(2, 1), 3, 2, world=2)),
    segment_sum(on(2), on(2, ranks=(1, 0)), [1, 0, 1], 2, 0, blocks(on(2), 3, world=2)),
    all_to_all(on(2, 1, ranks=(1, 0)), 1, 0, blocks(on(2, 1), 3, 3, world=2)),
    top_k(on(2), 2, 0, blocks(on(2), 3, world=2)),
    linear(on(1, 2), on(1, 1, ranks=(1,)), on(1, 2), 3, 2, world=2),
    linear(on(1, 1), on(1, 2), on(2, 1), 3, 2, world=2, of_params=True),
    conv(on(1, 1, 2), None, None, (4,), (3,), world=2, stride=(2,)),
    conv(on(1, 1, 2), None, None, (5,), (3,), world=2, of_params=True, padding=(1,)),
    conv(on(1, 1, 1, 1, 1, 2), None, None, (2, 1, 2, 4), (2, 1, 1, 3), world=2, padding=(0, 0, 0, 1)),
    average_pool(on(1, 1, 2, 1, 1, 1), (3, 1, 2, 2), (2, 1, 1, 2), (1, 1, 1, 1), (0, 0, 0, 0), world=2),
    # One worker: the same programs, without MPI.
    broadcast(on(1, 1), on(1, 1), {0: (2, 3)}, world=1),
    sum_reduce(on(1), on(1), {0: (2, 3)}, world=1),
    all_sum_reduce(on(1, 1), (0, 1), {0: (2, 3)}, world=1),
    all_reduce(on(1, 1), "max", (0, 1), {0: (2, 3)}, world=1),
    all_reduce(on(1, 1), "mean", (0, 1), {0: (2, 3)}, world=1),
    all_reduce(on(1, 1), "prod", (0, 1), {0: (2, 3)}, world=1),
    replicated(on(1, 1), (0, 1), {0: (2, 3)}, world=1),
    gather((2, 3), on(1, 1, 1), (0,), 0, world=1),
    scatter((2, 3), on(1, 1, 1), (0,), 0, world=1),
    repartition(on(1, 1), on(1, 1), ((2, 3),)),
    halo_exchange(on(1, 1), ((2, 3),), (1, 0), (2, 2)),
    halo_exchange(on(1, 1), ((2, 3),), (1, 0), (4, 2), periodic=(True, True)),
    all_gather(on(1, 1), (0,), ((2, 3),)),
    reduce_scatter(on(1, 1), (0, 1), ((2, 3),)),
    take(on(1, 1), on(1, 1), [2, 0, 0], 1, ((2, 3),)),
    segment_sum(on(1, 1), on(1), [[2, 0], [0, 0]], 3, 0, ((2, 2),)),
    all_to_all(on(1, 1), 0, 1, ((2, 3),)),
    top_k(on(1, 1), 2, 1, ((2, 3),)),
    linear(on(1, 1), on(1, 1), on(1, 1), 3, 2, world=1),
    linear(on(1, 1), on(1, 1), on(1, 1), 3, 2, world=1, of_params=True),
    conv(on(1, 1, 1), None, None, (4,), (3,), world=1, padding=(1,)),
    average_pool(on(1, 1, 1), (4,), (2,), (2,), (0,), world=1),
    # Twelve workers: the documentation's examples, and teams too large for trees of messages.
    broadcast(on(1, 3, ranks=(4, 5, 6)), on(4, 3), _BLOCK, world=12),
    sum_reduce(on(2, 3, 2), on(1, 3, 1, ranks=(2, 3, 4)), _BLOCK, world=12),
    broadcast(on(1, ranks=(5,)), on(12), _BLOCK, world=12),
    sum_reduce(on(2, 6), on(1, 1, ranks=(3,)), _BLOCK, world=12),
    all_sum_reduce(on(2, 3, 2), (0, 2), _BLOCK, world=12),
    all_reduce(on(2, 3, 2), "max", (0, 2), _BLOCK, world=12),
    replicated(on(2, 3, 2), (0, 2), _BLOCK, world=12),
    scatter((7,), on(2, 3, 2), (0, 2), 5, world=12),
    repartition(on(3, 4), on(4, 2), blocks(on(3, 4), 7, 9, world=12)),
    halo_exchange(on(3, 4), blocks(on(3, 4), 6, 9, world=12), (1, 1), (2, 2)),
    reduce_scatter(on(1, 12), (1,), block_shapes(on(1, 12), (1, 14), 12)),
    take(on(3, 4), on(6, 2), [5, 0, 3, 3, 1, 2, 5], 0, blocks(on(3, 4), 6, 5, world=12)),
    segment_sum(on(6, 2), on(3, 4), [5, 0, 3, 3, 1, 2, 5], 6, 0, blocks(on(6, 2), 7, 5, world=12)),
    linear(on(1, 4, ranks=(4, 5, 6, 7)), on(1, 3), on(3, 4), 5, 4, world=12),
    conv(on(1, 2, 2), on(1, 3, 2, ranks=range(6, 12)), on(3, 2, 2), (5,), (3,), world=12, padding=(1,)),
)

# fmt: off
LAYERS_ON_FEWER = (
    layer("conv_transpose", on(1, 1, 3), (1, 2, 6),
          lambda P, _: nn.DistributedConvTranspose1d(
              P, in_channels=2, out_channels=3, kernel_size=3, padding=1, bias=False),
          lambda p, x: L.spread(p["weight"], x)[..., 1:-1], world=3, scale=0.125),
    layer("max_pool", on(1, 1, 3), (1, 2, 6), lambda P, _: nn.DistributedMaxPool1d(P, 3, 1, 1),
          lambda p, x: L.largest_of_three(x), world=3, linear=False),
    layer("pad", on(1, 3), (2, 6), lambda P, _: nn.DistributedPad(P, padding=[(1, 1)], mode="reflect"),
          lambda p, x: np.pad(x, [(0, 0), (1, 1)], mode="reflect"), world=3),
    layer("group_norm", on(1, 2, ranks=(1, 0)), (2, 6), lambda P, _: nn.DistributedGroupNorm(P, 2, 6, affine=False),
          lambda p, x: L.normalised(x.reshape(2, 2, 3), (2,)).reshape(2, 6), world=2, linear=False),
    layer("flatten", on(1, 2, 1, ranks=(1, 0)), (2, 3, 2), lambda P, world: nn.Flatten(P, on(2, 1).partition(world)),
          lambda p, x: x.reshape(len(x), -1), on(2, 1), world=2),
)
# fmt: on

PRIMITIVES = (*ON_FOUR, *LAYERS, *OTHER_SIZES, *LAYERS_ON_FEWER)


def of_world(size: int, turn: int | None = None) -> tuple[Case, ...]:
    """The cases for a world of `size` workers: all, or one of each operator, whose turn it is.

    Tests that run many programs take turns, so that together they run all cases.
    """
    cases = [case for case in PRIMITIVES if case.world == size]
    if turn is None:
        return tuple(cases)
    kinds = dict.fromkeys(case.kind for case in cases)
    alike = ([case for case in cases if case.kind == kind] for kind in kinds)
    return tuple(each[turn % len(each)] for each in alike)


def shape_dtypes(case: Case, dtype: Any = np.float64) -> dict[int, Any]:
    """What all workers hold before: by world rank a shape and dtype, or a dictionary of them."""
    return {
        worker: jax.tree.map(lambda shape: ShapeDtype(shape, np.dtype(dtype)), shapes, is_leaf=is_shape)
        for worker, shapes in enumerate(case.shapes)
    }
