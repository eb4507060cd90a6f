"""Cross entropy and accuracy over classes that may be split: the logits are never gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.all_reduce import plan_all_reduce
from distdl_jax.functional.all_sum_reduce import plan_all_sum_reduce
from distdl_jax.functional.broadcast import plan_broadcast, plan_sum_reduce
from distdl_jax.functional.collectives import as_indices
from distdl_jax.functional.largest import argmax_of
from distdl_jax.functional.plan import ShapeDtypes
from distdl_jax.kernels.dtypes import in_own_width
from distdl_jax.nn.losses.loss import Loss, Pair
from distdl_jax.partitions.partition import Partition
from distdl_jax.partitions.static import converter
from distdl_jax.partitions.tensors import TensorSpec, check_spec
from distdl_jax.plans.decomposition import Box, box_shape, index_of
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.tracing.tie import tie
from distdl_jax.validation import checked_weights, is_integer, is_real


@dataclass(frozen=True)
class LossOverClasses(Loss):
    """A loss over classes: its labels, their movement to all workers along the classes, and the sums over classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._over_classes and self.P_x.dim < 2:
            raise InvalidArgumentError(
                f"`P_x` ({shape_text(self.P_x.shape)}) must have 2 dimensions or more: samples, classes, and features."
            )

    @property
    def _over_classes(self) -> bool:
        """Whether dimension 1 has the classes."""
        return True

    def label_spec(self, logits_spec: TensorSpec) -> TensorSpec:
        """Return the spec of integer labels for logits with a spec: without the classes, and replicated along them.

        `loss.label_spec(spec).block(labels)` is this worker's block of all labels.

        **Raises:** `InvalidArgumentError` if the logits are not on P_x.
        """
        check_spec(logits_spec, "logits_spec")
        if logits_spec.partition != self.P_x or logits_spec.replicated:
            raise InvalidArgumentError(
                f"`logits_spec` (={logits_spec!r}) must be the spec of blocks on P_x, {self.P_x.describe()}."
            )
        samples, _, *features = logits_spec.global_shape
        return TensorSpec((samples, *features), self.P_x, replicated=1) if self._over_classes else logits_spec

    @cached_property
    def _first(self) -> Partition:
        """The workers that hold the first classes."""
        return self._first_along(1)

    def _first_along(self, *axes: int) -> Partition:
        """Return the workers whose index is 0 along `axes`, as a partition of length 1 there."""
        return self.P_x.slice(axes)

    @property
    def _rank(self) -> int:
        assert self.P_x.rank is not None
        return self.P_x.rank

    @property
    def _rank_along_classes(self) -> int:
        return index_of(self._rank, self.P_x.shape)[1]

    def _lines(self, pair: Pair, dtype: Any) -> ShapeDtypes:
        """Return the blocks, on the workers of P_x, of a tensor with one number for each sample (and feature)."""
        shapes = {worker: box_shape(pair.grid.box(pair.grid.cell_of[worker])) for worker in self.P_x.ranks}
        return {worker: ShapeDtype((n, *rest), np.dtype(dtype)) for worker, (n, _, *rest) in shapes.items()}

    def _labels(self, pair: Pair, target: Array) -> Array:
        """Return this worker's labels, one for each sample (and feature) of its block."""
        lines = self._lines(pair, target.dtype)
        wrong = [worker for worker in self.P_x.ranks if pair.target[worker].shape != lines[worker].shape]
        if not wrong:
            return as_indices(target)
        elsewhere = [worker for worker in self.P_x.ranks if worker not in self._first.ranks]
        if wrong[0] in self._first.ranks or any(pair.target[worker].size for worker in elsewhere):
            raise PlanError(
                f"On worker {wrong[0]}: `target` has shape {shape_text(pair.target[wrong[0]].shape)}, but integer "
                f"labels must be {shape_text(lines[wrong[0]].shape)}, one for each sample of its block; if classes are "
                "split, replicated along them, or on the first worker only and zero-volume on the others."
            )
        return as_indices(plan_broadcast(pair.target, self._first, self.P_x).run(self.P_x.world, target))

    def _log_sum(self, pair: Pair, x: Array) -> Array:
        """Return the logarithm of the sum of exponentials over all classes, on all workers along them."""
        lines, world = self._lines(pair, x.dtype), self.P_x.world
        top = lax.stop_gradient(jnp.max(x, axis=1, initial=-jnp.inf))
        top = plan_all_reduce(lines, self.P_x, "max", 1).run(world, top)
        top = jnp.where(jnp.isfinite(top), top, 0)
        total = jnp.sum(jnp.exp(x - jnp.expand_dims(top, 1)), axis=1)
        return jnp.log(plan_all_sum_reduce(lines, self.P_x, 1).run(world, total)) + top

    def _surprise(self, pair: Pair, log_sum: Array, x: Array, labels: Array, counts: Array | bool = True) -> Array:
        """Return -log p of each sample's label if this worker has its class, and the sample counts; otherwise 0.

        Entries that don't count are not read, so infinities in them do no harm.
        """
        start, stop = pair.grid.box(self._rank)[1]
        is_here = counts & (labels >= start) & (labels < stop)
        return jnp.where(is_here, log_sum - _picked(x, labels - start, x.shape), 0)

    def _are_wrong(self, pair: Pair, labels: Array) -> Array:
        """Return which labels are invalid classes; their losses are NaN, as JAX returns for out-of-bounds reads."""
        return (labels < 0) | (labels >= pair.grid.extent[1])

    def _reduced(self, pair: Pair, terms: Array, divisor: Array | float, prediction: Array) -> Array:
        """Return this worker's part of the loss, from its share of each sample's."""
        if self.reduction == "none":
            terms = terms.astype(prediction.dtype)
            to_first = plan_sum_reduce(self._lines(pair, terms.dtype), self.P_x, self._first)
            return to_first.run(self.P_x.world, terms)
        return jnp.sum(terms) / divisor if self.reduction == "mean" else jnp.sum(terms)


