"""The base of losses: agreement on the blocks of prediction and target, and the reduction."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import common_dtype, outside, owned_grid
from distdl_jax.functional.collectives import accumulation_dtype
from distdl_jax.nn.base.layer import describe
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.static import Static
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.agreement import exchange_named_shapes

Reduction = Literal["mean", "sum", "none", "batchmean"]


@dataclass(frozen=True)
class Pair:
    """The blocks of prediction and target on the workers of P_x, by world rank, and the grid of the prediction."""

    prediction: Mapping[int, ShapeDtype]
    target: Mapping[int, ShapeDtype]
    grid: ProductGrid

    @property
    def wide(self) -> np.dtype:
        """The dtype to compute in: the one that both promote to, for half precisions float32."""
        worker = self.grid.ranks[0]
        prediction, target = self.prediction[worker].dtype, self.target[worker].dtype
        target = target if jnp.issubdtype(target, jnp.inexact) else prediction
        return accumulation_dtype(np.dtype(jnp.promote_types(prediction, target)))

    def check_target_is_like_prediction(self) -> None:
        """Refuse blocks of the target of another shape, in the same words on all workers."""
        for worker, block in sorted(self.prediction.items()):
            if self.target[worker].shape != block.shape:
                raise PlanError(
                    f"On worker {worker}: `target` has shape {shape_text(self.target[worker].shape)}, but must have "
                    f"that of `prediction`, {shape_text(block.shape)}."
                )


@dataclass(frozen=True)
class Loss(Static):
    """The base of losses: agreement on the blocks, and the reduction; arguments as for `DistributedLoss`."""

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
        """Return this worker's part of the loss.

        **Arguments:**

        - `prediction`: this worker's block on P_x; outside P_x a zero-volume array.
        - `target`: this worker's block of the target, of the same shape; not read outside P_x.

        **Returns:** with "mean" and "sum" a scalar: the sum over all workers is the loss, and it is 0 on workers
        without elements. With "none" the losses of the block's elements.

        **Raises:** `PlanError`, on every worker of P_x, where blocks don't fit.
        """
        if not self.P_x.active:
            outside(self.P_x.world, prediction, "prediction")
            nothing = tie(jnp.zeros((), accumulation_dtype(np.dtype(prediction.dtype))), prediction)
            return prediction if self.reduction == "none" else nothing
        with jax.named_scope(type(self).__name__):
            return self._part(self._exchanged(prediction, target), prediction, target)

    def _exchanged(self, prediction: Array, target: Array) -> Pair:
        """Exchange the shapes and dtypes of all workers of P_x."""
        purpose = describe(self)
        arrays = {"prediction": prediction, "target": target}
        shapes = exchange_named_shapes(self.P_x.world, tuple(sorted(self.P_x.ranks)), purpose, arrays)
        predictions, targets = ({worker: each[name] for worker, each in shapes.items()} for name in arrays)
        dtype = common_dtype("prediction", predictions, self.P_x.ranks)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise PlanError(f"`prediction` must hold real floating-point numbers, but is {dtype}.")
        common_dtype("target", targets, self.P_x.ranks)
        return Pair(predictions, targets, owned_grid("prediction", self.P_x, predictions))

    def _part(self, pair: Pair, prediction: Array, target: Array) -> Array:
        pair.check_target_is_like_prediction()
        terms = self._terms(prediction.astype(pair.wide), target.astype(pair.wide), pair)
        if self.reduction == "none":
            return terms.astype(prediction.dtype)
        return jnp.sum(terms) / self._divisor(pair)

    def _divisor(self, pair: Pair) -> float:
        """Return the divisor of the sum, a float: tensors may have more elements than JAX's integers can count."""
        return float(max(math.prod(pair.grid.extent), 1)) if self.reduction == "mean" else 1.0

    @abstractmethod
    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        """Return the loss of each element of this worker's block."""
