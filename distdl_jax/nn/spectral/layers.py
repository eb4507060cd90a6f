"""Spectral convolutions over 1 to 4 feature dimensions."""

from __future__ import annotations

from distdl_jax.nn.spectral.spectral_conv import DistributedSpectralConv


class DistributedSpectralConv1d(DistributedSpectralConv):
    """A spectral convolution over 1 feature dimension: a product at each low frequency.

        y = irfft(W rfft(x)), with W a complex n_in x n_out matrix at each frequency that is kept, 0 at the others

    It is the layer of Fourier neural operators, neuralop's `SpectralConv`. Batch, channels and features may all be
    split.

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_in x n_0 | P_x: P_n x P_c x P_0 |
    | y | n_b x n_out x n_0 | P_x, the same blocks along batch and features |
    | W (`params["weight"]`) | n_in x n_out x m_0 x 2 | P_W: 1 x 1 x Q_0 x 1 |

    Along the frequencies of W lie 0 to m - 1, since those of real data are halved. They are in balanced blocks on P_W,
    which may be empty. The last dimension has their real and imaginary parts, so that an optimiser need not know of
    complex numbers.

    x holds real floating-point numbers; y has the dtype to which those of x and W promote. Outside P_x a worker passes
    a zero-volume tensor, and gets one.

    **Arguments:**

    - `P_x`: the partition of x and y.
    - `in_channels`, `out_channels`: n_in and n_out.
    - `modes`: m, an integer: how many frequencies are kept, at most half of the length and one more.
    - `P_W`: the partition of the frequencies, 1 x 1 x Q_0, on any workers. Default: the workers of P_x, split as evenly
      as can be, with the fewest movements.

    **Raises:** `InvalidArgumentError`, on every worker, where arguments don't fit; when applied, `PlanError` where x or
    the weight doesn't, or x has not as many frequencies.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 4])
    >>> layer = DistributedSpectralConv1d(P, in_channels=2, out_channels=3, modes=4)
    >>> layer.param_specs()["weight"].block_shapes
    {0: (2, 3, 1, 2), 1: (2, 3, 1, 2), 2: (2, 3, 1, 2), 3: (2, 3, 1, 2)}

    Source: Li et al. (2021), arXiv:2010.08895; Grady et al. (2023), arXiv:2204.01205, on many workers.
    """

    dims = 1


class DistributedSpectralConv2d(DistributedSpectralConv):
    """A spectral convolution over 2 feature dimensions: a product at each low frequency.

        y = irfftn(W rfftn(x)), with W a complex n_in x n_out matrix at each frequency that is kept, 0 at the others

    It is the layer of Fourier neural operators, neuralop's `SpectralConv`. Batch, channels and features may all be
    split.

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_in x n_1 x n_0 | P_x: P_n x P_c x P_1 x P_0 |
    | y | n_b x n_out x n_1 x n_0 | P_x, the same blocks along batch and features |
    | W (`params["weight"]`) | n_in x n_out x 2 m_1 x m_0 x 2 | P_W: 1 x 1 x Q_1 x Q_0 x 1 |

    Along a feature dimension of W lie the frequencies 0, 1, ..., m - 1, -m, ..., -1; along the last one, where those of
    real data are halved, 0 to m - 1. They are in balanced blocks on P_W, which may be empty. The last dimension has
    their real and imaginary parts, so that an optimiser need not know of complex numbers.

    x holds real floating-point numbers; y has the dtype to which those of x and W promote. Outside P_x a worker passes
    a zero-volume tensor, and gets one.

    **Arguments:**

    - `P_x`: the partition of x and y.
    - `in_channels`, `out_channels`: n_in and n_out.
    - `modes`: m, an integer, or m_1 to m_0, one for each feature dimension: how many frequencies are kept, at most half
      of a length, and one more along the last.
    - `P_W`: the partition of the frequencies, 1 x 1 x Q_1 x Q_0, on any workers. Default: the workers of P_x, split as
      evenly as can be, with the fewest movements.

    **Raises:** `InvalidArgumentError`, on every worker, where arguments don't fit; when applied, `PlanError` where x or
    the weight doesn't, or x has not as many frequencies.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 2])
    >>> layer = DistributedSpectralConv2d(P, in_channels=2, out_channels=3, modes=(4, 3))
    >>> layer.param_specs()["weight"].block_shapes
    {0: (2, 3, 2, 3, 2), 1: (2, 3, 2, 3, 2), 2: (2, 3, 2, 3, 2), 3: (2, 3, 2, 3, 2)}

    Source: Li et al. (2021), arXiv:2010.08895; Grady et al. (2023), arXiv:2204.01205, on many workers.
    """

    dims = 2


