"""Distributed convolutions over 1 to 4 feature dimensions."""

from __future__ import annotations

from distdl_jax.nn.conv.conv_base import DistributedConv


class DistributedConv1d(DistributedConv):
    """A 1-D convolution whose input, output and weight are split over workers: PyTorch's Conv1d, block for block.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_0 | P_x: P_n x P_ci x P_0 |
    | y | n_b x n_co x m_0 | P_y: P_n x P_co x P_0 |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_0 | P_W's slice P_co x P_ci x 1 |
    | b (`params["bias"]`) | n_co | P_W's slice P_co x 1 x 1 |

    The split dimensions decide what moves, and `repr` shows which of three algorithms it is:

    - *feature*: no channels are split, and P_y and P_W are not given. Halos are exchanged along the features; w and b
      are broadcast over P_x.
    - *channel*: only channels (and the batch) are split. x is broadcast along P_co, and the products are summed along
      P_ci. There are fewest messages where P_x is P_W's first row and P_y its first column: workers 0 and 1, and 0 and
      2, of 2 x 2.
    - *general*: both at once.

    One partition P serves for everything: `DistributedConv1d(P, in_channels=..., out_channels=...)`; where it splits
    channels, `split` says how w is cut. Blocks of x may be uneven along the batch and the features, empty, or smaller
    than the kernel; blocks of y are balanced along the features. A worker outside P_x passes a zero-volume tensor, and
    one outside P_y gets one. The dtype of y is the one to which those of x and the parameters promote.

    **Arguments:**

    - `P_x`, `P_y`, `P_W`: the partitions; P_W has shape P_co x P_ci x P_0, with P_n in front where the batch is split.
      They may be the same workers, overlap or be disjoint. Default of P_y: P_x; of P_W: the workers of P_x or P_y, with
      one side of w cut where channels are split.
    - `in_channels`, `out_channels`: n_ci and n_co.
    - `kernel_size`, `stride`, `dilation`: an integer, as in PyTorch.
    - `padding`: an integer, a pair (low, high) in a list, "same" (with a stride of 1) or "valid".
    - `groups`: as in PyTorch. Where input channels are split, the output channels are split over as many workers, P_ci
      is 1 in P_W, and each worker has whole groups.
    - `bias`: whether there is a b.
    - `padding_mode`: "zeros", "circular", "reflect" or "replicate".
    - `sharded`: whether w and b are cut along n_co over all workers that use the same block, along P_n and the
      features, and gathered in each call; else the first of these has them, and they are broadcast.
    - `split`: "in_channels" or "out_channels", the side of w that is cut where P_x and P_y both split channels, on the
      same workers, and P_W is not given. With "out_channels" x is gathered along its channels, and each worker
      multiplies with its rows of w; with "in_channels" each multiplies with its columns, and the sums are scattered
      along y's channels. Default: the one for which less moves, the output channels where they are no fewer.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit; when applied, `PlanError` where x or a parameter doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 4])
    >>> layer = DistributedConv1d(P, in_channels=3, out_channels=8, kernel_size=3, padding=1)
    >>> layer.output_spec(dj.TensorSpec((5, 3, 9), P)).block_shapes
    {0: (5, 8, 3), 1: (5, 8, 2), 2: (5, 8, 2), 3: (5, 8, 2)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    dims = 1


class DistributedConv2d(DistributedConv):
    """A 2-D convolution whose input, output and weight are split over workers: PyTorch's Conv2d, block for block.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_1 x n_0 | P_x: P_n x P_ci x P_1 x P_0 |
    | y | n_b x n_co x m_1 x m_0 | P_y: P_n x P_co x P_1 x P_0 |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_1 x k_0 | P_W's slice P_co x P_ci x 1 x 1 |
    | b (`params["bias"]`) | n_co | P_W's slice P_co x 1 x 1 x 1 |

    The split dimensions decide what moves, and `repr` shows which of three algorithms it is:

    - *feature*: no channels are split, and P_y and P_W are not given. Halos are exchanged along the features; w and b
      are broadcast over P_x.
    - *channel*: only channels (and the batch) are split. x is broadcast along P_co, and the products are summed along
      P_ci. There are fewest messages where P_x is P_W's first row and P_y its first column: workers 0 and 1, and 0 and
      2, of 2 x 2.
    - *general*: both at once.

    One partition P serves for everything: `DistributedConv2d(P, in_channels=..., out_channels=...)`; where it splits
    channels, `split` says how w is cut. Blocks of x may be uneven along the batch and the features, empty, or smaller
    than the kernel; blocks of y are balanced along the features. A worker outside P_x passes a zero-volume tensor, and
    one outside P_y gets one. The dtype of y is the one to which those of x and the parameters promote.

    **Arguments:**

    - `P_x`, `P_y`, `P_W`: the partitions; P_W has shape P_co x P_ci x P_1 x P_0, with P_n in front where the batch is
      split. They may be the same workers, overlap or be disjoint. Default of P_y: P_x; of P_W: the workers of P_x or
      P_y, with one side of w cut where channels are split.
    - `in_channels`, `out_channels`: n_ci and n_co.
    - `kernel_size`, `stride`, `dilation`: an integer, or one for each feature dimension, as in PyTorch.
    - `padding`: an integer, one for each feature dimension, a pair (low, high) for each, "same" (with a stride of 1) or
      "valid".
    - `groups`: as in PyTorch. Where input channels are split, the output channels are split over as many workers, P_ci
      is 1 in P_W, and each worker has whole groups.
    - `bias`: whether there is a b.
    - `padding_mode`: "zeros", "circular", "reflect" or "replicate".
    - `sharded`: whether w and b are cut along n_co over all workers that use the same block, along P_n and the
      features, and gathered in each call; else the first of these has them, and they are broadcast.
    - `split`: "in_channels" or "out_channels", the side of w that is cut where P_x and P_y both split channels, on the
      same workers, and P_W is not given. With "out_channels" x is gathered along its channels, and each worker
      multiplies with its rows of w; with "in_channels" each multiplies with its columns, and the sums are scattered
      along y's channels. Default: the one for which less moves, the output channels where they are no fewer.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit; when applied, `PlanError` where x or a parameter doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 2])
    >>> layer = DistributedConv2d(P, in_channels=3, out_channels=8, kernel_size=3, padding=1)
    >>> layer.output_spec(dj.TensorSpec((5, 3, 9, 8), P)).block_shapes
    {0: (5, 8, 5, 4), 1: (5, 8, 5, 4), 2: (5, 8, 4, 4), 3: (5, 8, 4, 4)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    dims = 2


class DistributedConv3d(DistributedConv):
    """A 3-D convolution whose input, output and weight are split over workers: PyTorch's Conv3d, block for block.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_2 x n_1 x n_0 | P_x: P_n x P_ci x P_2 x P_1 x P_0 |
    | y | n_b x n_co x m_2 x m_1 x m_0 | P_y: P_n x P_co x P_2 x P_1 x P_0 |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_2 x k_1 x k_0 | P_W's slice P_co x P_ci x 1 x 1 x 1 |
    | b (`params["bias"]`) | n_co | P_W's slice P_co x 1 x 1 x 1 x 1 |

    The split dimensions decide what moves, and `repr` shows which of three algorithms it is:

    - *feature*: no channels are split, and P_y and P_W are not given. Halos are exchanged along the features; w and b
      are broadcast over P_x.
    - *channel*: only channels (and the batch) are split. x is broadcast along P_co, and the products are summed along
      P_ci. There are fewest messages where P_x is P_W's first row and P_y its first column: workers 0 and 1, and 0 and
      2, of 2 x 2.
    - *general*: both at once.

    One partition P serves for everything: `DistributedConv3d(P, in_channels=..., out_channels=...)`; where it splits
    channels, `split` says how w is cut. Blocks of x may be uneven along the batch and the features, empty, or smaller
    than the kernel; blocks of y are balanced along the features. A worker outside P_x passes a zero-volume tensor, and
    one outside P_y gets one. The dtype of y is the one to which those of x and the parameters promote.

    **Arguments:**

    - `P_x`, `P_y`, `P_W`: the partitions; P_W has shape P_co x P_ci x P_2 x P_1 x P_0, with P_n in front where the
      batch is split. They may be the same workers, overlap or be disjoint. Default of P_y: P_x; of P_W: the workers of
      P_x or P_y, with one side of w cut where channels are split.
    - `in_channels`, `out_channels`: n_ci and n_co.
    - `kernel_size`, `stride`, `dilation`: an integer, or one for each feature dimension, as in PyTorch.
    - `padding`: an integer, one for each feature dimension, a pair (low, high) for each, "same" (with a stride of 1) or
      "valid".
    - `groups`: as in PyTorch. Where input channels are split, the output channels are split over as many workers, P_ci
      is 1 in P_W, and each worker has whole groups.
    - `bias`: whether there is a b.
    - `padding_mode`: "zeros", "circular", "reflect" or "replicate".
    - `sharded`: whether w and b are cut along n_co over all workers that use the same block, along P_n and the
      features, and gathered in each call; else the first of these has them, and they are broadcast.
    - `split`: "in_channels" or "out_channels", the side of w that is cut where P_x and P_y both split channels, on the
      same workers, and P_W is not given. With "out_channels" x is gathered along its channels, and each worker
      multiplies with its rows of w; with "in_channels" each multiplies with its columns, and the sums are scattered
      along y's channels. Default: the one for which less moves, the output channels where they are no fewer.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit; when applied, `PlanError` where x or a parameter doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 2, 1])
    >>> layer = DistributedConv3d(P, in_channels=3, out_channels=8, kernel_size=3, padding=1)
    >>> layer.output_spec(dj.TensorSpec((5, 3, 9, 8, 4), P)).block_shapes
    {0: (5, 8, 5, 4, 4), 1: (5, 8, 5, 4, 4), 2: (5, 8, 4, 4, 4), 3: (5, 8, 4, 4, 4)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    dims = 3


class DistributedConv4d(DistributedConv):
    """A 4-D convolution whose input, output and weight are split over workers: space and time, with Conv3d's arguments.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_3 x n_2 x n_1 x n_0 | P_x: P_n x P_ci x P_3 x P_2 x P_1 x P_0 |
    | y | n_b x n_co x m_3 x m_2 x m_1 x m_0 | P_y: P_n x P_co x P_3 x P_2 x P_1 x P_0 |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_3 x k_2 x k_1 x k_0 | P_W's slice P_co x P_ci x 1 x 1 x 1 x 1 |
    | b (`params["bias"]`) | n_co | P_W's slice P_co x 1 x 1 x 1 x 1 x 1 |

    The split dimensions decide what moves, and `repr` shows which of three algorithms it is:

    - *feature*: no channels are split, and P_y and P_W are not given. Halos are exchanged along the features; w and b
      are broadcast over P_x.
    - *channel*: only channels (and the batch) are split. x is broadcast along P_co, and the products are summed along
      P_ci. There are fewest messages where P_x is P_W's first row and P_y its first column: workers 0 and 1, and 0 and
      2, of 2 x 2.
    - *general*: both at once.

    One partition P serves for everything: `DistributedConv4d(P, in_channels=..., out_channels=...)`; where it splits
    channels, `split` says how w is cut. Blocks of x may be uneven along the batch and the features, empty, or smaller
    than the kernel; blocks of y are balanced along the features. A worker outside P_x passes a zero-volume tensor, and
    one outside P_y gets one. The dtype of y is the one to which those of x and the parameters promote.

    **Arguments:**

    - `P_x`, `P_y`, `P_W`: the partitions; P_W has shape P_co x P_ci x P_3 x P_2 x P_1 x P_0, with P_n in front where
      the batch is split. They may be the same workers, overlap or be disjoint. Default of P_y: P_x; of P_W: the workers
      of P_x or P_y, with one side of w cut where channels are split.
    - `in_channels`, `out_channels`: n_ci and n_co.
    - `kernel_size`, `stride`, `dilation`: an integer, or one for each feature dimension, as in PyTorch.
    - `padding`: an integer, one for each feature dimension, a pair (low, high) for each, "same" (with a stride of 1) or
      "valid".
    - `groups`: as in PyTorch. Where input channels are split, the output channels are split over as many workers, P_ci
      is 1 in P_W, and each worker has whole groups.
    - `bias`: whether there is a b.
    - `padding_mode`: "zeros", "circular", "reflect" or "replicate".
    - `sharded`: whether w and b are cut along n_co over all workers that use the same block, along P_n and the
      features, and gathered in each call; else the first of these has them, and they are broadcast.
    - `split`: "in_channels" or "out_channels", the side of w that is cut where P_x and P_y both split channels, on the
      same workers, and P_W is not given. With "out_channels" x is gathered along its channels, and each worker
      multiplies with its rows of w; with "in_channels" each multiplies with its columns, and the sums are scattered
      along y's channels. Default: the one for which less moves, the output channels where they are no fewer.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit; when applied, `PlanError` where x or a parameter doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 1, 2, 1])
    >>> layer = DistributedConv4d(P, in_channels=3, out_channels=8, kernel_size=3, padding=1)
    >>> layer.output_spec(dj.TensorSpec((5, 3, 9, 8, 4, 6), P)).block_shapes
    {0: (5, 8, 5, 8, 2, 6), 1: (5, 8, 5, 8, 2, 6), 2: (5, 8, 4, 8, 2, 6), 3: (5, 8, 4, 8, 2, 6)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    dims = 4