@dataclass(frozen=True)
class DistributedCrossEntropyLoss(LossOverClasses):
    """The cross entropy of logits whose classes, samples and features may all be split: PyTorch's CrossEntropyLoss.

    With logits x of n_b x n_c x n_{D-1} x ... x n_0 on P_x, P_n x P_c x ..., and labels t of n_b x n_{D-1} x ... x n_0,

        loss = -log softmax(x)[t] = log(sum over classes of exp(x)) - x[t]

    The logits are never gathered: for each sample, the maximum and the sum of exponentials are reduced over the workers
    along the classes, and one number in the backward pass.

    **Arguments:**

    - `P_x`: the partition of the logits. Blocks may be uneven and empty along any dimension.
    - `reduction`: "mean" (over the samples' weights), "sum", or "none".
    - `weight`: one for each class.
    - `ignore_index`: a label whose samples do not count; None for none, which avoids summing the number of samples over
      workers (unless there are weights). If no sample counts, the mean and its gradient are 0, whereas PyTorch returns
      NaN: a batch without labels should not change the parameters.
    - `label_smoothing`: the part of each label that is spread evenly over all classes, from 0 to 1.

    **Call:** `loss(prediction, target)` returns this worker's part of the loss.

    - `prediction`: this worker's block of the logits on P_x; outside P_x a zero-volume array.
    - `target`: integer labels, 0 to n_c - 1, for the samples and features of the block: replicated along the classes,
      or on the first worker along them only (the others pass a zero-volume array of integers). The loss is NaN for a
      label that is neither a class nor `ignore_index`. Alternatively floating-point probabilities, one for each logit
      of the block.

    With "mean" and "sum" the part is a scalar: the sum over all workers is the loss; it is 0 for an empty block. With
    "none" it is the losses, on the workers with the first classes; elsewhere a zero-volume array.

    **Raises:** `InvalidArgumentError`, on every worker, if arguments are invalid; a call raises `PlanError`, on every
    worker of P_x, if blocks or weights don't fit.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> round(float(DistributedCrossEntropyLoss(P)(jnp.zeros((5, 4)), jnp.arange(5) % 4)), 4)
    1.3863

    Source: Narayanan et al. (2021), arXiv:2104.04473 (classes split); PyTorch's CrossEntropyLoss.
    """

    weight: Sequence[float] | None = field(default=None, metadata=converter(partial(checked_weights, each="class")))
    ignore_index: int | None = -100
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_real(self.label_smoothing) or not 0 <= self.label_smoothing <= 1:
            raise InvalidArgumentError(f"`label_smoothing` (={self.label_smoothing!r}) must be a number from 0 to 1.")
        if self.ignore_index is not None and not is_integer(self.ignore_index):
            raise InvalidArgumentError(f"`ignore_index` (={self.ignore_index!r}) must be an integer, or None.")

    def _part(self, pair: Pair, prediction: Array, target: Array) -> Array:
        classes = pair.grid.extent[1]
        if self.weight is not None and len(self.weight) != classes:
            raise PlanError(f"`weight` has {len(self.weight)} entries, but `prediction` has {classes} classes.")
        x = prediction.astype(pair.wide)
        log_sum = self._log_sum(pair, x)
        divisor: Array | float
        if jnp.issubdtype(target.dtype, jnp.inexact):
            terms, divisor = self._of_probabilities(pair, log_sum, x, target.astype(pair.wide))
        else:
            terms, divisor = self._of_labels(pair, log_sum, x, self._labels(pair, target))
        return self._reduced(pair, tie(terms, log_sum), divisor, prediction)

    def _of_labels(self, pair: Pair, log_sum: Array, x: Array, labels: Array) -> tuple[Array, Array | float]:
        """Return this worker's share of each sample's loss, and the divisor of their mean."""
        box, smoothing, classes = pair.grid.box(self._rank), self.label_smoothing, pair.grid.extent[1]
        counts = jnp.ones(labels.shape, bool) if self.ignore_index is None else labels != self.ignore_index
        weights = counts.astype(x.dtype)
        if self.weight is not None:
            weights = weights * of_labels(self.weight, labels, x.dtype)
        weights = jnp.where(counts & self._are_wrong(pair, labels), jnp.nan, weights)
        terms = (1 - smoothing) * weights * self._surprise(pair, log_sum, x, labels, counts)
        if smoothing:
            spread = jnp.sum((jnp.expand_dims(log_sum, 1) - x) * self._class_weights(box, x.dtype), axis=1)
            terms = terms + smoothing / max(classes, 1) * jnp.where(counts, spread, 0)
        if self.weight is None and self.ignore_index is None:
            return terms, samples(pair)
        if self.reduction != "mean":
            return terms, 1
        own = jnp.sum(weights) * (self._rank_along_classes == 0)
        scalars = dict.fromkeys(self.P_x.ranks, ShapeDtype((), np.dtype(own.dtype)))
        total = plan_all_sum_reduce(scalars, self.P_x, axes_keep=()).run(self.P_x.world, lax.stop_gradient(own))
        return terms, jnp.where(total == 0, 1, total)

    def _of_probabilities(self, pair: Pair, log_sum: Array, x: Array, target: Array) -> tuple[Array, float]:
        pair.check_target_is_like_prediction()
        box, classes = pair.grid.box(self._rank), max(pair.grid.extent[1], 1)
        smooth = (1 - self.label_smoothing) * target + self.label_smoothing / classes
        surprise = jnp.expand_dims(log_sum, 1) - x  # -log p of each class of the block
        terms = jnp.sum(smooth * self._class_weights(box, x.dtype) * surprise, axis=1)
        return terms, samples(pair)

    def _class_weights(self, box: Box, dtype: Any) -> Any:
        """Return the weights of the classes of a block, in a shape that broadcasts with it."""
        if self.weight is None:
            return np.ones((), dtype)
        return along_classes(self.weight, box, dtype)


