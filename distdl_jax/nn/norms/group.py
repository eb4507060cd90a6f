"""Normalisation of each sample by itself: over groups of channels, or channel by channel."""

from __future__ import annotations

from dataclasses import dataclass

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.nn.norms.normalization import ChannelNorm, check_norm
from distdl_jax.nn.norms.statistics import Entries, InGroups
from distdl_jax.partition import Partition
from distdl_jax.validation import checked_integer


@dataclass(frozen=True)
class DistributedGroupNorm(ChannelNorm):
    r"""Normalises each sample over groups of neighbouring channels and all features; everything may be split.

    y = (x - mean) / sqrt(var + eps) * weight + bias, with one mean and biased variance per sample and group, and a
    weight and a bias per channel. Groups may be split between workers.

    | tensor | global shape | partition |
    |---|---|---|
    | x, y | n_b x n_c x n_{D-1} x ... x n_0 | P_x: P_n x P_c x P_{D-1} x ... x P_0 |
    | weight, bias | n_c | P_c; copies along all other dimensions of P_x |

    Where channels or features are split, two numbers per sample and group go to the workers along them, in one
    movement, and back for the gradient. Gradients of weight and bias are summed over the copies. Blocks of x are
    balanced along the channels, and of any length along the rest. Half precisions are summed in float32.

    **Arguments:**

    - `P_x`: the partition of input and output, of 2 dimensions or more.
    - `num_groups`, `num_channels`: the number of groups, which divides that of the channels, n_c.
    - `eps`: what is added to the variance.
    - `affine`: whether there are weight and bias.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, where arguments don't fit.

    Source: Wu and He (2018), arXiv:1803.08494; PyTorch's GroupNorm.
    """

    P_x: Partition
    num_groups: int
    num_channels: int
    eps: float = 1e-5
    affine: bool = True

    def __post_init__(self) -> None:
        check_norm(self.P_x, self.eps, 2)
        checked_integer("num_groups", self.num_groups, 1)
        checked_integer("num_channels", self.num_channels, 1)
        if self.num_channels % self.num_groups:
            raise InvalidArgumentError(
                f"`num_channels` (={self.num_channels}) must be divisible by `num_groups` (={self.num_groups})."
            )

    @property
    def _channels(self) -> int:
        return self.num_channels

    @property
    def _axes(self) -> tuple[int, ...]:
        return tuple(range(1, self.P_x.dim))

    @property
    def _entries(self) -> Entries:
        return InGroups(self.num_groups, self.num_channels)


@dataclass(frozen=True)
class DistributedInstanceNorm(ChannelNorm):
    r"""Normalises each channel of each sample over its features, all of which may be split.

    `DistributedGroupNorm` with a channel in each group: where features are split, two numbers per sample and channel go
    to the workers along them. As in PyTorch there are no parameters by default. It keeps no running statistics.

    **Arguments:**

    - `P_x`: the partition of input and output, of 3 dimensions or more.
    - `num_features`: n_c, the number of channels.
    - `eps`: what is added to the variance.
    - `affine`: whether there are weight and bias, one per channel.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, where arguments don't fit.

    Source: Ulyanov, Vedaldi and Lempitsky (2016), arXiv:1607.08022; PyTorch's InstanceNorm1d, 2d and 3d.
    """

    P_x: Partition
    num_features: int
    eps: float = 1e-5
    affine: bool = False

    def __post_init__(self) -> None:
        check_norm(self.P_x, self.eps, 3)
        checked_integer("num_features", self.num_features, 1)

    @property
    def _channels(self) -> int:
        return self.num_features

    @property
    def _axes(self) -> tuple[int, ...]:
        return tuple(range(2, self.P_x.dim))
