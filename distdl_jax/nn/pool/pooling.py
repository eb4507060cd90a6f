"""Max and average pooling over 1 to 4 feature dimensions."""

from __future__ import annotations

from distdl_jax.nn.pool.pooling_base import DistributedAvgPool, DistributedMaxPool


class DistributedMaxPool1d(DistributedMaxPool):
    """A max pooling over 1 feature dimension of a split tensor: PyTorch's MaxPool1d, block for block.

        y[n, c, j] = max over t of x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_c x n_0 | P_x: P_n x P_c x P_0 |
    | y | n_b x n_c x m_0 | P_x |

    Of a length n of x, y has m = floor((n + low + high - dilation (kernel - 1) - 1) / stride) + 1. Batch, channels and
    features may all be split; along split features the halo moves, from any number of neighbours. Blocks of x may be
    uneven, empty, or smaller than the kernel; blocks of y are balanced along the features. y has the dtype of x, which
    is real. A worker outside P_x passes a zero-volume tensor, and gets it back.

    A pooling has no parameters: call it with the input alone, or with `{}` and the input.

    **Arguments:**

    - `P_x`: the partition of x and y.
    - `kernel_size`: an integer.
    - `stride`: an integer. Default: the kernel size.
    - `dilation`: an integer: how far apart the entries of a window are.
    - `padding`: an integer, a pair (low, high) in a list, "same" (with a stride of 1) or "valid", of less than the
      extent of a window.

    **Raises:** `InvalidArgumentError`, on every worker, where arguments don't fit; when applied, `PlanError` where x
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 4])
    >>> layer = DistributedMaxPool1d(P, kernel_size=2)
    >>> layer.output_spec(dj.TensorSpec((5, 3, 21), P)).block_shapes
    {0: (5, 3, 3), 1: (5, 3, 3), 2: (5, 3, 2), 3: (5, 3, 2)}

    Source: DistDL documentation, "convolution" (windows); Hewett and Grady (2020), pooling layers.
    """

    dims = 1


class DistributedMaxPool2d(DistributedMaxPool):
    """A max pooling over 2 feature dimensions of a split tensor: PyTorch's MaxPool2d, block for block.

        y[n, c, j] = max over t of x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_c x n_1 x n_0 | P_x: P_n x P_c x P_1 x P_0 |
    | y | n_b x n_c x m_1 x m_0 | P_x |

    Along each feature dimension m = floor((n + low + high - dilation (kernel - 1) - 1) / stride) + 1. Batch, channels
    and features may all be split; along split features the halo moves, from any number of neighbours. Blocks of x may
    be uneven, empty, or smaller than the kernel; blocks of y are balanced along the features. y has the dtype of x,
    which is real. A worker outside P_x passes a zero-volume tensor, and gets it back.

    A pooling has no parameters: call it with the input alone, or with `{}` and the input.

    **Arguments:**

    - `P_x`: the partition of x and y.
    - `kernel_size`: an integer, or one for each feature dimension.
    - `stride`: an integer, or one for each feature dimension. Default: the kernel size.
    - `dilation`: an integer, or one for each feature dimension: how far apart the entries of a window are.
    - `padding`: an integer, one for each feature dimension, a pair (low, high) for each, "same" (with a stride of 1) or
      "valid", of less than the extent of a window.

    **Raises:** `InvalidArgumentError`, on every worker, where arguments don't fit; when applied, `PlanError` where x
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 2])
    >>> layer = DistributedMaxPool2d(P, kernel_size=2)
    >>> layer.output_spec(dj.TensorSpec((5, 3, 9, 8), P)).block_shapes
    {0: (5, 3, 2, 2), 1: (5, 3, 2, 2), 2: (5, 3, 2, 2), 3: (5, 3, 2, 2)}

    Source: DistDL documentation, "convolution" (windows); Hewett and Grady (2020), pooling layers.
    """

    dims = 2


