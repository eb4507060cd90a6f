"""Losses that are sums over elements: no data moves, in either direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.arguments import checked_weights, is_real
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.losses.loss import DistributedLoss, Pair

LOWEST_LOG = -100.0
"""Where PyTorch cuts off the logarithm of a probability."""

BELOW_ALL_LOGS = -1000.0
"""Below the logarithm of every positive number."""


@dataclass(frozen=True)
class DistributedMSELoss(DistributedLoss):
    """The squared error (x - t)^2: `DistributedLoss`, PyTorch's MSELoss.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> float(DistributedMSELoss(P)(jnp.ones((2, 3)), jnp.zeros((2, 3))))
    1.0
    """

    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        return jnp.square(prediction - target)


@dataclass(frozen=True)
class DistributedL1Loss(DistributedLoss):
    """The absolute error |x - t|: `DistributedLoss`, PyTorch's L1Loss."""

    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        return jnp.abs(prediction - target)


@dataclass(frozen=True)
class DistributedHuberLoss(DistributedLoss):
    """Squared near 0 and absolute beyond `delta`: `DistributedLoss`, PyTorch's HuberLoss.

    (x - t)^2 / 2 where |x - t| is at most delta, else delta (|x - t| - delta / 2), with a slope of delta however large
    |x - t| is.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_real(self.delta) or not self.delta > 0:
            raise InvalidArgumentError(f"`delta` (={self.delta!r}) must be a number above 0.")

    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        error = prediction - target
        size = jnp.abs(error)
        delta = min(self.delta, float(jnp.finfo(error.dtype).max))
        far = size > self.delta  # a NaN is not: the derivative of its square is NaN, that of its absolute value is not
        # What is not chosen has a derivative of 0, but 0 times infinity is no number: far ones are not squared.
        squares = jnp.square(jnp.where(far, 0, error)) / 2
        return jnp.where(far, delta * (size - delta / 2), squares)


@dataclass(frozen=True)
class DistributedBCELoss(DistributedLoss):
    """The binary cross entropy of probabilities: `DistributedLoss`, PyTorch's BCELoss.

    -(t log x + (1 - t) log(1 - x)), with logarithms of at least -100, as in PyTorch; there the gradient is 0. What is
    no probability, NaN or beyond 0 to 1, has the loss NaN.
    """

    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        return -(target * _log(prediction) + (1 - target) * _log(1 - prediction))


@jax.custom_jvp
def _log(p: Array) -> Array:
    # Cut off behind the logarithm: XLA takes three times as long for one of what a condition has chosen.
    return jnp.maximum(jnp.log(p), LOWEST_LOG)


@_log.defjvp
def _log_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (p,) = primals
    lowest = (p >= 0) & (p <= np.exp(LOWEST_LOG).astype(p.dtype))  # a NaN is neither
    return _log(p), jnp.where(lowest, 0, 1 / jnp.where(lowest, 1, p)) * tangents[0]


@jax.custom_jvp
def _times_log(t: Array) -> Array:
    """t log t, which is 0 at 0."""
    return t * jnp.maximum(jnp.log(t), BELOW_ALL_LOGS)


@_times_log.defjvp
def _times_log_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (t,) = primals
    return _times_log(t), (jnp.log(t) + 1) * tangents[0]


@jax.custom_jvp
def _softplus(x: Array) -> Array:
    """log(1 + exp x). JAX's own takes three times as long: it looks for infinities, with which this is right, too."""
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


@_softplus.defjvp
def _softplus_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _softplus(*primals), jax.nn.sigmoid(*primals) * tangents[0]


@dataclass(frozen=True, init=False)
class DistributedBCEWithLogitsLoss(DistributedLoss):
    """The binary cross entropy of logits: `DistributedLoss`, PyTorch's BCEWithLogitsLoss.

    -(w t log s(x) + (1 - t) log(1 - s(x))) with the sigmoid s, computed so that nothing overflows. `pos_weight`, w, is
    a number, or one for each entry along the last dimension of the whole tensor.
    """

    pos_weight: float | tuple[float, ...] | None = None

    def __init__(self, P_x: Any, reduction: Any = "mean", pos_weight: float | Sequence[float] | None = None) -> None:
        weights = pos_weight
        if pos_weight is not None:
            weights = checked_weights("pos_weight", pos_weight, "entry along the last dimension", or_one=True)
        # The fields, in the form in which equal ones are equal.
        vars(self).update(P_x=P_x, reduction=reduction, pos_weight=weights)
        self.__post_init__()

    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        soft = _softplus(-prediction)
        if self.pos_weight is None:
            return (1 - target) * prediction + soft
        return (1 - target) * prediction + (1 + (self._weights(pair) - 1) * target) * soft

    def _weights(self, pair: Pair) -> Any:
        if not isinstance(self.pos_weight, tuple):
            return self.pos_weight
        if len(self.pos_weight) != pair.grid.extent[-1]:
            raise PlanError(
                f"`pos_weight` has {len(self.pos_weight)} entries, but the last dimension of `prediction` has length "
                f"{pair.grid.extent[-1]}."
            )
        assert self.P_x.rank is not None
        return np.asarray(self.pos_weight, pair.wide)[slice(*pair.grid.box(self.P_x.rank)[-1])]


@dataclass(frozen=True)
class DistributedKLDivLoss(DistributedLoss):
    """The Kullback-Leibler divergence from log-probabilities x to t: `DistributedLoss`, PyTorch's KLDivLoss.

    t (log t - x), or exp(t) (t - x) with `log_target`. Its `reduction` may be "batchmean" too: the sum over the length
    of the first dimension, which is the divergence; "mean" divides by the number of elements.
    """

    log_target: bool = False

    @property
    def _reductions(self) -> tuple[str, ...]:
        return (*super()._reductions, "batchmean")

    def _divisor(self, pair: Pair) -> float:
        return float(max(pair.grid.extent[0], 1)) if self.reduction == "batchmean" else super()._divisor(pair)

    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        if self.log_target:
            return jnp.exp(target) * (target - prediction)
        return _times_log(target) - target * prediction


@dataclass(frozen=True)
class DistributedPoissonNLLLoss(DistributedLoss):
    """The negative log likelihood of counts t under a Poisson law: `DistributedLoss`, PyTorch's PoissonNLLLoss.

    exp(x) - t x, where x is the logarithm of the rate; x - t log(x + eps), where `log_input` is False. With `full`,
    Stirling's approximation of log t! is added where t is above 1.
    """

    log_input: bool = True
    full: bool = False
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_real(self.eps) or self.eps < 0:
            raise InvalidArgumentError(f"`eps` (={self.eps!r}) must be a real number of 0 or more.")

    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        if self.log_input:
            terms = jnp.exp(prediction) - target * prediction
        else:
            terms = prediction - target * jnp.log(prediction + self.eps)
        if not self.full:
            return terms
        small = target <= 1  # a NaN is not
        large = jnp.where(small, 2, target)
        stirling = large * jnp.log(large) - large + jnp.log(2 * np.pi * large) / 2
        return terms + jnp.where(small, 0, stirling)