def of_labels(numbers: Sequence[float], labels: Array, dtype: Any) -> Array:
    """Return the entry of each label in `numbers`, which has one for each class; any entry for an invalid label."""
    if not (labels.size and numbers):
        return jnp.ones(labels.shape, dtype)
    return jnp.asarray(numbers, dtype)[jnp.clip(labels, 0, len(numbers) - 1)]


def along_classes(numbers: Sequence[float], box: Box, dtype: Any) -> np.ndarray:
    """Return a block's entries of `numbers`, one for each class, in a shape that broadcasts with it."""
    return np.asarray(numbers, dtype)[slice(*box[1])].reshape(-1, *(1,) * (len(box) - 2))


def samples(pair: Pair) -> float:
    """Return the number of samples (times features) of the whole tensor, each with one loss; 1 if there is none."""
    classes = max(pair.grid.extent[1], 1)
    return float(max(prod(pair.grid.extent) // classes, 1))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _picked(x: Array, places: Array, shape: tuple[int, ...]) -> Array:
    """Return the entries of x, of `shape`, at `places` along dimension 1; out-of-bounds ones give any entry."""
    if shape[1] == 0:
        return jnp.zeros(places.shape, x.dtype)
    within = jnp.clip(places, 0, shape[1] - 1)
    return jnp.squeeze(jnp.take_along_axis(x, jnp.expand_dims(within, 1), axis=1), 1)


def _picked_forward(x: Array, places: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    return _picked(x, places, shape), places


def _picked_backward(shape: tuple[int, ...], places: Array, dy: Array) -> tuple[Array, None]:
    """Compare with all positions, which XLA fuses with the addition: a scatter would need more memory."""
    every = lax.broadcasted_iota(places.dtype, shape, 1)
    return jnp.where(jnp.expand_dims(places, 1) == every, jnp.expand_dims(dy, 1), 0), None


_picked.defvjp(in_own_width(_picked_forward), in_own_width(_picked_backward))


class DistributedAccuracy(LossOverClasses):
    """The share of samples whose largest logit is that of their label, over classes that may be split.

    `accuracy(prediction, target)` returns this worker's part, as for losses: the sum over all workers is the accuracy.
    `prediction` is this worker's block of the logits, `target` its integer labels, both as in
    `DistributedCrossEntropyLoss`. It is not differentiable.

    **Arguments:**

    - `P_x`: the partition of the logits, samples x classes x features. Blocks may be uneven and empty.
    - `reduction`: "mean", or "sum" for the number of samples.

    **Raises:** `InvalidArgumentError`, on every worker, if an argument doesn't fit; a call raises `PlanError`, on
    every worker of P_x, if blocks or labels don't fit.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> float(DistributedAccuracy(P)(jnp.eye(4), jnp.array([0, 1, 2, 0])))
    0.75
    """

    @property
    def _reductions(self) -> tuple[str, ...]:
        return ("mean", "sum")

    def _part(self, pair: Pair, prediction: Array, target: Array) -> Array:
        labels = self._labels(pair, target)
        right = argmax_of(prediction, self.P_x, pair.grid, 1) == labels
        number = jnp.sum(right, dtype=pair.wide) * (self._rank_along_classes == 0)
        return number / samples(pair) if self.reduction == "mean" else number
