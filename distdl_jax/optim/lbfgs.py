"""L-BFGS on blocks: optax's, with inner products over whole tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.optim.line_search import check_search, line_search
from distdl_jax.optim.norms import Whole, check_params, optax_for
from distdl_jax.partitions.partition import Partition
from distdl_jax.validation import check_number, checked_boolean, checked_integer, is_traced

if TYPE_CHECKING:
    import optax


def lbfgs(
    specs: Any,
    learning_rate: ArrayLike | None = None,
    memory_size: int = 10,
    scale_init_precond: bool = True,
    linesearch: optax.GradientTransformationExtraArgs | None = None,
    *,
    partition: Partition | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return `optax.lbfgs` of whole tensors, with a line search on the sum of the workers' losses.

    **Arguments:**

    - `specs`: a pytree of `TensorSpec`, one for each leaf of the parameters.
    - `learning_rate`, `memory_size`, `scale_init_precond`: as in `optax.lbfgs`.
    - `linesearch`: one of optax's line searches. Default: `optax.lbfgs`'s, a zoom of up to 20 steps from 1.
    - `partition`: the workers that call it. Default: all of the world.

    **Returns:** an `optax.GradientTransformationExtraArgs`. Its `update` takes `value`, `grad` and `value_fn` as in
    `line_search`.

    **Raises:** `SetupError` if optax is not installed; `InvalidTypeError` for an invalid learning rate or line search,
    `InvalidArgumentError` for a rate that is NaN.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> specs, params = dj.TensorSpec((2,), P), jnp.array([3.0, 4.0])
    >>> def loss(params):
    ...     return jnp.sum((params - 1) ** 2)
    >>> optimiser = lbfgs(specs)
    >>> value, gradient = dj.value_and_grad(loss)(params)
    >>> updates, _ = optimiser.update(
    ...     gradient, optimiser.init(params), params, value=value, grad=gradient, value_fn=loss
    ... )
    >>> [round(float(x), 4) for x in params + updates]
    [2.4453, 3.1679]

    Source: Liu and Nocedal (1989); Nocedal and Wright, "Numerical optimization" (1999), algorithms 7.4 and 7.5.
    """
    optax = optax_for("lbfgs")
    if linesearch is None:
        linesearch = optax.scale_by_zoom_linesearch(max_linesearch_steps=20, initial_guess_strategy="one")
    check_search("linesearch", linesearch)
    _check_rate(learning_rate)
    scale = optax.scale(-1.0) if learning_rate is None else optax.scale_by_learning_rate(learning_rate)
    direction = scale_by_lbfgs(specs, memory_size, scale_init_precond, partition=partition)
    return optax.chain(direction, scale, line_search(linesearch, specs, partition=partition))


def _check_rate(learning_rate: Any) -> None:
    if learning_rate is None or callable(learning_rate):
        return
    try:
        check_number("learning_rate", learning_rate)
    except InvalidTypeError:
        raise InvalidTypeError(
            f"`learning_rate` (={learning_rate!r}) must be a real number, a scalar array of one, or a function of the "
            "number of steps; or None."
        ) from None
    if not is_traced(learning_rate) and bool(learning_rate != learning_rate):
        raise InvalidArgumentError(f"`learning_rate` (={learning_rate!r}) must not be NaN.")


