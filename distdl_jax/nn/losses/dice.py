"""The Dice loss of segmentations that are split in any way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.broadcast import plan_sum_reduce
from distdl_jax.nn.losses.classes import LossOverClasses
from distdl_jax.nn.losses.loss import Pair
from distdl_jax.partitions.partition import Partition
from distdl_jax.plans.decomposition import box_shape
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.tie import tie
from distdl_jax.validation import is_real


@dataclass(frozen=True)
class DistributedDiceLoss(LossOverClasses):
    """The Dice loss of each class, with samples, classes and features split in any way: MONAI's DiceLoss.

    With probabilities x of n_b x n_c x n_{D-1} x ... x n_0 on P_x, P_n x P_c x ..., and masks t of the same shape, for
    each sample and class

        loss = 1 - (2 sum(x t) + smooth_nr) / (sum(x) + sum(t) + smooth_dr)

    with sums over all features, on all workers. Two numbers for each sample and class are summed onto the first worker
    along the features, and as many return for the gradient.

    **Arguments:**

    - `P_x`: the partition of the prediction, of 2 dimensions or more. Blocks may be uneven and empty.
    - `reduction`: "mean" or "sum" over samples and classes, or "none".
    - `include_background`: whether class 0 counts.
    - `sigmoid`, `softmax`: whether the prediction is logits, to which this is applied first, with softmax over the
      classes. If classes are split, two more numbers are summed for each sample and feature.
    - `squared_pred`: whether the sums in the denominator are of squares.
    - `smooth_nr`, `smooth_dr`: small numbers added to numerator and denominator.
    - `batch`: whether to sum over the samples, too, which gives one loss for each class.

    **Call:** `loss(prediction, target)` returns this worker's part of the loss.

    - `prediction`: this worker's block on P_x; outside P_x a zero-volume array.
    - `target`: this worker's block of the masks, of the same shape and any dtype. Alternatively integer labels, 0 to
      n_c - 1, one for each sample and feature of the block: replicated along the classes, or on the first worker along
      them only (the others pass a zero-volume array of integers). The loss is NaN for a label that is not a class.

    With "mean" and "sum" the part is a scalar: the sum over all workers is the loss; it is 0 on workers without the
    first features. With "none" it is their block of the losses, n x c (1 x c with `batch`); elsewhere a zero-volume
    array.

    **Raises:** `InvalidTypeError` if a flag is not True or False; `InvalidArgumentError`, on every worker, if arguments
    are invalid; a call raises `PlanError`, on every worker of P_x, if blocks don't fit.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1, 1])
    >>> x = jnp.array([[[1.0, 1.0, 0.0, 0.0]]])
    >>> round(float(DistributedDiceLoss(P)(x, jnp.array([[[1, 0, 0, 0]]]))), 4)
    0.3333

    Source: Milletari et al. (2016), arXiv:1606.04797; MONAI's DiceLoss.
    """

    include_background: bool = True
    sigmoid: bool = False
    softmax: bool = False
    squared_pred: bool = False
    smooth_nr: float = 1e-5
    smooth_dr: float = 1e-5
    batch: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigmoid and self.softmax:
            raise InvalidArgumentError("`sigmoid` (=True) and `softmax` (=True) must not both be True.")
        for name in ("smooth_nr", "smooth_dr"):
            if not is_real(value := getattr(self, name)) or value < 0:
                raise InvalidArgumentError(f"`{name}` (={value!r}) must be a number of 0 or more.")

    @property
    def _summed(self) -> tuple[int, ...]:
        """The dimensions of the sums."""
        features = range(2, self.P_x.dim)
        return (0, *features) if self.batch else tuple(features)

    @cached_property
    def _with_sums(self) -> Partition:
        """The workers that get the sums."""
        return self._first_along(*self._summed)

    def _part(self, pair: Pair, prediction: Array, target: Array) -> Array:
        losses = pair.grid.extent[1] - (not self.include_background)
        if losses < 1 and not self.include_background:
            raise PlanError(
                f"`include_background` (=False) leaves no classes: `prediction` has {pair.grid.extent[1]} in dimension "
                "1."
            )
        x = self._probabilities(pair, prediction.astype(pair.wide))
        sums = self._sums(pair, tie(x, prediction), self._masks(pair, target))
        if self._with_sums.active:
            terms = 1 - (2 * sums[..., 0] + self.smooth_nr) / (sums[..., 1] + self.smooth_dr)
            if not self.include_background and pair.grid.box(self._rank)[1][0] == 0:
                terms = terms[:, 1:]
        else:
            terms = sums
        if self.reduction == "none":
            return terms.astype(prediction.dtype)
        total = jnp.sum(terms)
        return (
            total / max((1 if self.batch else pair.grid.extent[0]) * losses, 1) if self.reduction == "mean" else total
        )

    def _probabilities(self, pair: Pair, x: Array) -> Array:
        if self.softmax:
            return jnp.exp(x - jnp.expand_dims(self._log_sum(pair, x), 1))
        return jax.nn.sigmoid(x) if self.sigmoid else x

    def _masks(self, pair: Pair, target: Array) -> Array:
        """Return the mask of each class of this worker's block, from masks or labels."""
        are_labels = any(pair.target[worker].shape != pair.prediction[worker].shape for worker in self.P_x.ranks)
        if jnp.issubdtype(target.dtype, jnp.inexact) or not are_labels:
            pair.check_target_is_like_prediction()
            return target.astype(pair.wide)
        labels = self._labels(pair, target)
        classes = jnp.arange(*pair.grid.box(self._rank)[1]).reshape(-1, *(1,) * (self.P_x.dim - 2))
        masks = (jnp.expand_dims(labels, 1) == classes).astype(pair.wide)
        return jnp.where(jnp.expand_dims(self._are_wrong(pair, labels), 1), jnp.nan, masks)

    def _sums(self, pair: Pair, x: Array, masks: Array) -> Array:
        """Return the sums of overlaps, and of predictions and masks: n x c x 2, or 1 x c x 2, on the first workers.

        On the others it is a zero-volume array.
        """
        of_sizes = jnp.square(x) + jnp.square(masks) if self.squared_pred else x + masks
        sums = jnp.stack([jnp.sum(each, self._summed) for each in (x * masks, of_sizes)], -1)
        shapes = (box_shape(pair.grid.box(pair.grid.cell_of[worker])) for worker in self.P_x.ranks)
        blocks = {
            worker: ShapeDtype((1 if self.batch else n, c, 2), pair.wide)
            for worker, (n, c, *_) in zip(self.P_x.ranks, shapes, strict=True)
        }
        sums = sums.reshape(blocks[self.P_x.world.rank].shape)
        return plan_sum_reduce(blocks, self.P_x, self._with_sums).run(self.P_x.world, sums)
