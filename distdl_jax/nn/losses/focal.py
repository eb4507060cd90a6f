"""The focal loss of binary targets, or of classes along a dimension that may be split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.nn.losses.classes import LossOverClasses, along_classes, of_labels, samples
from distdl_jax.nn.losses.loss import Pair, softplus
from distdl_jax.partitions.static import converter
from distdl_jax.tracing.tie import tie
from distdl_jax.validation import checked_weights, is_real


@dataclass(frozen=True)
class DistributedFocalLoss(LossOverClasses):
    """The focal loss of logits that may be split in any way: a cross entropy with low weight on easy examples.

        loss = -alpha_t (1 - p_t)^gamma log p_t

    with p_t the probability of the correct class. By default each logit is a binary classification, as in torchvision's
    `sigmoid_focal_loss`: p = sigmoid(x), and p_t = p t + (1 - p) (1 - t). With `use_softmax` the logits along dimension
    1 are exclusive classes: p = softmax(x), and p_t is its entry at the target.

    **Arguments:**

    - `P_x`: the partition of the logits. Any dimension may be split, also the classes; blocks may be uneven and empty.
    - `reduction`: "mean", over the logits, or with `use_softmax` over the samples (and features); "sum", or "none".
    - `alpha`: a number from 0 to 1, the weight of target 1, while target 0 has 1 - alpha; with `use_softmax`, the
      weight of all classes but the first, which has 1 - alpha, or a sequence, one for each class. None for weights
      of 1. (The default in torchvision and in the paper is 0.25.)
    - `gamma`: 0 or more. With 0 the loss is the cross entropy.
    - `use_softmax`: whether dimension 1 has classes, for 2 dimensions or more.

    **Call:** `loss(prediction, target)` returns this worker's part of the loss; the sum over all workers is the loss.

    - `prediction`: this worker's block of the logits on P_x; outside P_x a zero-volume array.
    - `target`: this worker's block of the target, of the same shape, from 0 to 1. With `use_softmax`: integer labels or
      probabilities, as in `DistributedCrossEntropyLoss`.

    There is no communication by default. With `use_softmax` and split classes, a maximum and a sum are reduced for each
    sample, and one number in the backward pass: logits are never gathered. With "none" it is the losses of the block's
    elements; with `use_softmax` the losses of its samples, on the workers with the first classes.

    **Raises:** `InvalidArgumentError` or `InvalidTypeError`, on every worker, if arguments are invalid; a call raises
    `PlanError`, on every worker of P_x, if blocks or weights don't fit.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> round(float(DistributedFocalLoss(P, alpha=0.25)(jnp.zeros((5, 4)), jnp.ones((5, 4)))), 4)
    0.0433

    Source: Lin et al. (2017), arXiv:1708.02002; torchvision's `sigmoid_focal_loss`; names as in MONAI's FocalLoss
    (whose mean, with `use_softmax`, also divides by the number of classes).
    """

    alpha: float | Sequence[float] | None = field(
        default=None, metadata=converter(partial(checked_weights, each="class", or_one=True))
    )
    gamma: float = 2.0
    use_softmax: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        alpha: Any = self.alpha
        if alpha is not None:
            if not isinstance(alpha, tuple) and not 0 <= alpha <= 1:
                raise InvalidArgumentError(f"`alpha` (={alpha!r}) must be a number from 0 to 1, or None.")
            if isinstance(alpha, tuple) and not self.use_softmax:
                raise InvalidArgumentError(
                    f"`alpha` (={alpha!r}) must be a number from 0 to 1, or None; one for each class needs "
                    "use_softmax=True."
                )
        if not is_real(self.gamma) or self.gamma < 0:
            raise InvalidArgumentError(f"`gamma` (={self.gamma!r}) must be a number of 0 or more.")

    @property
    def _over_classes(self) -> bool:
        return self.use_softmax

    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        surprise = (1 - target) * prediction + softplus(-prediction)
        missed = target * jax.nn.sigmoid(-prediction) + (1 - target) * jax.nn.sigmoid(prediction)
        terms = self._focused(surprise, missed)
        if self.alpha is None:
            return terms
        assert not isinstance(self.alpha, Sequence)
        return (self.alpha * target + (1 - self.alpha) * (1 - target)) * terms

    def _part(self, pair: Pair, prediction: Array, target: Array) -> Array:
        if not self.use_softmax:
            return super()._part(pair, prediction, target)
        x, weights = prediction.astype(pair.wide), self._class_weights(pair.grid.extent[1])
        log_sum = self._log_sum(pair, x)
        if jnp.issubdtype(target.dtype, jnp.inexact):
            pair.check_target_is_like_prediction()
            surprise = jnp.expand_dims(log_sum, 1) - x
            each = target.astype(x.dtype) * along_classes(weights, pair.grid.box(self._rank), x.dtype)
            terms = jnp.sum(each * self._focused(surprise, -jnp.expm1(-surprise)), axis=1)
        else:
            labels = self._labels(pair, target)
            surprise = self._surprise(pair, log_sum, x, labels)
            each = jnp.where(self._are_wrong(pair, labels), jnp.nan, of_labels(weights, labels, x.dtype))
            terms = each * self._focused(surprise, -jnp.expm1(-surprise))
        return self._reduced(pair, tie(terms, log_sum), samples(pair), prediction)

    def _class_weights(self, classes: int) -> Sequence[float]:
        """Return the weight of each class."""
        if self.alpha is None:
            return (1.0,) * classes
        weights = self.alpha if isinstance(self.alpha, Sequence) else (1 - self.alpha, *(self.alpha,) * (classes - 1))
        if len(weights) != max(classes, 1):
            raise PlanError(f"`alpha` has {len(weights)} entries, but `prediction` has {classes} classes.")
        return weights[:classes]

    def _focused(self, surprise: Array, missed: Array) -> Array:
        """Return missed^gamma * surprise: 0, with derivatives of 0, if `missed` is 0."""
        if self.gamma == 0:
            return surprise
        nothing = missed <= 0  # False for NaN
        gamma = int(self.gamma) if float(self.gamma).is_integer() else self.gamma
        return jnp.where(nothing, 0, jnp.where(nothing, 1, missed) ** gamma * surprise)
