"""What all losses share: a number for each element, and what becomes of them over all workers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.agreement.handshake import handshake, shape_dtype_of
from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.layer.layer import describe
from distdl_jax.partition import Partition, check_partitions
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.primitives.block_checks import common_dtype, owned_grid
from distdl_jax.primitives.collectives import accumulation_dtype
from distdl_jax.static import Static
from distdl_jax.tracing.tie import tie

Reduction = Literal["mean", "sum", "none", "batchmean"]


@dataclass(frozen=True)
class Pair:
    """What the workers of P_x hold of the prediction and of the target: by world rank, and as grid of the former."""

    prediction: Mapping[int, ShapeDtype]
    target: Mapping[int, ShapeDtype]
    grid: ProductGrid

    @property
    def wide(self) -> np.dtype:
        """The dtype to compute in: that which both have in common, for half precisions float32."""
        worker = self.grid.ranks[0]
        return accumulation_dtype(np.dtype(jnp.promote_types(self.prediction[worker].dtype, self._float(worker))))

    def check_target_is_like_prediction(self) -> None:
        """Refuse blocks of the target of another shape, in the same words on all workers."""
        for worker, held in sorted(self.prediction.items()):
            if self.target[worker].shape != held.shape:
                raise PlanError(
                    f"On worker {worker}: `target` has shape {shape_text(self.target[worker].shape)}, but must have "
                    f"that of `prediction`, {shape_text(held.shape)}."
                )

    def _float(self, worker: int) -> np.dtype:
        dtype = self.target[worker].dtype
        return dtype if jnp.issubdtype(dtype, jnp.inexact) else self.prediction[worker].dtype


@dataclass(frozen=True)
class DistributedLoss(Static):
    """A loss of a prediction on P_x: `loss(prediction, target)` is this worker's part of it.

    **Arguments:**

    - `P_x`: the partition of the prediction, of as many dimensions. Any of them may be split; blocks may be uneven and
      empty.
    - `reduction`: "sum"; "mean", the sum over the number of elements of the whole tensor; "none", for the block of the
      elements' losses.
    """

    P_x: Partition
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_partitions(P_x=self.P_x)
        if self.reduction not in self._reductions:
            raise InvalidArgumentError(
                f"`reduction` (={self.reduction!r}) must be one of {', '.join(map(repr, self._reductions))}."
            )

    @property
    def _reductions(self) -> tuple[str, ...]:
        return ("mean", "sum", "none")

    def __call__(self, prediction: Array, target: Array) -> Array:
        """This worker's part of the loss.

        **Arguments:**

        - `prediction`: this worker's block on P_x; outside P_x a zero-volume array.
        - `target`: this worker's block of the target, of the same shape; not read outside P_x.

        **Returns:** with "mean" and "sum" a scalar: the sum over all workers is the loss, and it is 0 on workers
        without elements. With "none" the losses of the block's elements.

        **Raises:** `PlanError`, on every worker of P_x, where blocks don't fit.
        """
        if self.P_x.rank is None:
            return prediction if self.reduction == "none" else nothing(prediction)
        with jax.named_scope(type(self).__name__):
            return self._part(self._told(prediction, target), prediction, target)

    def _told(self, prediction: Array, target: Array) -> Pair:
        """What all workers of P_x hold, from their one handshake."""
        world, team = self.P_x.world, tuple(sorted(self.P_x.ranks))
        told = handshake(
            world,
            team,
            describe(self),
            lambda: (shape_dtype_of("prediction", prediction), shape_dtype_of("target", target)),
        )
        of_prediction, of_target = ({worker: each[place] for worker, each in told.items()} for place in (0, 1))
        dtype = common_dtype("prediction", of_prediction, self.P_x.ranks)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise PlanError(f"`prediction` must hold real floating-point numbers, but is {dtype}.")
        common_dtype("target", of_target, self.P_x.ranks)
        return Pair(of_prediction, of_target, owned_grid("prediction", self.P_x, of_prediction))

    def _part(self, pair: Pair, prediction: Array, target: Array) -> Array:
        pair.check_target_is_like_prediction()
        terms = self._terms(prediction.astype(pair.wide), target.astype(pair.wide), pair)
        return self._reduced(terms, pair, prediction.dtype)

    def _reduced(self, terms: Array, pair: Pair, dtype: Any) -> Array:
        if self.reduction == "none":
            return terms.astype(dtype)
        return jnp.sum(terms) / self._divisor(pair)

    def _divisor(self, pair: Pair) -> float:
        """By what the sum is divided. A whole tensor may have more elements than JAX's integers can count."""
        return float(max(math.prod(pair.grid.extent), 1)) if self.reduction == "mean" else 1.0

    @abstractmethod
    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        """The loss of each element of this worker's block."""


def nothing(x: Array) -> Array:
    """The part of a worker that has none: 0, depending on `x`."""
    return tie(jnp.zeros((), accumulation_dtype(np.dtype(x.dtype))), x)
