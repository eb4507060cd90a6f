"""Convolutions that take the partitions of the feature algorithm only."""

from __future__ import annotations

from distdl_jax.nn.conv.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d, DistributedConv4d


class DistributedFeatureConv1d(DistributedConv1d):
    """A 1-D convolution on a partition that splits the features, not the channels: PyTorch's Conv1d, block for block.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_0 | P_x: P_n x 1 x P_0 |
    | y | n_b x n_co x m_0 | P_x |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_0 | the first worker of P_x |
    | b (`params["bias"]`) | n_co | the first worker of P_x |

    It refuses partitions that split channels; everything else is as in `DistributedConv1d`. Halos are exchanged along
    the features, and w and b, on the first worker, are broadcast over P_x. Backward halos are added, and the
    gradients of w and b are summed.

    **Arguments:** all as in `DistributedConv1d`: `P_x`, `P_y`, `P_W`, in the shapes above, `in_channels`,
    `out_channels`, `kernel_size`, `stride`, `padding`, `dilation`, `groups`, `bias`, `padding_mode`, `sharded`,
    `split`.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit, or the partitions ask for another algorithm; when applied, `PlanError` where x or a parameter
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 4])
    >>> layer = DistributedFeatureConv1d(P, in_channels=4, out_channels=8, kernel_size=3, padding=1)
    >>> layer.param_specs()["weight"].block_shapes
    {0: (8, 4, 3)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    required_kind = "feature"


class DistributedFeatureConv2d(DistributedConv2d):
    """A 2-D convolution on a partition that splits the features, not the channels: PyTorch's Conv2d, block for block.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_1 x n_0 | P_x: P_n x 1 x P_1 x P_0 |
    | y | n_b x n_co x m_1 x m_0 | P_x |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_1 x k_0 | the first worker of P_x |
    | b (`params["bias"]`) | n_co | the first worker of P_x |

    It refuses partitions that split channels; everything else is as in `DistributedConv2d`. Halos are exchanged along
    the features, and w and b, on the first worker, are broadcast over P_x. Backward halos are added, and the
    gradients of w and b are summed.

    **Arguments:** all as in `DistributedConv2d`: `P_x`, `P_y`, `P_W`, in the shapes above, `in_channels`,
    `out_channels`, `kernel_size`, `stride`, `padding`, `dilation`, `groups`, `bias`, `padding_mode`, `sharded`,
    `split`.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit, or the partitions ask for another algorithm; when applied, `PlanError` where x or a parameter
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 2])
    >>> layer = DistributedFeatureConv2d(P, in_channels=4, out_channels=8, kernel_size=3, padding=1)
    >>> layer.param_specs()["weight"].block_shapes
    {0: (8, 4, 3, 3)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    required_kind = "feature"


class DistributedFeatureConv3d(DistributedConv3d):
    """A 3-D convolution on a partition that splits the features, not the channels: PyTorch's Conv3d, block for block.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_2 x n_1 x n_0 | P_x: P_n x 1 x P_2 x P_1 x P_0 |
    | y | n_b x n_co x m_2 x m_1 x m_0 | P_x |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_2 x k_1 x k_0 | the first worker of P_x |
    | b (`params["bias"]`) | n_co | the first worker of P_x |

    It refuses partitions that split channels; everything else is as in `DistributedConv3d`. Halos are exchanged along
    the features, and w and b, on the first worker, are broadcast over P_x. Backward halos are added, and the
    gradients of w and b are summed.

    **Arguments:** all as in `DistributedConv3d`: `P_x`, `P_y`, `P_W`, in the shapes above, `in_channels`,
    `out_channels`, `kernel_size`, `stride`, `padding`, `dilation`, `groups`, `bias`, `padding_mode`, `sharded`,
    `split`.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit, or the partitions ask for another algorithm; when applied, `PlanError` where x or a parameter
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 2, 1])
    >>> layer = DistributedFeatureConv3d(P, in_channels=4, out_channels=8, kernel_size=3, padding=1)
    >>> layer.param_specs()["weight"].block_shapes
    {0: (8, 4, 3, 3, 3)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    required_kind = "feature"


class DistributedFeatureConv4d(DistributedConv4d):
    """A 4-D convolution on a partition that splits the features, not the channels.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_3 x n_2 x n_1 x n_0 | P_x: P_n x 1 x P_3 x P_2 x P_1 x P_0 |
    | y | n_b x n_co x m_3 x m_2 x m_1 x m_0 | P_x |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_3 x k_2 x k_1 x k_0 | the first worker of P_x |
    | b (`params["bias"]`) | n_co | the first worker of P_x |

    It refuses partitions that split channels; everything else is as in `DistributedConv4d`. Halos are exchanged along
    the features, and w and b, on the first worker, are broadcast over P_x. Backward halos are added, and the
    gradients of w and b are summed.

    **Arguments:** all as in `DistributedConv4d`: `P_x`, `P_y`, `P_W`, in the shapes above, `in_channels`,
    `out_channels`, `kernel_size`, `stride`, `padding`, `dilation`, `groups`, `bias`, `padding_mode`, `sharded`,
    `split`.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit, or the partitions ask for another algorithm; when applied, `PlanError` where x or a parameter
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 1, 2, 1])
    >>> layer = DistributedFeatureConv4d(P, in_channels=4, out_channels=8, kernel_size=3, padding=1)
    >>> layer.param_specs()["weight"].block_shapes
    {0: (8, 4, 3, 3, 3, 3)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    required_kind = "feature"
