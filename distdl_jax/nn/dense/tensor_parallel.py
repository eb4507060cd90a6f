"""Megatron's pair of linear layers: the features between the two are cut, the stream around them is not."""

from __future__ import annotations

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.nn.dense.linear import DistributedLinear
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.validation import checked_boolean


def ColumnParallelLinear(
    P: Partition,
    *,
    in_features: int,
    out_features: int,
    bias: bool = True,
    sequence_parallel: bool = False,
    sharded: bool = False,
) -> DistributedLinear:
    """Make an affine map y = x W^T + b whose output features are cut, the first of Megatron's pair of layers.

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x ... x n_s x n_in | P_n x ... x p x 1: copies, or, with `sequence_parallel`, parts of the sequence |
    | y | n_b x ... x n_s x n_out | P: P_n x ... x 1 x p |
    | W, b | n_out x n_in, n_out | P_n x p x 1: rows of W |

    With copies of x nothing moves, and the gradient is the sum of the partial gradients on its workers. With parts of
    it the sequence is gathered, and its gradient reduce-scattered.

    **Arguments:**

    - `P`: the partition of the features between the two layers, batch x ... x sequence x features, cut along the batch
      and the features.
    - `in_features`, `out_features`, `bias`, `sharded`: as in `DistributedLinear`.
    - `sequence_parallel`: whether workers along the features hold parts of the stream's sequence, not copies.

    **Returns:** the `DistributedLinear` with these partitions.

    **Raises:** `InvalidTypeError` if a flag is not True or False; `InvalidArgumentError`, on every worker, if `P` cuts
    the sequence, or has too few dimensions.

    >>> import distdl_jax as dj
    >>> ColumnParallelLinear(dj.planning_world(4).grid([1, 1, 4]), in_features=8, out_features=32)
    DistributedLinear(8 -> 32, bias=True, replicated, P_x 1 x 4 x 1, P_y 1 x 1 x 4, P_W 1 x 4 x 1)

    Source: Shoeybi et al. (2019), arXiv:1909.08053; Korthikanti et al. (2022), arXiv:2205.05198 (sequence).
    """
    return _layer(P, True, in_features, out_features, bias, sequence_parallel, sharded)


def RowParallelLinear(
    P: Partition,
    *,
    in_features: int,
    out_features: int,
    bias: bool = True,
    sequence_parallel: bool = False,
    sharded: bool = False,
) -> DistributedLinear:
    """Make an affine map y = x W^T + b whose input features are cut, the second of Megatron's pair of layers.

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x ... x n_s x n_in | P: P_n x ... x 1 x p |
    | y | n_b x ... x n_s x n_out | P_n x ... x p x 1: copies, or, with `sequence_parallel`, parts of the sequence |
    | W, b | n_out x n_in, n_out | P_n x 1 x p: columns of W; b on the first worker |

    Products are summed over the p workers onto all of them, or scattered along the sequence. In the backward pass,
    partial gradients of the copies are summed in the same way, and gradients of parts are gathered.

    **Arguments:**

    - `P`: as in `ColumnParallelLinear`, the partition of the features between the two layers.
    - `in_features`, `out_features`, `bias`, `sharded`: as in `DistributedLinear`.
    - `sequence_parallel`: whether workers along the features get parts of y's sequence, not copies of y.

    **Returns:** the `DistributedLinear` with these partitions.

    **Raises:** `InvalidTypeError` and `InvalidArgumentError` as in `ColumnParallelLinear`.

    >>> import distdl_jax as dj
    >>> RowParallelLinear(dj.planning_world(4).grid([1, 1, 4]), in_features=32, out_features=8, sequence_parallel=True)
    DistributedLinear(32 -> 8, bias=True, P_x 1 x 1 x 4, P_y 1 x 4 x 1, P_W 1 x 1 x 4)

    Source: as `ColumnParallelLinear`.
    """
    return _layer(P, False, in_features, out_features, bias, sequence_parallel, sharded)


def _layer(
    P: Partition, is_column: bool, n_in: int, n_out: int, bias: bool, sequence_parallel: bool, sharded: bool
) -> DistributedLinear:
    check_partitions(P=P)
    if P.dim < 3 or set(P.shape[1:-1]) != {1}:
        raise InvalidArgumentError(
            f"`P` ({shape_text(P.shape)}) must be P_n x 1 x p, with one or more ones between: batch, sequence, and "
            "features."
        )
    p_n, p = P.shape[0], P.shape[-1]
    stream = P.grid([*P.shape[:-2], p, 1])
    replicated = not checked_boolean("sequence_parallel", sequence_parallel) and p > 1
    P_x, P_y, P_W = (stream, P, P.grid([p_n, p, 1])) if is_column else (P, stream, P.grid([p_n, 1, p]))
    return DistributedLinear(P_x, P_y, P_W, n_in, n_out, bias=bias, replicated=replicated, sharded=sharded)
