"""Gradients in half precision, and from many batches: loss scaling, and accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.functional.all_reduce import all_reduce
from distdl_jax.kernels.dtypes import accumulation_dtype
from distdl_jax.partitions.partition import Partition, check_workers
from distdl_jax.partitions.static import Static
from distdl_jax.tracing.tie import tie
from distdl_jax.validation import check_function, check_number, checked_integer, is_real


def all_finite(tree: Any, *, partition: Partition | None = None) -> Array:
    """Return whether all numbers in the pytrees of all workers are finite; the same on every worker.

    **Arguments:**

    - `tree`: this worker's pytree of arrays; it may differ between workers.
    - `partition`: the workers that call it. Default: all of the world.

    **Returns:** a bool scalar, the same on every worker.

    **Raises:** `InvalidTypeError` if `partition` is not a partition.

    >>> import jax.numpy as jnp
    >>> bool(all_finite({"weight": jnp.ones(3)})), bool(all_finite([jnp.array(jnp.inf)]))
    (True, False)
    """
    check_workers("partition", partition)
    workers = Partition() if partition is None else partition
    inexact = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    own = reduce(jnp.logical_and, [jnp.all(jnp.isfinite(x)) for x in inexact], jnp.asarray(True))
    finite = all_reduce(own.astype(jnp.int32), workers, "min", axes_keep=())
    return finite.astype(bool) if workers.active else own


@dataclass(frozen=True)
class LossScale(Static):
    """Dynamic loss scaling: the loss is multiplied by a number, so that gradients in float16 don't vanish.

    If a gradient is not finite on any worker, all skip that step, and divide the scale; after `period` good steps they
    multiply it. The state is a pytree, {"scale", "good_steps"}, the same on every worker.

        scaled = dj.grad(lambda params: scale.scaled(loss(params), state))(params)
        gradient, finite = scale.unscaled(scaled, state)
        params = scale.chosen(finite, optax.apply_updates(params, updates), params)
        state = scale.next(state, finite)

    **Arguments:**

    - `initial`: the initial scale. - `factor`: by which it is multiplied or divided, above 1.
    - `period`: the number of good steps.
    - `partition`: the workers that train. Default: all of the world.

    **Raises:** `InvalidArgumentError`, on every worker, for invalid numbers.

    >>> scale = LossScale(initial=8.0, period=1)
    >>> state = scale.init()
    >>> gradient, finite = scale.unscaled(jnp.array([16.0, 4.0]), state)
    >>> gradient.tolist(), bool(finite), float(scale.next(state, finite)["scale"])
    ([2.0, 0.5], True, 16.0)

    Source: Micikevicius et al. (2018), arXiv:1710.03740, section 3.2.
    """

    initial: float = 2.0**15
    factor: float = 2.0
    period: int = 2000
    partition: Partition | None = None

    def __post_init__(self) -> None:
        check_workers("partition", self.partition)
        checked_integer("period", self.period, 1)
        limits = jnp.finfo(jnp.float32)
        if not is_real(self.initial) or not float(limits.tiny) <= self.initial <= float(limits.max):
            raise InvalidArgumentError(f"`initial` (={self.initial!r}) must be a number above 0 that float32 can hold.")
        if not is_real(self.factor) or not 1 < self.factor < math.inf:
            raise InvalidArgumentError(f"`factor` (={self.factor!r}) must be a finite number above 1.")

    def init(self) -> dict[str, Array]:
        """Return the first state."""
        return {"scale": jnp.asarray(self.initial, jnp.float32), "good_steps": jnp.asarray(0, jnp.int32)}

    def scaled(self, loss: Array | float, state: dict[str, Array]) -> Array:
        """Return this worker's part of the loss times the scale, in float32 at least; workers without a part pass 0."""
        if not hasattr(loss, "dtype"):
            check_number("loss", loss)
        wide = jnp.promote_types(getattr(loss, "dtype", jnp.float32), jnp.float32)
        return jnp.asarray(loss, wide) * state["scale"]

    def unscaled(self, gradient: Any, state: dict[str, Array]) -> tuple[Any, Array]:
        """Return the gradient of the loss, half precisions in float32, and whether it is finite on all workers."""

        def divided(x: Array) -> Array:
            return x.astype(accumulation_dtype(x.dtype)) / state["scale"].astype(accumulation_dtype(x.dtype))

        whole = jax.tree.map(divided, gradient)
        return whole, all_finite(whole, partition=self.partition)

    def chosen(self, finite: Array, new: Any, old: Any) -> Any:
        """Return `new`, parameters or an optimiser's state, if the gradient was finite, otherwise `old`."""
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    def next(self, state: dict[str, Array], finite: Array) -> dict[str, Array]:
        """Return the state after a step; the scale stays between 1, or a smaller `initial`, and the largest float32."""
        floor = min(1.0, self.initial)
        good = jnp.where(finite, state["good_steps"] + 1, 0)
        grown = jnp.where(good >= self.period, state["scale"] * self.factor, state["scale"])
        scale = jnp.where(finite, grown, jnp.maximum(state["scale"] / self.factor, floor))
        scale = jnp.where(jnp.isfinite(scale), scale, state["scale"])
        return {"scale": scale, "good_steps": jnp.where(good >= self.period, 0, good)}


def accumulated(value_and_grad: Callable[..., Any]) -> Callable[..., Any]:
    """Return `value_and_grad(params, batch)` of many batches, in sequence, in the memory of one.

    **Arguments:**

    - `value_and_grad`: a function of the parameters and a batch, such as `dj.value_and_grad(loss)`, that returns a
      value and a gradient, a pytree like the parameters.

    **Returns:** a function of the parameters and of a pytree whose arrays have the batches along their first dimension,
    the same number on every worker. It returns the means of their values and gradients: for batches of equal size, the
    value and gradient of one batch of all samples. Half precisions are summed in float32, and rounded once.

    **Raises:** `InvalidTypeError` if it is not a function; `InvalidArgumentError` if arrays don't hold the same number
    of batches, one or more.

    >>> import distdl_jax as dj
    >>> step = accumulated(dj.value_and_grad(lambda w, x: jnp.sum(w * x)))
    >>> value, gradient = step(2.0, jnp.arange(6.0).reshape(3, 2))
    >>> float(value), float(gradient)
    (10.0, 5.0)
    """
    check_function("value_and_grad", value_and_grad)

    def over_batches(params: Any, batches: Any) -> Any:
        counts = {jnp.shape(x)[:1] for x in jax.tree.leaves(batches)}
        if len(counts) != 1 or not next(iter(counts)) or next(iter(counts))[0] < 1:
            raise InvalidArgumentError(
                f"`batches` must hold the same number of batches, one or more, along the first dimension of all "
                f"arrays, but holds {sorted(str(count) for count in counts)}."
            )
        (count,) = next(iter(counts))
        shapes = jax.eval_shape(value_and_grad, params, jax.tree.map(lambda x: x[0], batches))

        def added(sums: Any, batch: Any) -> tuple[Any, None]:
            terms = value_and_grad(params, batch)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, terms), None

        leaves = jax.tree.leaves(params)
        zeros = jax.tree.map(
            lambda like: tie(jnp.zeros(like.shape, accumulation_dtype(like.dtype)), *map(jnp.asarray, leaves)), shapes
        )
        sums, _ = lax.scan(added, zeros, batches)
        return jax.tree.map(lambda total, like: (total / count).astype(like.dtype), sums, shapes)

    return over_batches
