"""Normalisations of single samples: over some dimensions, over groups of channels, or channel by channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, cast

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.statistics import Entries, InGroups
from distdl_jax.nn.norm.normalization import ChannelNorm, DistributedNorm, check_norm
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.tensors import TensorSpec
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.validation import checked_axes, checked_integer, checked_integers


@dataclass(frozen=True)
class _OverFeatures(DistributedNorm):
    """The base of both: averages over some dimensions, by default the last ones; parameters are split like them."""

    P_x: Partition
    normalized_shape: int | Sequence[int]
    eps: float = 1e-5
    elementwise_affine: bool = True
    dim: int | Sequence[int] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_norm(self.P_x, self.eps, 1)
        shape = self._shape
        if self.P_x.dim < len(shape):
            raise InvalidArgumentError(
                f"`normalized_shape` (={shape}) must not have more dimensions than `P_x` "
                f"({shape_text(self.P_x.shape)})."
            )
        last = tuple(range(self.P_x.dim - len(shape), self.P_x.dim))
        dim = last if self.dim is None else checked_axes("dim", self.dim, self.P_x.shape)
        if len(dim) != len(shape):
            raise InvalidArgumentError(
                f"`dim` (={self.dim!r}) must name as many dimensions as `normalized_shape` (={shape}) has lengths."
            )
        self._store(normalized_shape=shape, dim=dim)

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        shape = checked_integers("normalized_shape", self.normalized_shape, or_one=True)
        if not shape or min(shape) < 1:
            raise InvalidArgumentError(
                f"`normalized_shape` (={self.normalized_shape!r}) must be the lengths of the normalised dimensions, "
                "1 or more."
            )
        return shape

    @property
    def _axes(self) -> tuple[int, ...]:
        return cast(tuple[int, ...], self.dim)

    @property
    def _spec(self) -> TensorSpec:
        return TensorSpec(self._shape, self.P_x, [d for d in range(self.P_x.dim) if d not in self._axes])

    @property
    def _lengths(self) -> dict[int, int]:
        return dict(zip(self._axes, self._shape, strict=True))

    @property
    def _param_names(self) -> tuple[str, ...]:
        return ("weight",) if self.elementwise_affine else ()

    @property
    def _param_dims(self) -> tuple[int, ...]:
        return self._axes


@dataclass(frozen=True)
class DistributedLayerNorm(_OverFeatures):
    r"""Normalise each sample over its last dimensions, or over the dimensions `dim`; all of x may be split.

    y = (x - mean) / sqrt(var + eps) * weight + bias, with mean and biased variance over the dimensions of
    `normalized_shape`, n_{k-1} x ... x n_0.

    | tensor | global shape | partition |
    |---|---|---|
    | x, y | ... x n_{k-1} x ... x n_0 | P_x, of as many dimensions |
    | weight, bias | n_{k-1} x ... x n_0 | the last dimensions of P_x, or `dim`; copies along the others |

    With `dim=1` it normalises over the channels of N x C x D..., with a mean and a variance for each entry of the other
    dimensions, as in ConvNeXt.

    If the normalised dimensions are split, the workers along them sum one number per sample, then two, and two for the
    gradient; otherwise there is no communication. Gradients of weight and bias are summed over the copies. Blocks of x
    are balanced along the normalised dimensions, and have any length along the rest. Half precisions are summed in
    float32.

    **Arguments:**

    - `P_x`: the partition of input and output.
    - `normalized_shape`: the lengths of the normalised dimensions, in x's order; an integer for one.
    - `eps`: added to the variance.
    - `elementwise_affine`: whether there are parameters; `bias`: whether they include a bias.
    - `dim`: the normalised dimensions, one or several; negative ones count from the end. Default: the last ones.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> layer = DistributedLayerNorm(P, 3)
    >>> layer(layer.init(), jax.numpy.ones((5, 3))).shape
    (5, 3)

    Source: Ba, Kiros and Hinton (2016), arXiv:1607.06450; PyTorch's LayerNorm.
    """

    bias: bool = True

    @property
    def _param_names(self) -> tuple[str, ...]:
        return (*super()._param_names, *(("bias",) if self.bias and self.elementwise_affine else ()))


@dataclass(frozen=True)
class DistributedRMSNorm(_OverFeatures):
    """Divide each sample by its root mean square over its last dimensions, or over the dimensions `dim`.

    y = x / sqrt(mean(x^2) + eps) * weight. Partitions and blocks are as in `DistributedLayerNorm`; if the normalised
    dimensions are split, one number per sample is summed over the workers along them, forward and backward.

    **Arguments:**

    - `P_x`, `normalized_shape`, `elementwise_affine`, `dim`: as in `DistributedLayerNorm`. There is no bias.
    - `eps`: added to the mean square. Default: as in flax, 1e-6. (PyTorch's depends on x's dtype.)

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([1, 2, 1])
    ...     x = dj.TensorSpec((1, 4, 2), P).block(jnp.arange(8.0).reshape(1, 4, 2))
    ...     layer = dj.nn.DistributedRMSNorm(P, 4, dim=1)
    ...     return [round(float(y), 2) for y in layer(layer.init(), x).ravel()]
    >>> dj.simulate(2, program)
    [[0.0, 0.22, 0.53, 0.65], [1.07, 1.09, 1.6, 1.53]]

    Source: Zhang and Sennrich (2019), arXiv:1910.07467; PyTorch's RMSNorm.
    """

    _centred: ClassVar[bool] = False

    eps: float = 1e-6


@dataclass(frozen=True)
class DistributedGroupNorm(ChannelNorm):
    """Normalise each sample over groups of adjacent channels and all features; all dimensions may be split.

    y = (x - mean) / sqrt(var + eps) * weight + bias, with one mean and biased variance per sample and group, and a
    weight and a bias per channel. Groups may be split between workers.

    | tensor | global shape | partition |
    |---|---|---|
    | x, y | n_b x n_c x n_{D-1} x ... x n_0 | P_x: P_n x P_c x P_{D-1} x ... x P_0 |
    | weight, bias | n_c | P_c; copies along all other dimensions of P_x |

    If channels or features are split, the workers along them sum one number per sample and group, then two, and two
    for the gradient. Gradients of weight and bias are summed over the copies. Blocks of x are balanced along the
    channels, and have any length along the rest. Half precisions are summed in float32.

    **Arguments:**

    - `P_x`: the partition of input and output, of 2 dimensions or more.
    - `num_groups`, `num_channels`: the number of groups, which divides n_c, the number of channels.
    - `eps`: added to the variance.
    - `affine`: whether there are weight and bias.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([1, 2, 1])
    ...     x = dj.TensorSpec((1, 4, 2), P).block(jnp.arange(8.0).reshape(1, 4, 2))
    ...     layer = dj.nn.DistributedGroupNorm(P, num_groups=1, num_channels=4)
    ...     return [round(float(y), 2) for y in layer(layer.init(), x).ravel()]
    >>> dj.simulate(2, program)
    [[-1.53, -1.09, -0.65, -0.22], [0.22, 0.65, 1.09, 1.53]]

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
    """Normalise each channel of each sample over its features; all dimensions may be split.

    `DistributedGroupNorm` with one channel in each group: if features are split, the workers along them sum one number
    per sample and channel, then two. As in PyTorch there are no parameters by default. It keeps no running statistics.

    **Arguments:**

    - `P_x`: the partition of input and output, of 3 dimensions or more.
    - `num_features`: n_c, the number of channels.
    - `eps`: added to the variance.
    - `affine`: whether there are weight and bias, one per channel.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if arguments are invalid.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> def program():
    ...     P = dj.Partition().grid([1, 2, 1])
    ...     x = dj.TensorSpec((1, 4, 2), P).block(jnp.arange(8.0).reshape(1, 4, 2))
    ...     layer = dj.nn.DistributedInstanceNorm(P, num_features=4)
    ...     return [round(float(y), 2) for y in layer(layer.init(), x).ravel()]
    >>> dj.simulate(2, program)
    [[-1.0, 1.0, -1.0, 1.0], [-1.0, 1.0, -1.0, 1.0]]

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
