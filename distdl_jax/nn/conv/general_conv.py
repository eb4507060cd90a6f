"""Convolutions that take the partitions of the general algorithm only."""

from __future__ import annotations

from distdl_jax.nn.conv.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d, DistributedConv4d


class DistributedGeneralConv1d(DistributedConv1d):
    """A 1-D convolution on partitions that split both channels and features: PyTorch's Conv1d, block for block.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_0 | P_x: P_n x P_ci x P_0 |
    | y | n_b x n_co x m_0 | P_y: P_n x P_co x P_0 |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_0 | P_W's slice P_co x P_ci x 1 |
    | b (`params["bias"]`) | n_co | P_W's slice P_co x 1 x 1 |

    It refuses partitions that split no features, and a P_x of whole channels where P_W is not given. Everything else
    is as in `DistributedConv1d`. Halos are exchanged along the features, x is broadcast along P_co, and the products
    are summed along P_ci. On one partition, x is gathered or sums are scattered along the channels, as `split` says.

    **Arguments:** all as in `DistributedConv1d`: `P_x`, `P_y`, `P_W`, in the shapes above, `in_channels`,
    `out_channels`, `kernel_size`, `stride`, `padding`, `dilation`, `groups`, `bias`, `padding_mode`, `sharded`,
    `split`.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit, or the partitions ask for another algorithm; when applied, `PlanError` where x or a parameter
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 2, 2])
    >>> layer = DistributedGeneralConv1d(P, in_channels=4, out_channels=8, kernel_size=3, padding=1)
    >>> layer.param_specs()["weight"].block_shapes
    {0: (4, 4, 3), 2: (4, 4, 3)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    required_kind = "general"


class DistributedGeneralConv2d(DistributedConv2d):
    """A 2-D convolution on partitions that split both channels and features: PyTorch's Conv2d, block for block.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_1 x n_0 | P_x: P_n x P_ci x P_1 x P_0 |
    | y | n_b x n_co x m_1 x m_0 | P_y: P_n x P_co x P_1 x P_0 |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_1 x k_0 | P_W's slice P_co x P_ci x 1 x 1 |
    | b (`params["bias"]`) | n_co | P_W's slice P_co x 1 x 1 x 1 |

    It refuses partitions that split no features, and a P_x of whole channels where P_W is not given. Everything else
    is as in `DistributedConv2d`. Halos are exchanged along the features, x is broadcast along P_co, and the products
    are summed along P_ci. On one partition, x is gathered or sums are scattered along the channels, as `split` says.

    **Arguments:** all as in `DistributedConv2d`: `P_x`, `P_y`, `P_W`, in the shapes above, `in_channels`,
    `out_channels`, `kernel_size`, `stride`, `padding`, `dilation`, `groups`, `bias`, `padding_mode`, `sharded`,
    `split`.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit, or the partitions ask for another algorithm; when applied, `PlanError` where x or a parameter
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 2, 2, 1])
    >>> layer = DistributedGeneralConv2d(P, in_channels=4, out_channels=8, kernel_size=3, padding=1)
    >>> layer.param_specs()["weight"].block_shapes
    {0: (4, 4, 3, 3), 2: (4, 4, 3, 3)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    required_kind = "general"


class DistributedGeneralConv3d(DistributedConv3d):
    """A 3-D convolution on partitions that split both channels and features: PyTorch's Conv3d, block for block.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_2 x n_1 x n_0 | P_x: P_n x P_ci x P_2 x P_1 x P_0 |
    | y | n_b x n_co x m_2 x m_1 x m_0 | P_y: P_n x P_co x P_2 x P_1 x P_0 |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_2 x k_1 x k_0 | P_W's slice P_co x P_ci x 1 x 1 x 1 |
    | b (`params["bias"]`) | n_co | P_W's slice P_co x 1 x 1 x 1 x 1 |

    It refuses partitions that split no features, and a P_x of whole channels where P_W is not given. Everything else
    is as in `DistributedConv3d`. Halos are exchanged along the features, x is broadcast along P_co, and the products
    are summed along P_ci. On one partition, x is gathered or sums are scattered along the channels, as `split` says.

    **Arguments:** all as in `DistributedConv3d`: `P_x`, `P_y`, `P_W`, in the shapes above, `in_channels`,
    `out_channels`, `kernel_size`, `stride`, `padding`, `dilation`, `groups`, `bias`, `padding_mode`, `sharded`,
    `split`.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit, or the partitions ask for another algorithm; when applied, `PlanError` where x or a parameter
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 2, 2, 1, 1])
    >>> layer = DistributedGeneralConv3d(P, in_channels=4, out_channels=8, kernel_size=3, padding=1)
    >>> layer.param_specs()["weight"].block_shapes
    {0: (4, 4, 3, 3, 3), 2: (4, 4, 3, 3, 3)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    required_kind = "general"


class DistributedGeneralConv4d(DistributedConv4d):
    """A 4-D convolution on partitions that split both channels and features.

        y[n, o, j] = b[o] + sum over c and t of w[o, c, t] x[n, c, stride j + dilation t - low]

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_ci x n_3 x n_2 x n_1 x n_0 | P_x: P_n x P_ci x P_3 x P_2 x P_1 x P_0 |
    | y | n_b x n_co x m_3 x m_2 x m_1 x m_0 | P_y: P_n x P_co x P_3 x P_2 x P_1 x P_0 |
    | w (`params["weight"]`) | n_co x n_ci/groups x k_3 x k_2 x k_1 x k_0 | P_W's slice P_co x P_ci x 1 x 1 x 1 x 1 |
    | b (`params["bias"]`) | n_co | P_W's slice P_co x 1 x 1 x 1 x 1 x 1 |

    It refuses partitions that split no features, and a P_x of whole channels where P_W is not given. Everything else
    is as in `DistributedConv4d`. Halos are exchanged along the features, x is broadcast along P_co, and the products
    are summed along P_ci. On one partition, x is gathered or sums are scattered along the channels, as `split` says.

    **Arguments:** all as in `DistributedConv4d`: `P_x`, `P_y`, `P_W`, in the shapes above, `in_channels`,
    `out_channels`, `kernel_size`, `stride`, `padding`, `dilation`, `groups`, `bias`, `padding_mode`, `sharded`,
    `split`.

    **Raises:** `InvalidTypeError` where a flag is not True or False; `InvalidArgumentError`, on every worker, where
    arguments don't fit, or the partitions ask for another algorithm; when applied, `PlanError` where x or a parameter
    doesn't.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 2, 2, 1, 1, 1])
    >>> layer = DistributedGeneralConv4d(P, in_channels=4, out_channels=8, kernel_size=3, padding=1)
    >>> layer.param_specs()["weight"].block_shapes
    {0: (4, 4, 3, 3, 3, 3), 2: (4, 4, 3, 3, 3, 3)}

    Source: DistDL documentation, "convolution"; Hewett and Grady (2020).
    """

    required_kind = "general"
