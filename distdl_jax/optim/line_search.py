"""optax's line searches on the sum of the workers' losses.

A line search looks at one number, how far to go, and at two that depend on it: the value there, and the slope. So
optax's own searches on that one number, the same on every worker, while value and slope come from all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from distdl_jax.autodiff.gradients import summed, value_and_grad
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.optim.global_reductions import Whole, check_params
from distdl_jax.optim.optional import optax_for
from distdl_jax.optim.synced_loops import in_step
from distdl_jax.partition import Partition

if TYPE_CHECKING:
    import optax


def line_search(
    search: optax.GradientTransformationExtraArgs, specs: Any, *, partition: Partition | None = None
) -> optax.GradientTransformationExtraArgs:
    """A line search of optax's on the whole loss: `search` sees the sum over workers, and whole inner products.

    **Arguments:**

    - `search`: `optax.scale_by_zoom_linesearch(...)` or `optax.scale_by_backtracking_linesearch(...)`.
    - `specs`: a pytree of `TensorSpec`, one for each leaf of the parameters.
    - `partition`: the workers that call it. Default: all of the world.

    **Returns:** an `optax.GradientTransformationExtraArgs` with the state of `search`. All workers call its `update`:
    with `value`, what `dj.value_and_grad` returned, `grad`, this worker's blocks of the gradient, and `value_fn`, a
    function of the parameters that returns this worker's part of the loss. Further keywords go to `value_fn`. All
    workers take the same steps: decisions are worker 0's.

    **Raises:** `SetupError` where optax is not installed, `InvalidTypeError` for what is no line search; its `update`
    what `dj.optim.global_norm` does.
    """
    optax = optax_for("line_search")
    check_search("search", search)
    whole = Whole("line_search", specs, partition)

    def start(params: Any) -> tuple[Array, Any]:
        """The one number, and what goes along unsearched, with no scalar in it: the gradient is kept in its place."""
        dtypes = whole.dtypes(params)
        dtype = jnp.finfo(dtypes[0]).dtype if dtypes else jnp.result_type(float)
        return jnp.zeros((), dtype), jax.tree.map(lambda x: jnp.zeros(x.size, x.dtype), params)

    def with_gradient(state: Any, grad: Callable[[], Any]) -> Any:
        """The state with another gradient in it, where it keeps one."""
        return state if state.grad is None else state._replace(grad=grad())

    def init(params: Any) -> Any:
        return with_gradient(search.init(start(params)), lambda: jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        value: Array,
        grad: Any,
        value_fn: Callable[..., Array],
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        names = inspect.signature(value_fn).parameters
        loss = partial(value_fn, **{name: extra for name, extra in extra_args.items() if name in names})
        rest = {name: extra for name, extra in extra_args.items() if name not in names}
        check_params("line_search", params)
        at, zeros = start(params)

        def searched(updates: Any, state: Any, params: Any, value: Array, grad: Any) -> Any:
            slope = whole.inner(jax.tree.map(jnp.conj, updates), grad)
            return search.update(
                (jnp.ones_like(at), zeros),
                with_gradient(state, lambda: (jnp.zeros_like(at), jax.tree.map(jnp.ravel, state.grad))),
                (at, zeros),
                value=value,
                grad=_finite(slope.astype(at.dtype), grad),
                value_fn=_along(loss, whole, params, updates, partition),
                **rest,
            )

        _, found = in_step(searched, whole.workers)(updates, state, params, value, grad)
        found = with_gradient(found, lambda: _restored(found.grad[0], found.grad[1], params))
        scaled = jax.tree.map(lambda u: (found.learning_rate * u).astype(u.dtype), updates)
        return scaled, found

    return optax.GradientTransformationExtraArgs(init, update)


def check_search(name: str, search: Any) -> None:
    """Refuse what is none of optax's line searches: those keep how far they went, and perhaps a gradient."""
    state = None
    if isinstance(search, optax_for("line_search").GradientTransformationExtraArgs):
        state = jax.eval_shape(search.init, (jnp.zeros(()), {}))
    if not (hasattr(state, "learning_rate") and hasattr(state, "grad")):
        raise InvalidTypeError(
            f"`{name}` (={search!r}) must be one of optax's line searches, as optax.scale_by_zoom_linesearch(20)."
        )