def scale_by_lbfgs(
    specs: Any, memory_size: int = 10, scale_init_precond: bool = True, *, partition: Partition | None = None
) -> optax.GradientTransformation:
    """Return `optax.scale_by_lbfgs` of whole tensors: this worker's blocks of the quasi-Newton direction.

    **Arguments:**

    - `specs`: a pytree of `TensorSpec`, one for each leaf of the parameters.
    - `memory_size`, `scale_init_precond`: as in `optax.scale_by_lbfgs`.
    - `partition`: the workers that call it. Default: all of the world.

    **Returns:** an `optax.GradientTransformation` with optax's state. All workers call its `update`, which sends
    2 `memory_size` + 3 messages of one number.

    **Raises:** `SetupError` if optax is not installed; `InvalidTypeError` if `scale_init_precond` is not True or
    False, `InvalidArgumentError` if `memory_size` is below 1.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> specs, params = dj.TensorSpec((2,), P), jnp.array([3.0, 4.0])
    >>> scale = scale_by_lbfgs(specs)
    >>> updates, _ = scale.update(params, scale.init(params), params)
    >>> [round(float(x), 4) for x in updates]
    [0.6, 0.8]
    """
    optax = optax_for("scale_by_lbfgs")
    memory_size = checked_integer("memory_size", memory_size, 1)
    scale_init_precond = checked_boolean("scale_init_precond", scale_init_precond)
    whole = Whole("scale_by_lbfgs", specs, partition)

    def init(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        memory = jax.tree.map(lambda x: jnp.zeros((memory_size, *x.shape), x.dtype), params)
        return optax.ScaleByLBFGSState(
            count=jnp.asarray(0, jnp.int32),
            params=zeros,
            updates=zeros,
            diff_params_memory=memory,
            diff_updates_memory=memory,
            weights_memory=jnp.zeros(memory_size),
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        check_params("scale_by_lbfgs", params)
        moved = jax.tree.map(jnp.subtract, params, state.params)
        turned = jax.tree.map(jnp.subtract, updates, state.updates)
        curvature = whole.inner(turned, moved)
        weight = jnp.where(curvature == 0, 0, 1 / curvature)
        # Differences exist from the second step on.
        is_later = state.count > 0
        moved, turned, weight = jax.tree.map(
            lambda x: jnp.where(is_later, x, jnp.zeros_like(x)), (moved, turned, weight)
        )
        last = (state.count - 1) % memory_size
        memory = jax.tree.map(
            lambda all_of, one: _stored(all_of, one, last),
            (state.diff_params_memory, state.diff_updates_memory, state.weights_memory),
            (moved, turned, weight),
        )
        scale = _initial_scale(whole, updates, moved, turned, is_later) if scale_init_precond else jnp.ones(())
        direction = _preconditioned(whole, updates, memory, scale, state.count % memory_size)
        count = state.count + (state.count < jnp.iinfo(state.count.dtype).max)
        return direction, optax.ScaleByLBFGSState(count, params, updates, *memory)

    return optax.GradientTransformation(init, update)


def _stored(memory: Array, one: Array, place: Array) -> Array:
    """Replace an entry of the memory; not by indexing, which JAX replaces by a constant for empty arrays."""
    chosen = (jnp.arange(memory.shape[0]) == place).reshape(-1, *(1,) * one.ndim)
    return jnp.where(chosen, one.astype(memory.dtype), memory)


def _initial_scale(whole: Whole, updates: Any, moved: Any, turned: Any, is_later: Array) -> Array:
    """Return the scale of the identity from which the inverse Hessian is built; initially, for a step of length 1."""
    numerator, denominator = whole.inner(turned, moved), whole.inner(turned, turned)
    later = jnp.where(denominator > 0, numerator / denominator, 1)
    return jnp.where(is_later, later, jnp.minimum(1, 1 / lax.stop_gradient(whole.norm(updates))))


def _preconditioned(whole: Whole, updates: Any, memory: Any, scale: Array, first: Array) -> Any:
    """Return the updates times the approximate inverse Hessian, by two loops over the memory from `first` on."""
    size = memory[2].shape[0]
    order = (first + jnp.arange(size)) % size
    entries = jax.tree.map(lambda x: jnp.take(x, order, axis=0), memory)

    def added(vector: Any, factor: Array, direction: Any) -> Any:
        return jax.tree.map(lambda v, d: (v + factor * d).astype(v.dtype), vector, direction)

    def right(vector: Any, entry: Any) -> tuple[Any, Array]:
        moved, turned, weight = entry
        alpha = weight * whole.inner(moved, vector)
        return added(vector, -alpha, turned), alpha

    def left(vector: Any, entry_alpha: Any) -> tuple[Any, None]:
        (moved, turned, weight), alpha = entry_alpha
        beta = weight * whole.inner(turned, vector)
        return added(vector, alpha - beta, moved), None

    vector, alphas = lax.scan(right, updates, entries, reverse=True)
    vector = jax.tree.map(lambda v: (scale * v).astype(v.dtype), vector)
    return lax.scan(left, vector, (entries, alphas))[0]