class DistributedMaxPool3d(DistributedMaxPool):
    """A max pooling over 3 feature dimensions of a split tensor: PyTorch's MaxPool3d, block for block.

        y[n, c, j] = max over t of x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_c x n_2 x n_1 x n_0 | P_x: P_n x P_c x P_2 x P_1 x P_0 |
    | y | n_b x n_c x m_2 x m_1 x m_0 | P_x |

    Along each feature dimension m = floor((n + low + high - dilation (kernel - 1) - 1) / stride) + 1. Batch, channels
    and features may all be split; along split features the halo moves, from any number of neighbours. Blocks of x may
    be uneven, empty, or smaller than the kernel; blocks of y are balanced along the features. y has the dtype of x,
    which is real. A worker outside P_x passes a zero-volume tensor, and gets it back.

    A pooling has no parameters: call it with the input alone, or with `{}` and the input.

    **Arguments:**

    - `P_x`: the partition of x and y.
    - `kernel_size`: an integer, or one for each feature dimension.
    - `stride`: an integer, or one for each feature dimension. Default: the kernel size.
    - `dilation`: an integer, or one for each feature dimension: how far apart the entries of a window are.
    - `padding`: an integer, one for each feature dimension, a pair (low, high) for each, "same" (with a stride of 1) or
      "valid", of less than the extent of a window.

    **Raises:** `InvalidArgumentError`, on every worker, where arguments don't fit; when applied, `PlanError` where x
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 2, 1])
    >>> layer = DistributedMaxPool3d(P, kernel_size=2)
    >>> layer.output_spec(dj.TensorSpec((5, 3, 9, 8, 4), P)).block_shapes
    {0: (5, 3, 2, 2, 2), 1: (5, 3, 2, 2, 2), 2: (5, 3, 2, 2, 2), 3: (5, 3, 2, 2, 2)}

    Source: DistDL documentation, "convolution" (windows); Hewett and Grady (2020), pooling layers.
    """

    dims = 3


class DistributedMaxPool4d(DistributedMaxPool):
    """A max pooling over 4 feature dimensions of a split tensor, as of space and time.

        y[n, c, j] = max over t of x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_c x n_3 x n_2 x n_1 x n_0 | P_x: P_n x P_c x P_3 x P_2 x P_1 x P_0 |
    | y | n_b x n_c x m_3 x m_2 x m_1 x m_0 | P_x |

    Along each feature dimension m = floor((n + low + high - dilation (kernel - 1) - 1) / stride) + 1. Batch, channels
    and features may all be split; along split features the halo moves, from any number of neighbours. Blocks of x may
    be uneven, empty, or smaller than the kernel; blocks of y are balanced along the features. y has the dtype of x,
    which is real. A worker outside P_x passes a zero-volume tensor, and gets it back.

    A pooling has no parameters: call it with the input alone, or with `{}` and the input.

    **Arguments:**

    - `P_x`: the partition of x and y.
    - `kernel_size`: an integer, or one for each feature dimension.
    - `stride`: an integer, or one for each feature dimension. Default: the kernel size.
    - `dilation`: an integer, or one for each feature dimension: how far apart the entries of a window are.
    - `padding`: an integer, one for each feature dimension, a pair (low, high) for each, "same" (with a stride of 1) or
      "valid", of less than the extent of a window.

    **Raises:** `InvalidArgumentError`, on every worker, where arguments don't fit; when applied, `PlanError` where x
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 1, 2, 1])
    >>> layer = DistributedMaxPool4d(P, kernel_size=2)
    >>> layer.output_spec(dj.TensorSpec((5, 3, 9, 8, 4, 6), P)).block_shapes
    {0: (5, 3, 2, 4, 1, 3), 1: (5, 3, 2, 4, 1, 3), 2: (5, 3, 2, 4, 1, 3), 3: (5, 3, 2, 4, 1, 3)}

    Source: DistDL documentation, "convolution" (windows); Hewett and Grady (2020), pooling layers.
    """

    dims = 4