def value_and_grad_from_state(
    value_fn: Callable[..., Array], *, partition: Partition | None = None
) -> Callable[..., tuple[Array, Any]]:
    """`optax.value_and_grad_from_state` of the sum of the workers' losses: what a line search found, if it is there.

    **Arguments:**

    - `value_fn`: a function of the parameters, and more, that returns this worker's part of the loss.
    - `partition`: the workers that call it. Default: all of the world.

    **Returns:** a function of the same arguments and `state`, an optimiser's, that returns what
    `dj.value_and_grad(value_fn)` does, without evaluating it where the state holds it.

    **Raises:** `SetupError` where optax is not installed.
    """
    optax_for("value_and_grad_from_state")

    def value_and_gradient(params: Any, *args: Any, state: Any, **kwargs: Any) -> tuple[Array, Any]:
        found = [its for its in jax.tree.leaves(state, is_leaf=_of_search) if _of_search(its)]
        if len(found) != 1 or found[0].value is None or found[0].grad is None:
            raise InvalidArgumentError(
                "`state` must hold a value and a gradient, of one line search: the state of a zoom line search does, "
                "and that of a backtracking one with `store_grad=True`."
            )
        value, grad = found[0].value, found[0].grad
        evaluated = value_and_grad(value_fn, partition=partition)

        def anew() -> tuple[Array, Any]:
            anew_value, gradient = evaluated(params, *args, **kwargs)
            return anew_value.astype(value.dtype), gradient

        return lax.cond(jnp.isfinite(value), lambda: (value, grad), anew)

    return value_and_gradient


def _of_search(state: Any) -> bool:
    """Whether it is the state of a line search of optax's: parameters may have the names of its entries."""
    return isinstance(state, tuple) and {"learning_rate", "value", "grad"} <= set(getattr(state, "_fields", ()))


def _along(
    loss: Callable[[Any], Array], whole: Whole, params: Any, updates: Any, partition: Partition | None
) -> Callable[[Any], Array]:
    """The whole loss as a function of how far to go along `updates`; its derivative is the slope."""

    def at(distance: Array) -> Any:
        return jax.tree.map(lambda p, u: (p + distance * u).astype(p.dtype), params, updates)

    @jax.custom_jvp
    def value(point: tuple[Array, Any]) -> Array:
        return summed(jnp.asarray(loss(at(point[0]))), whole.workers).astype(point[0].dtype)

    @value.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
        (((distance, _),), ((along, beside),)) = primals, tangents
        found, gradient = value_and_grad(loss, partition=partition)(at(distance))
        slope = whole.inner(jax.tree.map(jnp.conj, updates), gradient).astype(distance.dtype)
        slope, gradient = _finite(slope, gradient)
        products = jax.tree.map(lambda g, d: jnp.sum(jnp.real(g * d)).astype(distance.dtype), gradient, beside)
        return found.astype(distance.dtype), sum(jax.tree.leaves(products), slope * along)

    return value


def _restored(slope: Array, gradient: Any, params: Any) -> Any:
    """The gradient in the shapes of the parameters; what was no number, and so left out, is none again."""
    good = jnp.isfinite(slope)
    return jax.tree.map(lambda g, x: jnp.where(good, g, jnp.nan).astype(g.dtype).reshape(x.shape), gradient, params)


def _finite(slope: Array, gradient: Any) -> tuple[Array, Any]:
    """The two, flat, with zeros for a gradient that is no number somewhere: on all workers, since the slope says so."""
    good = jnp.isfinite(slope)
    return slope, jax.tree.map(lambda g: jnp.where(good, jnp.ravel(g), 0).astype(g.dtype), gradient)