class DistributedSpectralConv3d(DistributedSpectralConv):
    """A spectral convolution over 3 feature dimensions: a product at each low frequency.

        y = irfftn(W rfftn(x)), with W a complex n_in x n_out matrix at each frequency that is kept, 0 at the others

    It is the layer of Fourier neural operators, neuralop's `SpectralConv`. Batch, channels and features may all be
    split.

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_in x n_2 x n_1 x n_0 | P_x: P_n x P_c x P_2 x P_1 x P_0 |
    | y | n_b x n_out x n_2 x n_1 x n_0 | P_x, the same blocks along batch and features |
    | W (`params["weight"]`) | n_in x n_out x 2 m_2 x 2 m_1 x m_0 x 2 | P_W: 1 x 1 x Q_2 x Q_1 x Q_0 x 1 |

    Along a feature dimension of W lie the frequencies 0, 1, ..., m - 1, -m, ..., -1; along the last one, where those of
    real data are halved, 0 to m - 1. They are in balanced blocks on P_W, which may be empty. The last dimension has
    their real and imaginary parts, so that an optimiser need not know of complex numbers.

    x holds real floating-point numbers; y has the dtype to which those of x and W promote. Outside P_x a worker passes
    a zero-volume tensor, and gets one.

    **Arguments:**

    - `P_x`: the partition of x and y.
    - `in_channels`, `out_channels`: n_in and n_out.
    - `modes`: m, an integer, or m_2 to m_0, one for each feature dimension: how many frequencies are kept, at most half
      of a length, and one more along the last.
    - `P_W`: the partition of the frequencies, 1 x 1 x Q_2 x Q_1 x Q_0, on any workers. Default: the workers of P_x,
      split as evenly as can be, with the fewest movements.

    **Raises:** `InvalidArgumentError`, on every worker, where arguments don't fit; when applied, `PlanError` where x or
    the weight doesn't, or x has not as many frequencies.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 2, 1])
    >>> layer = DistributedSpectralConv3d(P, in_channels=2, out_channels=3, modes=(4, 3, 2))
    >>> layer.param_specs()["weight"].block_shapes
    {0: (2, 3, 8, 3, 1, 2), 1: (2, 3, 8, 3, 1, 2), 2: (2, 3, 8, 3, 1, 2), 3: (2, 3, 8, 3, 1, 2)}

    Source: Li et al. (2021), arXiv:2010.08895; Grady et al. (2023), arXiv:2204.01205, on many workers.
    """

    dims = 3


class DistributedSpectralConv4d(DistributedSpectralConv):
    """A spectral convolution over 4 feature dimensions (space and time): a product at each low frequency.

        y = irfftn(W rfftn(x)), with W a complex n_in x n_out matrix at each frequency that is kept, 0 at the others

    It is the layer of Fourier neural operators, neuralop's `SpectralConv`. Batch, channels and features may all be
    split.

    | tensor | global shape | partition |
    |---|---|---|
    | x | n_b x n_in x n_3 x n_2 x n_1 x n_0 | P_x: P_n x P_c x P_3 x P_2 x P_1 x P_0 |
    | y | n_b x n_out x n_3 x n_2 x n_1 x n_0 | P_x, the same blocks along batch and features |
    | W (`params["weight"]`) | n_in x n_out x 2 m_3 x 2 m_2 x 2 m_1 x m_0 x 2 | P_W: 1 x 1 x Q_3 x Q_2 x Q_1 x Q_0 x 1 |

    Along a feature dimension of W lie the frequencies 0, 1, ..., m - 1, -m, ..., -1; along the last one, where those of
    real data are halved, 0 to m - 1. They are in balanced blocks on P_W, which may be empty. The last dimension has
    their real and imaginary parts, so that an optimiser need not know of complex numbers.

    x holds real floating-point numbers; y has the dtype to which those of x and W promote. Outside P_x a worker passes
    a zero-volume tensor, and gets one.

    **Arguments:**

    - `P_x`: the partition of x and y.
    - `in_channels`, `out_channels`: n_in and n_out.
    - `modes`: m, an integer, or m_3 to m_0, one for each feature dimension: how many frequencies are kept, at most half
      of a length, and one more along the last.
    - `P_W`: the partition of the frequencies, 1 x 1 x Q_3 x Q_2 x Q_1 x Q_0, on any workers. Default: the workers of
      P_x, split as evenly as can be, with the fewest movements.

    **Raises:** `InvalidArgumentError`, on every worker, where arguments don't fit; when applied, `PlanError` where x or
    the weight doesn't, or x has not as many frequencies.

    >>> import distdl_jax as dj
    >>> P = dj.planning_world(4).grid([1, 1, 2, 1, 2, 1])
    >>> layer = DistributedSpectralConv4d(P, in_channels=2, out_channels=3, modes=(4, 3, 2, 2))
    >>> layer.param_specs()["weight"].block_shapes
    {0: (2, 3, 8, 3, 4, 1, 2), 1: (2, 3, 8, 3, 4, 1, 2), 2: (2, 3, 8, 3, 4, 1, 2), 3: (2, 3, 8, 3, 4, 1, 2)}

    Source: Li et al. (2021), arXiv:2010.08895; Grady et al. (2023), arXiv:2204.01205, on many workers.
    """

    dims = 4