class DistributedAvgPool1d(DistributedAvgPool):
    """An average pooling over 1 feature dimension of a split tensor: PyTorch's AvgPool1d, block for block.

        y[n, c, j] = mean over t of x[n, c, stride j + t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_c x n_0 | P_x: P_n x P_c x P_0 |
    | y | n_b x n_c x m_0 | P_x |

    Of a length n of x, y has m = floor((n + low + high - kernel) / stride) + 1. Batch, channels and features may all be
    split; along split features the halo moves, from any number of neighbours. Blocks of x may be uneven, empty, or
    smaller than the kernel; blocks of y are balanced along the features. y has the dtype of x; of integers it is a
    floating-point number. A worker outside P_x passes a zero-volume tensor, and gets it back.

    A pooling has no parameters: call it with the input alone, or with `{}` and the input.

    **Arguments:**

    - `P_x`: the partition of x and y.
    - `kernel_size`: an integer.
    - `stride`: an integer. Default: the kernel size.
    - `padding`: an integer, a pair (low, high) in a list, "same" (with a stride of 1) or "valid", of less than the
      kernel.
    - `count_include_pad`: whether zeros of the padding count in the mean, as in PyTorch; else it is that of the entries
      inside the tensor.

    **Raises:** on every worker, `InvalidArgumentError` where arguments don't fit, `InvalidTypeError` where a flag is
    not True or False; when applied, `PlanError` where x doesn't fit.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 4])
    >>> layer = DistributedAvgPool1d(P, kernel_size=2)
    >>> layer.output_spec(dj.TensorSpec((5, 3, 21), P)).block_shapes
    {0: (5, 3, 3), 1: (5, 3, 3), 2: (5, 3, 2), 3: (5, 3, 2)}

    Source: DistDL documentation, "convolution" (windows); Hewett and Grady (2020), pooling layers.
    """

    dims = 1


class DistributedAvgPool2d(DistributedAvgPool):
    """An average pooling over 2 feature dimensions of a split tensor: PyTorch's AvgPool2d, block for block.

        y[n, c, j] = mean over t of x[n, c, stride j + t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_c x n_1 x n_0 | P_x: P_n x P_c x P_1 x P_0 |
    | y | n_b x n_c x m_1 x m_0 | P_x |

    Along each feature dimension m = floor((n + low + high - kernel) / stride) + 1. Batch, channels and features may all
    be split; along split features the halo moves, from any number of neighbours. Blocks of x may be uneven, empty, or
    smaller than the kernel; blocks of y are balanced along the features. y has the dtype of x; of integers it is a
    floating-point number. A worker outside P_x passes a zero-volume tensor, and gets it back.

    A pooling has no parameters: call it with the input alone, or with `{}` and the input.

    **Arguments:**

    - `P_x`: the partition of x and y.
    - `kernel_size`: an integer, or one for each feature dimension.
    - `stride`: an integer, or one for each feature dimension. Default: the kernel size.
    - `padding`: an integer, one for each feature dimension, a pair (low, high) for each, "same" (with a stride of 1) or
      "valid", of less than the kernel.
    - `count_include_pad`: whether zeros of the padding count in the mean, as in PyTorch; else it is that of the entries
      inside the tensor.

    **Raises:** on every worker, `InvalidArgumentError` where arguments don't fit, `InvalidTypeError` where a flag is
    not True or False; when applied, `PlanError` where x doesn't fit.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 2])
    >>> layer = DistributedAvgPool2d(P, kernel_size=2)
    >>> layer.output_spec(dj.TensorSpec((5, 3, 9, 8), P)).block_shapes
    {0: (5, 3, 2, 2), 1: (5, 3, 2, 2), 2: (5, 3, 2, 2), 3: (5, 3, 2, 2)}

    Source: DistDL documentation, "convolution" (windows); Hewett and Grady (2020), pooling layers.
    """

    dims = 2


