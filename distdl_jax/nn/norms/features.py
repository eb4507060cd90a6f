"""Normalisations over the last dimensions: layer normalisation, and division by the root mean square."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.nn.norms.normalization import DistributedNorm, check_norm
from distdl_jax.partition import Partition
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.tensors import TensorSpec
from distdl_jax.validation import checked_integers


@dataclass(frozen=True, init=False)
class _OverFeatures(DistributedNorm):
    """The base of both: the last dimensions are averaged over, and parameters are split like them."""

    P_x: Partition
    normalized_shape: tuple[int, ...]
    eps: float
    elementwise_affine: bool

    def _set(self, P_x: Partition, normalized_shape: int | Sequence[int], eps: float, affine: bool) -> None:
        shape = checked_integers("normalized_shape", normalized_shape, or_one=True)
        if not shape or min(shape) < 1:
            raise InvalidArgumentError(
                f"`normalized_shape` (={normalized_shape!r}) must be the lengths of the last dimensions, 1 or more."
            )
        check_norm(P_x, eps, 1)
        if P_x.dim < len(shape):
            raise InvalidArgumentError(
                f"`normalized_shape` (={shape}) must not have more dimensions than `P_x` ({shape_text(P_x.shape)})."
            )
        # The fields, in the form in which equal ones are equal.
        vars(self).update(P_x=P_x, normalized_shape=shape, eps=eps, elementwise_affine=affine)

    @property
    def _axes(self) -> tuple[int, ...]:
        return tuple(range(self.P_x.dim - len(self.normalized_shape), self.P_x.dim))

    @property
    def _spec(self) -> TensorSpec:
        return TensorSpec(self.normalized_shape, self.P_x, tuple(range(self._axes[0])))

    @property
    def _lengths(self) -> dict[int, int]:
        return dict(zip(self._axes, self.normalized_shape, strict=True))

    @property
    def _param_names(self) -> tuple[str, ...]:
        return ("weight",) if self.elementwise_affine else ()

    @property
    def _param_shape(self) -> None:
        return None


@dataclass(frozen=True, init=False)
class DistributedLayerNorm(_OverFeatures):
    r"""Normalises each sample over its last dimensions, which may be split like all others.

    y = (x - mean) / sqrt(var + eps) * weight + bias, with mean and biased variance over the dimensions of
    `normalized_shape`, n_{k-1} x ... x n_0.

    | tensor | global shape | partition |
    |---|---|---|
    | x, y | ... x n_{k-1} x ... x n_0 | P_x, of as many dimensions |
    | weight, bias | n_{k-1} x ... x n_0 | the last dimensions of P_x; copies along the others |

    Where the normalised dimensions are split, two numbers per sample go to the workers along them, in one movement, and
    back for the gradient; else nothing moves. Gradients of weight and bias are summed over the copies. Blocks of x are
    balanced along the normalised dimensions, and of any length along the rest. Half precisions are summed in float32.

    **Arguments:**

    - `P_x`: the partition of input and output.
    - `normalized_shape`: the lengths of the last dimensions; an integer for one.
    - `eps`: what is added to the variance.
    - `elementwise_affine`: whether there are parameters; `bias`: whether there is a bias among them.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, where arguments don't fit.

    >>> import jax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> layer = DistributedLayerNorm(P, 3)
    >>> layer(layer.init(), jax.numpy.ones((5, 3))).shape
    (5, 3)

    Source: Ba, Kiros and Hinton (2016), arXiv:1607.06450; PyTorch's LayerNorm.
    """

    bias: bool

    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:
        self._set(P_x, normalized_shape, eps, elementwise_affine)
        vars(self).update(bias=bias)

    @property
    def _param_names(self) -> tuple[str, ...]:
        return (*super()._param_names, *(("bias",) if self.bias and self.elementwise_affine else ()))


@dataclass(frozen=True, init=False)
class DistributedRMSNorm(_OverFeatures):
    r"""Divides each sample by its root mean square over the last dimensions, which may be split like all others.

    y = x / sqrt(mean(x^2) + eps) * weight. Partitions and blocks are as in `DistributedLayerNorm`; where the normalised
    dimensions are split, one number per sample is summed over the workers along them, forward and backward.

    **Arguments:**

    - `P_x`, `normalized_shape`, `elementwise_affine`: as in `DistributedLayerNorm`. There is no bias.
    - `eps`: what is added to the mean square. Default: as in flax, 1e-6. (PyTorch's is that of x's dtype.)

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, where arguments don't fit.

    Source: Zhang and Sennrich (2019), arXiv:1910.07467; PyTorch's RMSNorm.
    """

    centred: ClassVar[bool] = False

    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        elementwise_affine: bool = True,
    ) -> None:
        self._set(P_x, normalized_shape, eps, elementwise_affine)
