"""optax's line searches on the sum of the workers' losses.

A line search uses one number, the distance, and two that depend on it: the value there, and the slope. So optax's
searches run on the distance, the same on every worker, with the value and slope of the total loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.functional import all_sum_reduce
from distdl_jax.jax_compat import bound_again
from distdl_jax.optim.norms import Whole, check_params, optax_for
from distdl_jax.partitions.partition import Partition
from distdl_jax.tracing.jaxprs import Call, While, evaluate, structure
from distdl_jax.transforms.gradients import summed, value_and_grad

if TYPE_CHECKING:
    import optax


def line_search(
    search: optax.GradientTransformationExtraArgs, specs: Any, *, partition: Partition | None = None
) -> optax.GradientTransformationExtraArgs:
    """Return one of optax's line searches on the total loss, with inner products of whole tensors.

    **Arguments:**

    - `search`: `optax.scale_by_zoom_linesearch(...)` or `optax.scale_by_backtracking_linesearch(...)`.
    - `specs`: a pytree of `TensorSpec`, one for each leaf of the parameters.
    - `partition`: the workers that call it. Default: all of the world.

    **Returns:** an `optax.GradientTransformationExtraArgs` with the state of `search`. All workers call its `update`:
    with `value`, from `dj.value_and_grad`, `grad`, this worker's blocks of the gradient, and `value_fn`, a function of
    the parameters that returns this worker's part of the loss. Further keywords are passed to `value_fn`. All workers
    take the same steps, as decided on worker 0.

    **Raises:** `SetupError` if optax is not installed, `InvalidTypeError` if `search` is not a line search; its
    `update` raises like `dj.optim.global_norm`.

    >>> import optax
    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> specs, params = dj.TensorSpec((2,), P), jnp.array([3.0, 4.0])
    >>> def loss(params):
    ...     return jnp.sum((params - 1) ** 2)
    >>> search = line_search(optax.scale_by_backtracking_linesearch(20), specs)
    >>> value, gradient = dj.value_and_grad(loss)(params)
    >>> updates, _ = search.update(
    ...     -gradient, search.init(params), params, value=value, grad=gradient, value_fn=loss
    ... )
    >>> bool(loss(params + updates) < value)
    True
    """
    optax = optax_for("line_search")
    check_search("search", search)
    whole = Whole("line_search", specs, partition)

    def start(params: Any) -> tuple[Array, Any]:
        """Return the distance, and zeros in place of the gradient in the state, without scalars."""
        dtypes = whole.dtypes(params)
        dtype = jnp.finfo(dtypes[0]).dtype if dtypes else jnp.result_type(float)
        return jnp.zeros((), dtype), jax.tree.map(lambda x: jnp.zeros(x.size, x.dtype), params)

    def with_gradient(state: Any, grad: Callable[[], Any]) -> Any:
        """Return the state with another gradient in it, if it stores one."""
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

        # optax's search sees a function of one number, the distance along the update: so its inner products need no
        # other worker, and the slope at the start is the only sum over the whole tensors.
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

        # Its loops test floating values. All workers follow the first one's, lest rounding ends one of them earlier.
        _, new_state = with_synced_loops(searched, whole.workers)(updates, state, params, value, grad)
        new_state = with_gradient(new_state, lambda: _restored(new_state.grad[0], new_state.grad[1], params))
        scaled = jax.tree.map(lambda u: (new_state.learning_rate * u).astype(u.dtype), updates)
        return scaled, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def check_search(name: str, search: Any) -> None:
    """Reject a value that is not one of optax's line searches, by its state."""
    state = None
    if isinstance(search, optax_for("line_search").GradientTransformationExtraArgs):
        state = jax.eval_shape(search.init, (jnp.zeros(()), {}))
    if not (hasattr(state, "learning_rate") and hasattr(state, "grad")):
        raise InvalidTypeError(
            f"`{name}` (={search!r}) must be one of optax's line searches, such as optax.scale_by_zoom_linesearch(20)."
        )


def value_and_grad_from_state(
    value_fn: Callable[..., Array], *, partition: Partition | None = None
) -> Callable[..., tuple[Array, Any]]:
    """Return `optax.value_and_grad_from_state` of the sum of the workers' losses: a line search's result, if stored.

    **Arguments:**

    - `value_fn`: a function of the parameters, and more, that returns this worker's part of the loss.
    - `partition`: the workers that call it. Default: all of the world.

    **Returns:** a function of the same arguments and `state`, an optimiser's, with the result of
    `dj.value_and_grad(value_fn)`, without evaluating it if the state has it.

    **Raises:** `SetupError` if optax is not installed.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> specs, params = dj.TensorSpec((2,), P), jnp.array([3.0, 4.0])
    >>> def loss(params):
    ...     return jnp.sum((params - 1) ** 2)
    >>> optimiser = dj.optim.lbfgs(specs)
    >>> value, gradient = value_and_grad_from_state(loss)(params, state=optimiser.init(params))
    >>> float(value), gradient.tolist()
    (13.0, [4.0, 6.0])
    """
    optax_for("value_and_grad_from_state")

    def value_and_gradient(params: Any, *args: Any, state: Any, **kwargs: Any) -> tuple[Array, Any]:
        searches = [search for search in jax.tree.leaves(state, is_leaf=_is_search) if _is_search(search)]
        if len(searches) != 1 or searches[0].value is None or searches[0].grad is None:
            raise InvalidArgumentError(
                "`state` must hold a value and a gradient, from one line search: the state of a zoom line search does, "
                "and so does that of a backtracking one with `store_grad=True`."
            )
        value, grad = searches[0].value, searches[0].grad
        evaluated = value_and_grad(value_fn, partition=partition)

        def computed() -> tuple[Array, Any]:
            new_value, gradient = evaluated(params, *args, **kwargs)
            return new_value.astype(value.dtype), gradient

        return lax.cond(jnp.isfinite(value), lambda: (value, grad), computed)

    return value_and_gradient


