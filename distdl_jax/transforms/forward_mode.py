"""Directional derivatives, and transposes, of functions that move data between workers.

A movement is differentiated only in reverse mode, by its adjoint, and that suffices: the derivative of f at x is the
linear map whose transpose is the pullback w -> vjp(w), so its value along v is the pullback's own pullback, applied to
v. The movements are linear, so transposing one twice runs it forward again: it is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.functional.movement import to_be_transposed
from distdl_jax.partitions.partition import Partition, check_workers
from distdl_jax.tracing.adjoint_order import is_inexact, note_anchor, with_all_adjoints
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.tie import tie
from distdl_jax.transforms.adjoint_check import same_adjoints
from distdl_jax.transforms.linearity import depends_on_first
from distdl_jax.transforms.opaque_call import call_by
from distdl_jax.transforms.tangents import Varying, check_alike, check_tangents, described
from distdl_jax.transports.agreement import agree
from distdl_jax.validation import check_function, check_numbers, checked_boolean, checked_integers

Y = TypeVar("Y")


def jvp(
    fun: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    has_aux: bool = False,
    *,
    partition: Partition | None = None,
) -> Any:
    """Evaluate `fun` and its derivative along a direction: `jax.jvp` for functions that move data.

    With x the tensors with the workers' `primals` as blocks, and v those of their `tangents`, this is f(x) and f'(x) v:
    each worker gets its blocks of both. All workers call it, those without data with zero-volume arrays. `jax.jvp`
    itself can't pass through a movement; here the pullback is itself differentiated. So `fun` is run once, its adjoint
    once at a cotangent of 0, and the derivative once; for many directions use `linearize`.

    **Arguments:**

    - `fun`: a function of `primals`; it returns a pytree of arrays, this worker's blocks, or a pair of that and
      anything else with `has_aux`.
    - `primals`, `tangents`: tuples or lists of pytrees of the same structure, shapes and dtypes. Leaves that are not
      floating or complex have tangents of dtype float0, as in `jax.jvp`.
    - `partition`: the workers that call it. Default: all of the world.

    **Returns:** `(value, tangent)`, or `(value, tangent, aux)` with `has_aux`.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if `tangents` don't match `primals`.

    >>> import jax.numpy as jnp
    >>> value, tangent = jvp(lambda x: x**2, (jnp.array([1.0, 3.0]),), (jnp.array([1.0, 0.5]),))
    >>> value.tolist(), tangent.tolist()
    ([1.0, 9.0], [2.0, 3.0])

    Source: Hewett and Grady (2020), movements as linear operators; transposed twice, a linear map is itself.
    """
    if trace_context.whole_program:  # of which there is one, on whole arrays; so below
        return jax.jvp(fun, tuple(primals), tuple(tangents), has_aux)
    _check_together("jvp", fun, partition, lambda: check_tangents(primals, tangents), has_aux)
    point, direction = Varying(tuple(primals)), Varying(tuple(tangents), like=tuple(primals))
    along, *_ = _same_adjoints(
        _along, _of_leaves(fun, point, has_aux), (point.leaves, direction.leaves), partition, transposes="jvp"
    )
    (value, *aux), tangent = along(point.leaves, direction.leaves)
    return (value, Varying(value).tangent(tangent), *aux)


def linearize(fun: Callable[..., Any], *primals: Any, has_aux: bool = False, partition: Partition | None = None) -> Any:
    """Evaluate `fun` at a point, and return its derivative there: `jax.linearize` for functions that move data.

    **Arguments:**

    - `fun`, `has_aux`, `partition`: as in `jvp`.
    - `primals`: the arguments of `fun`, this worker's blocks, one by one.

    **Returns:** `(value, derivative)`, or `(value, derivative, aux)` with `has_aux`. `derivative(*tangents)` is this
    worker's blocks of f'(x) v; all workers call it. This does not run `fun` again.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if `tangents` don't match `primals`.

    >>> import jax.numpy as jnp
    >>> value, derivative = linearize(lambda x: x**2, jnp.array([1.0, 3.0]))
    >>> derivative(jnp.array([1.0, 0.0])).tolist(), derivative(jnp.array([0.0, 1.0])).tolist()
    ([2.0, 0.0], [0.0, 6.0])
    """
    if trace_context.whole_program:
        return jax.linearize(fun, *primals, has_aux=has_aux)  # type: ignore[call-overload]
    _check_together("linearize", fun, partition, lambda: check_numbers("primals", primals), has_aux)
    point = Varying(primals)
    zeros = jax.tree.map(jnp.zeros_like, point.leaves)
    _, of_leaves, traced = _same_adjoints(
        _along, _of_leaves(fun, point, has_aux), (point.leaves, zeros), partition, transposes="linearize"
    )
    linearized = partial(_linearized, of_leaves)
    both = call_by(partition, linearized, point.leaves) if traced else linearized(point.leaves)
    (value, *aux), pushforward = both

    def derivative(*tangents: Any) -> Any:
        _check_together("linearize", fun, partition, lambda: check_tangents(primals, tangents))
        direction = Varying(tangents, like=primals).leaves
        return Varying(value).tangent(call_by(partition, pushforward, direction))

    return (value, derivative, *aux)


def hvp(
    fun: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    argnums: int | Sequence[int] = 0,
    *,
    partition: Partition | None = None,
) -> Any:
    """Multiply the Hessian of the sum of the workers' scalars by a vector.

    It is `jax.jvp(jax.grad(f), primals, tangents)[1]`. With f = f_0 + ... + f_{P-1}, the sum of the results of `fun` on
    the workers (see `value_and_grad`), and x and v the tensors with `primals` and `tangents` as blocks, each worker
    gets its blocks of f''(x) v. The Hessian is symmetric, so it is the gradient's pullback, applied to v.

    **Arguments:**

    - `fun`: a function of `primals` that returns this worker's part of a scalar.
    - `primals`, `tangents`: as in `jvp`.
    - `argnums`: the argument or arguments with respect to which to differentiate, as in `jax.grad`. The directions are
      for all of them.
    - `partition`: the workers that call it. Default: all of the world.

    **Returns:** a pytree like that argument, or a tuple of them if `argnums` is a sequence.

    **Raises:** `InvalidTypeError` or `InvalidArgumentError`, on every worker, if `tangents` don't match `primals`;
    `InvalidTypeError` if `fun` does not return a real scalar.

    >>> import jax.numpy as jnp
    >>> hvp(lambda x: jnp.sum(x**3), (jnp.array([1.0, 2.0]),), (jnp.array([1.0, 10.0]),)).tolist()
    [6.0, 120.0]
    """
    if trace_context.whole_program:
        return jax.jvp(jax.grad(fun, argnums), tuple(primals), tuple(tangents))[1]
    chosen: tuple[int, ...] = ()

    def check() -> None:
        nonlocal chosen
        chosen = checked_integers("argnums", argnums, or_one=True)
        check_tangents(primals, tangents)
        if any(not -len(primals) <= number < len(primals) for number in chosen):
            raise InvalidArgumentError(f"`argnums` (={argnums}) must name arguments among {len(primals)} `primals`.")

    _check_together("hvp", fun, partition, check)
    point, direction = Varying(tuple(primals)), Varying(tuple(tangents), like=tuple(primals))

    @wraps(fun)
    def of_leaves(leaves: list[Array], _: Any = None) -> Array:
        return fun(*point.filled(leaves))

    times, *_ = _same_adjoints(
        _hessian_times, of_leaves, (point.leaves, direction.leaves), partition, has_aux=False, transposes="hvp"
    )
    product = times(point.leaves, direction.leaves)
    rows = point.tangent(product)
    return rows[argnums] if isinstance(argnums, int) else tuple(rows[number] for number in chosen)


def linear_transpose(
    fun: Callable[..., Y], *primals: Any, partition: Partition | None = None
) -> Callable[[Y], tuple[Any, ...]]:
    """Return the adjoint of `fun`: `jax.linear_transpose` for linear functions that move data.

    With F the linear map from all workers' arguments to all workers' results, the returned function is F*, in the inner
    product that is summed over workers: <F x, y> = <x, F* y>. It is exact; for an affine `fun` it is the adjoint of the
    linear part. `fun` is run once, at 0.

    **Arguments:**

    - `fun`: a linear function of `primals`.
    - `primals`: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them, floating or complex: only shapes and dtypes
      matter.
    - `partition`: the workers that call it. Default: all of the world.

    **Returns:** a function of a pytree like `fun`'s result that returns a tuple like `primals`.

    **Raises:** `InvalidTypeError`, on every worker, if an argument is not floating or complex, or the transpose's
    argument is not like the result of `fun`; `InvalidArgumentError` if `fun` is not linear.

    >>> import jax.numpy as jnp
    >>> transpose = linear_transpose(lambda x: 3 * x[:2], jnp.zeros(3))
    >>> transpose(jnp.array([1.0, 2.0]))[0].tolist()
    [3.0, 6.0, 0.0]
    """
    if trace_context.whole_program:
        return jax.linear_transpose(fun, *primals)

    def check() -> None:
        for path, leaf in jax.tree.leaves_with_path(primals):
            if not (hasattr(leaf, "dtype") and is_inexact(leaf)):
                raise InvalidTypeError(
                    f"`primals` must hold floating or complex arrays, but primals{jax.tree_util.keystr(path)} is "
                    f"{described(leaf)}."
                )

    _check_together("linear_transpose", fun, partition, check)
    # A linear function has the same transpose at every point; at 0 an affine one loses its constant.
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), primals)

    @wraps(fun)
    def of_primals(primals: Any, _: Any = None) -> tuple[Array, Any]:
        return jnp.zeros(()), fun(*primals)

    _, chosen, _ = _same_adjoints(_transposed_at_zero, of_primals, (zeros, None), partition)
    (anchor, value), pullback = jax.vjp(chosen, zeros)
    note_anchor(anchor)

    def check_linear() -> None:
        if depends_on_first(lambda primals, cotangent: jax.vjp(fun, *primals)[1](cotangent), zeros, value):
            raise InvalidArgumentError("`fun` must be linear, but its derivative depends on the point.")

    _check_together("linear_transpose", fun, partition, check_linear)

    def transpose(cotangent: Any) -> Any:
        _check_together(
            "linear_transpose",
            fun,
            partition,
            lambda: check_alike("the transpose's argument", cotangent, value),
        )
        (result,) = call_by(partition, pullback, (jnp.zeros(()), cotangent))
        return result

    return transpose


_LeafFunction = Callable[..., Any]
"""A function of the varying leaves; it returns a zero that depends on every movement, and more."""


def _same_adjoints(
    derivative: Callable[[_LeafFunction], Callable[..., Any]],
    fun: _LeafFunction,
    args: tuple[Any, Any],
    partition: Partition | None,
    has_aux: bool = True,
    transposes: str | None = None,
) -> tuple[Callable[..., Any], _LeafFunction, bool]:
    """Return `derivative` of `fun`, with the same adjoints on all workers; the function that it then differentiates;
    and whether that could be traced.

    To be called with `args`; `fun` is differentiated with respect to the first of them.
    """
    chosen: list[_LeafFunction] = []

    def of(fun: _LeafFunction) -> Callable[..., Any]:
        chosen.append(fun)
        return derivative(fun)

    workers = Partition() if partition is None else partition
    differentiated, traced = same_adjoints(workers, of, fun, has_aux, args, {}, (0,), transposes)
    return differentiated, chosen[-1], traced is not None


def _of_leaves(fun: Callable[..., Any], point: Varying, has_aux: bool) -> _LeafFunction:
    """Return `fun` of the varying leaves of `point`: a zero, the varying leaves of its value, and all results."""

    @wraps(fun)
    def of_leaves(leaves: list[Array], _: Any = None) -> tuple[Array, tuple[list[Array], tuple[Any, ...]]]:
        result = fun(*point.filled(leaves))
        value, *rest = result if has_aux else (result,)
        return jnp.zeros(()), (Varying(value).leaves, (value, *rest))

    return of_leaves


def _linearized(of_leaves: _LeafFunction, leaves: list[Array]) -> tuple[tuple[Any, ...], Callable[[list[Array]], Any]]:
    """Return the function's results, and its derivative, from leaves to leaves.

    The pullback at x, w -> f'(x)* w, is linear, so its own pullback, at 0 as anywhere, is v -> f'(x) v.
    """

    def with_aux(leaves: list[Array]) -> tuple[Any, tuple[Any, ...]]:
        anchor, (varying, returned) = of_leaves(leaves)
        return (anchor, varying), returned

    value, pullback, returned = jax.vjp(with_aux, leaves, has_aux=True)
    note_anchor(value[0])
    _, pushforward = _anchored_vjp(_transposable(pullback), jax.tree.map(jnp.zeros_like, value))
    return returned, Partial(_pushed, pushforward)


def _pushed(pushforward: Callable[..., Any], direction: list[Array]) -> Any:
    ((_, tangent),) = pushforward((direction,))
    return tangent


def _along(of_leaves: _LeafFunction) -> Callable[..., Any]:
    def along(leaves: list[Array], direction: list[Array]) -> tuple[tuple[Any, ...], list[Array]]:
        returned, pushforward = _linearized(of_leaves, leaves)
        return returned, pushforward(direction)

    return along


def _hessian_times(part: _LeafFunction) -> Callable[..., list[Array]]:
    def value_and_gradient(leaves: list[Array]) -> tuple[Array, list[Array]]:
        value, pullback = jax.vjp(part, leaves)
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise InvalidTypeError(f"`fun` must return a real scalar, but returned {described(value)}.")
        return value, _transposable(pullback)(jnp.ones_like(value))[0]

    def times(leaves: list[Array], direction: list[Array]) -> list[Array]:
        # The value too: the gradient alone may not depend, on this worker, on the movements of `fun`.
        (value, _), pullback = _anchored_vjp(value_and_gradient, leaves)
        product: list[Array] = pullback((tie(jnp.zeros_like(value), *direction), direction))[0]
        return product

    return times


def _transposed_at_zero(of_primals: _LeafFunction) -> Callable[..., Any]:
    def transposed(primals: Any, _: Any) -> Any:
        results, pullback = jax.vjp(of_primals, primals)
        return pullback(jax.tree.map(jnp.zeros_like, results))

    return transposed


def _anchored_vjp(fun: Callable[..., Any], primals: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return `jax.vjp(fun, primals)`, whose pullback runs the adjoint of every movement in `fun`; it is a pytree."""
    anchored = with_all_adjoints(lambda primals: (jnp.zeros(()), fun(primals)), has_aux=True)
    (anchor, value), pullback = jax.vjp(anchored, primals)
    note_anchor(anchor)
    return value, Partial(_pulled_back, pullback)


def _pulled_back(pullback: Callable[..., Any], cotangent: Any) -> Any:
    # The anchor's cotangent is batched like the others, so under `jax.vmap` all movements are batched on all workers,
    # including one whose part of the function does not depend on the mapped values.
    return pullback((tie(jnp.zeros(()), *jax.tree.leaves(cotangent)), cotangent))


def _transposable(pullback: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pullback that will itself be transposed."""

    def transposable(*cotangents: Any) -> Any:
        with to_be_transposed(True):
            return pullback(*cotangents)

    return transposable


def _check_together(
    name: str, fun: Any, partition: Partition | None, check: Callable[[], None], has_aux: bool = False
) -> None:
    """Make the check on all workers; if one raises, all do, before any communication."""
    check_workers("partition", partition)
    workers = Partition() if partition is None else partition

    def checked() -> None:
        check_function("fun", fun)
        checked_boolean("has_aux", has_aux)
        check()

    if workers.active:
        agree(workers.world, workers.ranks, f"the arguments of dj.{name} on {workers.describe()}", checked)
