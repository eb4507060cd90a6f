"""The base of losses, and losses that are sums over elements: no communication, forward or backward."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from distdl_jax.errors import InvalidArgumentError, PlanError
from distdl_jax.functional.block_checks import common_dtype, outside, owned_grid
from distdl_jax.kernels.dtypes import accumulation_dtype, in_own_width
from distdl_jax.nn.base.layer import describe
from distdl_jax.partitions.partition import Partition, check_partitions
from distdl_jax.partitions.static import Static, converter
from distdl_jax.plans.decomposition import ProductGrid
from distdl_jax.plans.shape_dtype import ShapeDtype, shape_text
from distdl_jax.text import T, documented
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.marks import part_of_sum
from distdl_jax.tracing.tie import tie
from distdl_jax.transports.agreement import MovesDataError, exchange_named_shapes
from distdl_jax.validation import check_function, checked_weights, is_real

Reduction = Literal["mean", "sum", "none", "batchmean"]

LOWEST_LOG = -100.0
"""PyTorch's lower bound for the logarithm of a probability."""

BELOW_ALL_LOGS = -1000.0
"""Below the logarithm of any positive number."""


@dataclass(frozen=True)
class Pair:
    """The blocks of prediction and target on the workers of P_x, by world rank.

    - `grid`: of the prediction. `cell`: this worker's number in it.
    """

    prediction: Mapping[int, ShapeDtype]
    target: Mapping[int, ShapeDtype]
    grid: ProductGrid
    cell: int | None

    @property
    def wide(self) -> np.dtype:
        """The dtype to compute in: the common dtype of both; float32 for half precisions."""
        worker = self.grid.ranks[0]
        prediction, target = self.prediction[worker].dtype, self.target[worker].dtype
        target = target if jnp.issubdtype(target, jnp.inexact) else prediction
        return accumulation_dtype(np.dtype(jnp.promote_types(prediction, target)))

    def check_target_is_like_prediction(self) -> None:
        """Reject blocks of the target with another shape, with the same message on all workers."""
        for worker, block in sorted(self.prediction.items()):
            if self.target[worker].shape != block.shape:
                raise PlanError(
                    f"On worker {worker}: `target` has shape {shape_text(self.target[worker].shape)}, but must have "
                    f"the shape of `prediction`, {shape_text(block.shape)}."
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

        **Returns:** with "mean" and "sum" a scalar: the sum over all workers is the loss; it is 0 on workers without
        elements. With "none", the losses of the block's elements.

        **Raises:** `PlanError`, on every worker of P_x, if blocks don't fit.
        """
        if trace_context.whole_program:
            return self._formula(prediction, target)
        if not self.P_x.active:
            outside(self.P_x.world, prediction, "prediction")
            nothing = tie(jnp.zeros((), accumulation_dtype(np.dtype(prediction.dtype))), prediction)
            return part_of_sum(prediction if self.reduction == "none" else nothing)
        with jax.named_scope(type(self).__name__):
            return part_of_sum(self._part(self._exchanged(prediction, target), prediction, target))

    def _formula(self, prediction: Array, target: Array) -> Array:
        """Return the loss of whole arrays, inside of a distributed function; those over classes have no formula."""
        if type(self)._part is not Loss._part:
            raise MovesDataError.by(f"the loss `{type(self).__name__}`")
        of_x, of_t = (ShapeDtype(tuple(x.shape), np.dtype(x.dtype)) for x in (prediction, target))
        grid = ProductGrid.balanced(of_x.shape, (1,) * len(of_x.shape), (0,))
        return self._part(Pair({0: of_x}, {0: of_t}, grid, 0), prediction, target)

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
        return Pair(predictions, targets, owned_grid("prediction", self.P_x, predictions), self.P_x.rank)

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


@dataclass(frozen=True, init=False)
class DistributedLoss(Loss):
    """A loss defined by a function of each element: one of optax's elementwise losses, or your own.

    `loss(prediction, target)` is this worker's part: the sum over all workers is the loss.

    **Arguments:**

    - `P_x`: the partition of the prediction, with as many dimensions. Any of them may be split; blocks may be uneven
      and empty.
    - `elementwise`: a function of two arrays of one shape, a block of the prediction and one of the target in float32
      or float64, that returns an array of that shape. Each entry may depend only on the corresponding entries. Reuse
      one function object, so that it is compiled once.
    - `reduction`: "sum"; "mean", the sum divided by the number of elements of the whole tensor; "none", for the losses
      of the block's elements.

    **Raises:** `InvalidTypeError` if `elementwise` can't be called; a call raises `InvalidArgumentError` if it
    returns an array of another shape.

    >>> import jax.numpy as jnp, optax, distdl_jax as dj
    >>> P = dj.Partition().grid([1, 1])
    >>> round(float(DistributedLoss(P, optax.log_cosh)(jnp.ones((2, 3)), jnp.zeros((2, 3)))), 4)
    0.4338
    """

    elementwise: Callable[[Array, Array], Array] = field(kw_only=True)

    def __init__(
        self, P_x: Partition, elementwise: Callable[[Array, Array], Array], reduction: Reduction = "mean"
    ) -> None:
        check_function("elementwise", elementwise)
        self._store(P_x=P_x, elementwise=elementwise, reduction=reduction)
        self.__post_init__()

    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        terms = self.elementwise(prediction, target)
        if jnp.shape(terms) != prediction.shape:
            raise InvalidArgumentError(
                f"`elementwise` (={self.elementwise!r}) must return one loss for each element, an array of shape "
                f"{prediction.shape}, but its result has shape {jnp.shape(terms)}."
            )
        return terms


_ELEMENTWISE = """
    $formula

PyTorch's loss of this name; `loss(prediction, target)` returns this worker's part: the sum over all workers is the
loss. There is no communication. Prediction x and target t are blocks of one shape; both are zero-volume outside P_x.

**Arguments:**

- `P_x`: the partition of prediction and target. Any dimension may be split; blocks may be uneven and empty.
- `reduction`: "sum"; "mean", the sum divided by the number of elements of the whole tensor; "none", for the elements'
  losses$reduction.
$arguments
**Raises:** `InvalidArgumentError` or `InvalidTypeError`, on every worker, if an argument doesn't fit; a call raises
`PlanError`, on every worker of P_x, if blocks don't fit, or the prediction is not of real floating-point numbers.

>>> import jax.numpy as jnp, distdl_jax as dj
>>> P = dj.Partition().grid([1, 1])
>>> x, t = $example
>>> round(float($name(P)(x, t)), 4)
$value
"""


def _elementwise(formula: str, value: float, example: str, *arguments: str, reduction: str = "") -> Callable[[T], T]:
    """Return a decorator that completes the docstring of an elementwise loss with its formula, arguments and example.

    - `value`, `example`: a loss, and the prediction and target that have it.
    - `arguments`: lines about additional arguments; `reduction`: an additional reduction.
    """
    lines = "".join(f"- {argument}\n" for argument in arguments)
    values = {"formula": formula, "value": str(value), "example": example}
    return documented(_ELEMENTWISE, arguments=lines, reduction=reduction, **values)


@_elementwise("(x - t)^2", 4.0, "jnp.full((2, 3), 3.0), jnp.ones((2, 3))")
class DistributedMSELoss(Loss):
    """The squared error of each element, with prediction and target split in any way."""

    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        return jnp.square(prediction - target)


@_elementwise("|x - t|", 2.0, "jnp.full((2, 3), 3.0), jnp.ones((2, 3))")
class DistributedL1Loss(Loss):
    """The absolute error of each element, with prediction and target split in any way."""

    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        return jnp.abs(prediction - target)


@_elementwise(
    """(x - t)^2 / 2 if |x - t| <= delta, else delta (|x - t| - delta / 2)

The slope is delta however large |x - t| is.""",
    1.5,
    "jnp.full((2, 3), 3.0), jnp.ones((2, 3))",
    "`delta`: a number above 0.",
)
@dataclass(frozen=True)
class DistributedHuberLoss(Loss):
    """An error that is squared near 0 and absolute beyond `delta`, of tensors split in any way."""

    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_real(self.delta) or not self.delta > 0:
            raise InvalidArgumentError(f"`delta` (={self.delta!r}) must be a number above 0.")

    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        error = prediction - target
        size = jnp.abs(error)
        delta = min(self.delta, float(jnp.finfo(error.dtype).max))
        far = size > self.delta  # False for NaN: its square has derivative NaN, its absolute value has not
        # The branch not taken has derivative 0, but 0 times infinity is NaN, so large errors are not squared.
        squares = jnp.square(jnp.where(far, 0, error)) / 2
        return jnp.where(far, delta * (size - delta / 2), squares)


@_elementwise(
    """-(t log x + (1 - t) log(1 - x))

Logarithms are at least -100, as in PyTorch; there the gradient is 0. A prediction that is not a probability, NaN or
outside 0 to 1, has loss NaN.""",
    0.6931,
    "jnp.full((2, 3), 0.5), jnp.ones((2, 3))",
)
class DistributedBCELoss(Loss):
    """The binary cross entropy of probabilities split in any way."""

    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        return -(target * _log(prediction) + (1 - target) * _log(1 - prediction))


_WEIGHTS = partial(checked_weights, each="entry along the last dimension", or_one=True)


@_elementwise(
    "-(w t log s(x) + (1 - t) log(1 - s(x))), with s the sigmoid and w `pos_weight`",
    0.6931,
    "jnp.zeros((2, 3)), jnp.ones((2, 3))",
    "`pos_weight`: w, a number, or one for each entry along the last dimension of the whole tensor. Default: 1.",
)
@dataclass(frozen=True)
class DistributedBCEWithLogitsLoss(Loss):
    """The binary cross entropy of logits split in any way, computed without overflow."""

    pos_weight: float | Sequence[float] | None = field(default=None, metadata=converter(_WEIGHTS))

    def _terms(self, prediction: Array, target: Array, pair: Pair) -> Array:
        soft = softplus(-prediction)
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
        assert pair.cell is not None
        return np.asarray(self.pos_weight, pair.wide)[slice(*pair.grid.box(pair.cell)[-1])]


@_elementwise(
    "t (log t - x), or with `log_target` exp(t) (t - x)",
    0.3466,
    "jnp.log(jnp.full((2, 4), 0.25)), jnp.eye(4)[:2]",
    "`log_target`: whether t are logarithms of probabilities.",
    reduction='; "batchmean", the sum over the length of the first dimension: the divergence',
)
@dataclass(frozen=True)
class DistributedKLDivLoss(Loss):
    """The Kullback-Leibler divergence from log-probabilities x to t, split in any way."""

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


@_elementwise(
    "exp(x) - t x, or x - t log(x + eps) if `log_input` is False",
    1.0,
    "jnp.zeros((2, 3)), jnp.ones((2, 3))",
    "`log_input`: whether x is the logarithm of the rate, not the rate.",
    "`full`: whether to add Stirling's approximation of log t! if t is above 1.",
    "`eps`: a small number, 0 or more, for rates of 0.",
)
@dataclass(frozen=True)
class DistributedPoissonNLLLoss(Loss):
    """The negative log likelihood of counts t under a Poisson distribution, of tensors split in any way."""

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
        small = target <= 1  # False for NaN
        large = jnp.where(small, 2, target)
        stirling = large * jnp.log(large) - large + jnp.log(2 * np.pi * large) / 2
        return terms + jnp.where(small, 0, stirling)


@jax.custom_jvp
def _log(p: Array) -> Array:
    # Clipped after the logarithm: XLA takes three times as long for the logarithm of a conditional.
    return jnp.maximum(jnp.log(p), LOWEST_LOG)


@_log.defjvp
@in_own_width
def _log_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (p,) = primals
    lowest = (p >= 0) & (p <= np.exp(LOWEST_LOG).astype(p.dtype))  # False for NaN
    return _log(p), jnp.where(lowest, 0, 1 / jnp.where(lowest, 1, p)) * tangents[0]


@jax.custom_jvp
def _times_log(t: Array) -> Array:
    """Return t log t, which is 0 at 0."""
    return t * jnp.maximum(jnp.log(t), BELOW_ALL_LOGS)


@_times_log.defjvp
@in_own_width
def _times_log_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (t,) = primals
    return _times_log(t), (jnp.log(t) + 1) * tangents[0]


@jax.custom_jvp
def softplus(x: Array) -> Array:
    """Return log(1 + exp x). JAX's own takes three times as long: it checks for infinities, which this handles too."""
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


@softplus.defjvp
@in_own_width
def _softplus_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return softplus(*primals), jax.nn.sigmoid(*primals) * tangents[0]