def _is_search(state: Any) -> bool:
    """Return whether a subtree is the state of one of optax's line searches, not a dict with such names."""
    return isinstance(state, tuple) and {"learning_rate", "value", "grad"} <= set(getattr(state, "_fields", ()))


def _along(
    loss: Callable[[Any], Array], whole: Whole, params: Any, updates: Any, partition: Partition | None
) -> Callable[[Any], Array]:
    """Return the total loss as a function of the distance along `updates`; its derivative is the slope."""

    def at(distance: Array) -> Any:
        return jax.tree.map(lambda p, u: (p + distance * u).astype(p.dtype), params, updates)

    @jax.custom_jvp
    def value(point: tuple[Array, Any]) -> Array:
        return summed(jnp.asarray(loss(at(point[0]))), whole.workers).astype(point[0].dtype)

    @value.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
        (((distance, _),), ((along, tangent),)) = primals, tangents
        loss_value, gradient = value_and_grad(loss, partition=partition)(at(distance))
        slope = whole.inner(jax.tree.map(jnp.conj, updates), gradient).astype(distance.dtype)
        slope, gradient = _finite(slope, gradient)
        products = jax.tree.map(lambda g, d: jnp.sum(jnp.real(g * d)).astype(distance.dtype), gradient, tangent)
        return loss_value.astype(distance.dtype), sum(jax.tree.leaves(products), slope * along)

    return value


def _restored(slope: Array, gradient: Any, params: Any) -> Any:
    """Return the gradient in the shapes of the parameters, NaN if it was omitted because it was not finite."""
    good = jnp.isfinite(slope)
    return jax.tree.map(lambda g, x: jnp.where(good, g, jnp.nan).astype(g.dtype).reshape(x.shape), gradient, params)


def _finite(slope: Array, gradient: Any) -> tuple[Array, Any]:
    """Return the slope and the flat gradient, which is 0 on all workers if the slope is not finite."""
    good = jnp.isfinite(slope)
    return slope, jax.tree.map(lambda g: jnp.where(good, jnp.ravel(g), 0).astype(g.dtype), gradient)


def with_synced_loops(fun: Callable[..., Any], workers: Partition) -> Callable[..., Any]:
    """Return `fun` with while loops whose carried scalars are replaced by the first worker's after each pass.

    Results of equal operations on equal numbers may differ between workers in the last bit, since each worker's program
    is compiled separately. One worker would then leave the loop, and the others would wait for it.
    """

    def rule(eqn: Any, args: list[Any]) -> Sequence[Any]:
        match structure(eqn):
            case While() as loop:
                return _synced_loop(loop, args, workers)
            case Call("jit" | "call", body):
                return evaluate(body, args, rule)
        return bound_again(eqn, args)

    def synced(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shapes), evaluate(program, jax.tree.leaves(args), rule))

    return synced


def _synced_loop(loop: While, args: list[Any], workers: Partition) -> Sequence[Any]:
    first, second = loop.condition_constants, loop.condition_constants + loop.body_constants
    condition_constants, body_constants, carried = args[:first], args[first:second], args[second:]
    condition, body = jaxpr_as_fun(loop.condition), jaxpr_as_fun(loop.body)
    return lax.while_loop(
        lambda carried: condition(*condition_constants, *carried)[0],
        lambda carried: _sync(body(*body_constants, *carried), workers),
        _sync(carried, workers),
    )


def _sync(carried: Sequence[Any], workers: Partition) -> list[Array]:
    """Return the carried values with the first worker's scalars, in one message."""
    arrays = [jnp.asarray(x) for x in carried]
    scalars = [x for x in arrays if x.ndim == 0]
    if workers.size < 2 or not workers.active or not scalars:
        return arrays
    own = jnp.stack([x.astype(float) for x in scalars])
    first = iter(all_sum_reduce(jnp.where(workers.rank == 0, own, 0), workers, axes_keep=()))
    return [next(first).astype(x.dtype) if x.ndim == 0 else x for x in arrays]