class DistributedAvgPool3d(DistributedAvgPool):
    """An average pooling over 3 feature dimensions of a split tensor: PyTorch's AvgPool3d, block for block.

        y[n, c, j] = mean over t of x[n, c, stride j + t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_c x n_2 x n_1 x n_0 | P_x: P_n x P_c x P_2 x P_1 x P_0 |
    | y | n_b x n_c x m_2 x m_1 x m_0 | P_x |

    Along each feature dimension m = floor((n + low + high - kernel) / stride) + 1. Batch, channels and features may all
    be split; along split features the halo moves, from any number of neighbours. Blocks of x may be uneven, empty, or
    smaller than the kernel; blocks of y are balanced along the features. y has the dtype of x; of integers it is a
    floating-point number. A worker outside P_x passes a zero-volume tensor, and gets it back.

    A pooling has no parameters: call it with the input alone, or with `{}` and the input.

    **Arguments:**

    - `P_x`: the partition of x and y.
    - `kernel_size`: an integer, or one for each feature dimension.
    - `stride`: an integer, or one for each feature dimension. Default: the kernel size.
    - `padding`: an integer, one for each feature dimension, a pair (low, high) for each, "same" (with a stride of 1) or
      "valid", of less than the kernel.
    - `count_include_pad`: whether zeros of the padding count in the mean, as in PyTorch; else it is that of the entries
      inside the tensor.

    **Raises:** on every worker, `InvalidArgumentError` where arguments don't fit, `InvalidTypeError` where a flag is
    not True or False; when applied, `PlanError` where x doesn't fit.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 2, 1])
    >>> layer = DistributedAvgPool3d(P, kernel_size=2)
    >>> layer.output_spec(dj.TensorSpec((5, 3, 9, 8, 4), P)).block_shapes
    {0: (5, 3, 2, 2, 2), 1: (5, 3, 2, 2, 2), 2: (5, 3, 2, 2, 2), 3: (5, 3, 2, 2, 2)}

    Source: DistDL documentation, "convolution" (windows); Hewett and Grady (2020), pooling layers.
    """

    dims = 3


class DistributedAvgPool4d(DistributedAvgPool):
    """An average pooling over 4 feature dimensions of a split tensor, as of space and time.

        y[n, c, j] = mean over t of x[n, c, stride j + t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_c x n_3 x n_2 x n_1 x n_0 | P_x: P_n x P_c x P_3 x P_2 x P_1 x P_0 |
    | y | n_b x n_c x m_3 x m_2 x m_1 x m_0 | P_x |

    Along each feature dimension m = floor((n + low + high - kernel) / stride) + 1. Batch, channels and features may all
    be split; along split features the halo moves, from any number of neighbours. Blocks of x may be uneven, empty, or
    smaller than the kernel; blocks of y are balanced along the features. y has the dtype of x; of integers it is a
    floating-point number. A worker outside P_x passes a zero-volume tensor, and gets it back.

    A pooling has no parameters: call it with the input alone, or with `{}` and the input.

    **Arguments:**

    - `P_x`: the partition of x and y.
    - `kernel_size`: an integer, or one for each feature dimension.
    - `stride`: an integer, or one for each feature dimension. Default: the kernel size.
    - `padding`: an integer, one for each feature dimension, a pair (low, high) for each, "same" (with a stride of 1) or
      "valid", of less than the kernel.
    - `count_include_pad`: whether zeros of the padding count in the mean, as in PyTorch; else it is that of the entries
      inside the tensor.

    **Raises:** on every worker, `InvalidArgumentError` where arguments don't fit, `InvalidTypeError` where a flag is
    not True or False; when applied, `PlanError` where x doesn't fit.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 1, 2, 1])
    >>> layer = DistributedAvgPool4d(P, kernel_size=2)
    >>> layer.output_spec(dj.TensorSpec((5, 3, 9, 8, 4, 6), P)).block_shapes
    {0: (5, 3, 2, 4, 1, 3), 1: (5, 3, 2, 4, 1, 3), 2: (5, 3, 2, 4, 1, 3), 3: (5, 3, 2, 4, 1, 3)}

    Source: DistDL documentation, "convolution" (windows); Hewett and Grady (2020), pooling layers.
    """

    dims = 4
