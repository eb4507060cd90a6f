"""Convolutions that take the partitions of the channel algorithm only."""

from __future__ import annotations

from distdl_jax.nn.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d, DistributedConv4d


class DistributedChannelConv1d(DistributedConv1d):
    """A 1-D convolution on partitions that split the channels, not the features: PyTorch's Conv1d, block for block.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_0 | P_x: P_n x P_ci x 1 |
    | y | n_b x n_co x m_0 | P_y: P_n x P_co x 1 |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_0 | P_W's slice P_co x P_ci x 1 |
    | b (`params["bias"]`) | n_co | P_W's slice P_co x 1 x 1 |

    It refuses partitions that split features, or no channels; everything else is as in `DistributedConv1d`. x is
    broadcast along P_co, and the products are summed along P_ci. There are fewest messages where P_x is P_W's first row
    and P_y its first column: workers 0 and 1, and 0 and 2, of 2 x 2. On one partition, x is gathered or sums are
    scattered along the channels, as `split` says.

    Blocks of x may be uneven along the batch and the features, empty, or smaller than the kernel; blocks of y are
    balanced along the features. A worker outside P_x passes a zero-volume tensor, and one outside P_y gets one. The
    dtype of y is the one to which those of x and the parameters promote.

    **Arguments:**

    - `P_x`, `P_y`, `P_W`: the partitions; P_W has shape P_co x P_ci x 1, with P_n in front where the batch is split.
      They may be the same workers, overlap or be disjoint. Default of P_y: P_x; of P_W: the workers of P_x or P_y, with
      one side of w cut.
    - `in_channels`, `out_channels`: n_ci and n_co.
    - `kernel_size`, `stride`, `dilation`: an integer, as in PyTorch.
    - `padding`: an integer, a pair (low, high) in a list, "same" (with a stride of 1) or "valid".
    - `groups`: as in PyTorch. Where input channels are split, the output channels are split over as many workers, P_ci
      is 1 in P_W, and each worker has whole groups.
    - `bias`: whether there is a b.
    - `padding_mode`: "zeros", "circular", "reflect" or "replicate".
    - `sharded`: whether w and b are cut along n_co over all workers that use the same block, along P_n, and gathered in
      each call; else the first of these has them, and they are broadcast.
    - `split`: "in_channels" or "out_channels", the side of w that is cut where P_x and P_y both split channels, on the
      same workers, and P_W is not given. With "out_channels" x is gathered along its channels, and each worker
      multiplies with its rows of w; with "in_channels" each multiplies with its columns, and the sums are scattered
      along y's channels. Default: the one for which less moves, the output channels where they are no fewer.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit, or the partitions ask for another algorithm; when applied, `PlanError` where x or a parameter
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 4, 1])
    >>> layer = DistributedChannelConv1d(P, in_channels=4, out_channels=8, kernel_size=3, padding=1)
    >>> layer.param_specs()["weight"].block_shapes
    {0: (2, 4, 3), 1: (2, 4, 3), 2: (2, 4, 3), 3: (2, 4, 3)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    required_kind = "channel"


class DistributedChannelConv2d(DistributedConv2d):
    """A 2-D convolution on partitions that split the channels, not the features: PyTorch's Conv2d, block for block.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_1 x n_0 | P_x: P_n x P_ci x 1 x 1 |
    | y | n_b x n_co x m_1 x m_0 | P_y: P_n x P_co x 1 x 1 |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_1 x k_0 | P_W's slice P_co x P_ci x 1 x 1 |
    | b (`params["bias"]`) | n_co | P_W's slice P_co x 1 x 1 x 1 |

    It refuses partitions that split features, or no channels; everything else is as in `DistributedConv2d`. x is
    broadcast along P_co, and the products are summed along P_ci. There are fewest messages where P_x is P_W's first row
    and P_y its first column: workers 0 and 1, and 0 and 2, of 2 x 2. On one partition, x is gathered or sums are
    scattered along the channels, as `split` says.

    Blocks of x may be uneven along the batch and the features, empty, or smaller than the kernel; blocks of y are
    balanced along the features. A worker outside P_x passes a zero-volume tensor, and one outside P_y gets one. The
    dtype of y is the one to which those of x and the parameters promote.

    **Arguments:**

    - `P_x`, `P_y`, `P_W`: the partitions; P_W has shape P_co x P_ci x 1 x 1, with P_n in front where the batch is
      split. They may be the same workers, overlap or be disjoint. Default of P_y: P_x; of P_W: the workers of P_x or
      P_y, with one side of w cut.
    - `in_channels`, `out_channels`: n_ci and n_co.
    - `kernel_size`, `stride`, `dilation`: an integer, or one for each feature dimension, as in PyTorch.
    - `padding`: an integer, one for each feature dimension, a pair (low, high) for each, "same" (with a stride of 1) or
      "valid".
    - `groups`: as in PyTorch. Where input channels are split, the output channels are split over as many workers, P_ci
      is 1 in P_W, and each worker has whole groups.
    - `bias`: whether there is a b.
    - `padding_mode`: "zeros", "circular", "reflect" or "replicate".
    - `sharded`: whether w and b are cut along n_co over all workers that use the same block, along P_n, and gathered in
      each call; else the first of these has them, and they are broadcast.
    - `split`: "in_channels" or "out_channels", the side of w that is cut where P_x and P_y both split channels, on the
      same workers, and P_W is not given. With "out_channels" x is gathered along its channels, and each worker
      multiplies with its rows of w; with "in_channels" each multiplies with its columns, and the sums are scattered
      along y's channels. Default: the one for which less moves, the output channels where they are no fewer.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit, or the partitions ask for another algorithm; when applied, `PlanError` where x or a parameter
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 4, 1, 1])
    >>> layer = DistributedChannelConv2d(P, in_channels=4, out_channels=8, kernel_size=3, padding=1)
    >>> layer.param_specs()["weight"].block_shapes
    {0: (2, 4, 3, 3), 1: (2, 4, 3, 3), 2: (2, 4, 3, 3), 3: (2, 4, 3, 3)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    required_kind = "channel"


class DistributedChannelConv3d(DistributedConv3d):
    """A 3-D convolution on partitions that split the channels, not the features: PyTorch's Conv3d, block for block.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_2 x n_1 x n_0 | P_x: P_n x P_ci x 1 x 1 x 1 |
    | y | n_b x n_co x m_2 x m_1 x m_0 | P_y: P_n x P_co x 1 x 1 x 1 |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_2 x k_1 x k_0 | P_W's slice P_co x P_ci x 1 x 1 x 1 |
    | b (`params["bias"]`) | n_co | P_W's slice P_co x 1 x 1 x 1 x 1 |

    It refuses partitions that split features, or no channels; everything else is as in `DistributedConv3d`. x is
    broadcast along P_co, and the products are summed along P_ci. There are fewest messages where P_x is P_W's first row
    and P_y its first column: workers 0 and 1, and 0 and 2, of 2 x 2. On one partition, x is gathered or sums are
    scattered along the channels, as `split` says.

    Blocks of x may be uneven along the batch and the features, empty, or smaller than the kernel; blocks of y are
    balanced along the features. A worker outside P_x passes a zero-volume tensor, and one outside P_y gets one. The
    dtype of y is the one to which those of x and the parameters promote.

    **Arguments:**

    - `P_x`, `P_y`, `P_W`: the partitions; P_W has shape P_co x P_ci x 1 x 1 x 1, with P_n in front where the batch is
      split. They may be the same workers, overlap or be disjoint. Default of P_y: P_x; of P_W: the workers of P_x or
      P_y, with one side of w cut.
    - `in_channels`, `out_channels`: n_ci and n_co.
    - `kernel_size`, `stride`, `dilation`: an integer, or one for each feature dimension, as in PyTorch.
    - `padding`: an integer, one for each feature dimension, a pair (low, high) for each, "same" (with a stride of 1) or
      "valid".
    - `groups`: as in PyTorch. Where input channels are split, the output channels are split over as many workers, P_ci
      is 1 in P_W, and each worker has whole groups.
    - `bias`: whether there is a b.
    - `padding_mode`: "zeros", "circular", "reflect" or "replicate".
    - `sharded`: whether w and b are cut along n_co over all workers that use the same block, along P_n, and gathered in
      each call; else the first of these has them, and they are broadcast.
    - `split`: "in_channels" or "out_channels", the side of w that is cut where P_x and P_y both split channels, on the
      same workers, and P_W is not given. With "out_channels" x is gathered along its channels, and each worker
      multiplies with its rows of w; with "in_channels" each multiplies with its columns, and the sums are scattered
      along y's channels. Default: the one for which less moves, the output channels where they are no fewer.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit, or the partitions ask for another algorithm; when applied, `PlanError` where x or a parameter
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 4, 1, 1, 1])
    >>> layer = DistributedChannelConv3d(P, in_channels=4, out_channels=8, kernel_size=3, padding=1)
    >>> layer.param_specs()["weight"].block_shapes
    {0: (2, 4, 3, 3, 3), 1: (2, 4, 3, 3, 3), 2: (2, 4, 3, 3, 3), 3: (2, 4, 3, 3, 3)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    required_kind = "channel"


class DistributedChannelConv4d(DistributedConv4d):
    """A 4-D convolution on partitions that split the channels, not the features.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_3 x n_2 x n_1 x n_0 | P_x: P_n x P_ci x 1 x 1 x 1 x 1 |
    | y | n_b x n_co x m_3 x m_2 x m_1 x m_0 | P_y: P_n x P_co x 1 x 1 x 1 x 1 |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_3 x k_2 x k_1 x k_0 | P_W's slice P_co x P_ci x 1 x 1 x 1 x 1 |
    | b (`params["bias"]`) | n_co | P_W's slice P_co x 1 x 1 x 1 x 1 x 1 |

    It refuses partitions that split features, or no channels; everything else is as in `DistributedConv4d`. x is
    broadcast along P_co, and the products are summed along P_ci. There are fewest messages where P_x is P_W's first row
    and P_y its first column: workers 0 and 1, and 0 and 2, of 2 x 2. On one partition, x is gathered or sums are
    scattered along the channels, as `split` says.

    Blocks of x may be uneven along the batch and the features, empty, or smaller than the kernel; blocks of y are
    balanced along the features. A worker outside P_x passes a zero-volume tensor, and one outside P_y gets one. The
    dtype of y is the one to which those of x and the parameters promote.

    **Arguments:**

    - `P_x`, `P_y`, `P_W`: the partitions; P_W has shape P_co x P_ci x 1 x 1 x 1 x 1, with P_n in front where the batch
      is split. They may be the same workers, overlap or be disjoint. Default of P_y: P_x; of P_W: the workers of P_x or
      P_y, with one side of w cut.
    - `in_channels`, `out_channels`: n_ci and n_co.
    - `kernel_size`, `stride`, `dilation`: an integer, or one for each feature dimension, as in PyTorch.
    - `padding`: an integer, one for each feature dimension, a pair (low, high) for each, "same" (with a stride of 1) or
      "valid".
    - `groups`: as in PyTorch. Where input channels are split, the output channels are split over as many workers, P_ci
      is 1 in P_W, and each worker has whole groups.
    - `bias`: whether there is a b.
    - `padding_mode`: "zeros", "circular", "reflect" or "replicate".
    - `sharded`: whether w and b are cut along n_co over all workers that use the same block, along P_n, and gathered in
      each call; else the first of these has them, and they are broadcast.
    - `split`: "in_channels" or "out_channels", the side of w that is cut where P_x and P_y both split channels, on the
      same workers, and P_W is not given. With "out_channels" x is gathered along its channels, and each worker
      multiplies with its rows of w; with "in_channels" each multiplies with its columns, and the sums are scattered
      along y's channels. Default: the one for which less moves, the output channels where they are no fewer.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit, or the partitions ask for another algorithm; when applied, `PlanError` where x or a parameter
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 4, 1, 1, 1, 1])
    >>> layer = DistributedChannelConv4d(P, in_channels=4, out_channels=8, kernel_size=3, padding=1)
    >>> layer.param_specs()["weight"].block_shapes
    {0: (2, 4, 3, 3, 3, 3), 1: (2, 4, 3, 3, 3, 3), 2: (2, 4, 3, 3, 3, 3), 3: (2, 4, 3, 3, 3, 3)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    required_kind = "channel"
