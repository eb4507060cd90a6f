"""Differentiation of the sum of the workers' scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.functional import all_sum_reduce
from distdl_jax.jax_compat import hiding_frames, mapped_sizes
from distdl_jax.partitions.partition import Partition, check_workers
from distdl_jax.source_lines import function_name
from distdl_jax.tracing.context import trace_context
from distdl_jax.tracing.tie import tie
from distdl_jax.transforms.adjoint_check import same_adjoints
from distdl_jax.transforms.equal_losses import note_loss
from distdl_jax.transports.agreement import agree
from distdl_jax.transports.open_world import world_of
from distdl_jax.validation import check_function, checked_boolean, checked_integers

P = ParamSpec("P")
Aux = TypeVar("Aux")


@overload
def value_and_grad(
    fun: Callable[P, tuple[Any, Aux]],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    partition: Partition | None = None,
    **options: Any,
) -> Callable[P, tuple[tuple[jax.Array, Aux], Any]]: ...


@overload
def value_and_grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[False] = False,
    *,
    partition: Partition | None = None,
    **options: Any,
) -> Callable[P, tuple[jax.Array, Any]]: ...


@overload
def value_and_grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    partition: Partition | None = None,
    **options: Any,
) -> Callable[P, tuple[Any, Any]]: ...


def value_and_grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    partition: Partition | None = None,
    **options: Any,
) -> Callable[P, tuple[Any, Any]]:
    """Return a function that computes the sum over workers of the scalars returned by `fun`, and its gradient.

    It is `jax.value_and_grad` for a function that returns this worker's part of a scalar. It differentiates f = f_0 +
    ... + f_{P-1}, the sum over workers of the results of `fun`, and every worker gets the total value f and the
    gradient with respect to its own arguments. A loss must therefore be divided among the workers (each returns the
    part of its own samples or outputs, a worker without outputs 0), not repeated by them.

    **Arguments:**

    - `fun`: returns a scalar, or a pair of it and anything else with `has_aux`. On some workers the scalar may be a
      constant, ignore outputs, or be computed from constants: all workers still run the same adjoints, in the reverse
      order of the movements, including those in loops, branches, `jax.checkpoint`, `jax.vmap` and nested jits.
    - `argnums`, `has_aux`, `options`: as in `jax.value_and_grad`.
    - `partition`: the workers to sum over, all of which must call it. Default: all of COMM_WORLD; in a program with
      partitions of other communicators only, all of the largest of these.

    **Returns:** a function that returns `(value, gradient)`, or `((value, aux), gradient)` with `has_aux`. `aux` is
    this worker's own.

    **Raises:** errors of `fun` and of `jax.value_and_grad`, such as `TypeError` if `fun` does not return a scalar; if
    one worker raises, the others raise a `PlanError`. `InvalidTypeError` if `fun` is not a function, `argnums` are not
    integers, `has_aux` is not True or False, or `partition` not a partition; `PlanError`, on all workers, if their
    programs would not complete together.

    Inside of a function of `dj.distribute`, on whole arrays, it is `jax.value_and_grad`.

    Like `jax.jit`, it traces `fun`: once, even if called outside of jit. In the first call of a function of `dj.jit`
    that takes the derivative, and with `DISTDL_JAX_DEBUG=1` in each call, it warns (`CopiesWarning`) if the losses are
    equal on all workers that have one, so that the value counts once for each. `dj.part` is a worker's part of it.

    >>> import jax.numpy as jnp
    >>> value, gradient = value_and_grad(lambda x: jnp.sum(x**2))(jnp.arange(3.0))
    >>> float(value), gradient.tolist()
    (5.0, [0.0, 2.0, 4.0])

    Source: Hewett and Grady (2020), inner products of distributed tensors; `docs/contract.md`.
    """
    argnums = _checked_argnums(fun, argnums, partition)
    has_aux = checked_boolean("has_aux", has_aux)
    local = _derivative_of_sum(jax.value_and_grad, fun, argnums, has_aux, partition, options)

    @wraps(fun)
    def value_and_gradient(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, Any]:
        if trace_context.whole_program:
            return jax.value_and_grad(fun, argnums, has_aux, **options)(*args, **kwargs)
        workers = all_workers() if partition is None else partition
        (value, gradient), traced = local(*args, **kwargs)
        value, *aux = value if has_aux else (value,)
        note_loss(function_name(fun), value, workers, traced)
        # Under jax.vmap even for a constant: all workers have the same number of values to sum.
        value = summed(tie(value, *(x for x in jax.tree.leaves((args, kwargs)) if mapped_sizes(x))), workers)
        return (value, *aux) if has_aux else value, gradient

    return hiding_frames(value_and_gradient)


@overload
def grad(
    fun: Callable[P, tuple[Any, Aux]],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    partition: Partition | None = None,
    **options: Any,
) -> Callable[P, tuple[Any, Aux]]: ...


@overload
def grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    partition: Partition | None = None,
    **options: Any,
) -> Callable[P, Any]: ...


def grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    partition: Partition | None = None,
    **options: Any,
) -> Callable[P, Any]:
    """Return a function that computes the gradient of the sum over workers of the scalars returned by `fun`.

    It is `jax.grad` for functions that move data, and `value_and_grad` without the value.

    It differentiates f_0 + ... + f_{P-1}, as everywhere. The value is not summed, so the only messages are those of
    `fun` and their adjoints; the gradient of a gradient is `grad(lambda x: jnp.vdot(grad(f)(x), v))`.

    **Arguments:**

    - `fun`: as in `value_and_grad`: it returns this worker's part of a scalar.
    - `argnums`, `has_aux`, `options`: as in `jax.grad`.
    - `partition`: the workers that call it. Default: as in `value_and_grad`.

    **Returns:** a function that returns this worker's gradient, or `(gradient, aux)` with `has_aux`.

    **Raises:** errors of `fun` and of `jax.grad`; `InvalidTypeError` as in `value_and_grad`; `PlanError`, on all
    workers, if their programs would not complete together.

    >>> import jax.numpy as jnp
    >>> grad(lambda x: jnp.sum(x**2))(jnp.arange(3.0)).tolist()
    [0.0, 2.0, 4.0]

    Source: Hewett and Grady (2020), inner products of distributed tensors; `docs/contract.md`.
    """
    argnums = _checked_argnums(fun, argnums, partition)
    has_aux = checked_boolean("has_aux", has_aux)
    derivative = _derivative_of_sum(jax.grad, fun, argnums, has_aux, partition, options)
    return hiding_frames(wraps(fun)(lambda *args, **kwargs: derivative(*args, **kwargs)[0]))


def _checked_argnums(fun: Any, argnums: Any, partition: Any) -> int | tuple[int, ...]:
    """Return `argnums` as integers; reject invalid arguments."""
    check_function("fun", fun)
    check_workers("partition", partition)
    numbers = checked_integers("argnums", argnums, or_one=True)
    return numbers if isinstance(argnums, Iterable) else numbers[0]


def _derivative_of_sum(
    derivative: Callable[..., Callable[..., Any]],
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...],
    has_aux: bool,
    partition: Partition | None,
    options: dict[str, Any],
) -> Callable[..., Any]:
    """Return `derivative(fun, argnums, has_aux, **options)`, with the same adjoints on all workers.

    Its result comes with `fun` as it was traced, if it was.
    """

    def local(fun: Callable[..., Any]) -> Callable[..., Any]:
        return derivative(fun, argnums, has_aux, **options)

    fun = _with_scalar_loss(fun, has_aux)

    @wraps(fun)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        if trace_context.whole_program:  # of which there is one, on whole arrays
            return local(fun)(*args, **kwargs), None
        workers = all_workers() if partition is None else partition
        numbers = argnums if isinstance(argnums, tuple) else (argnums,)
        places = [n + len(args) * (n < 0) for n in numbers]
        if not all(0 <= place < len(args) for place in places):
            raise InvalidArgumentError(f"`argnums` (={argnums}) must name positional arguments, 0 to {len(args) - 1}.")
        chosen, traced = same_adjoints(workers, local, fun, has_aux, args, kwargs, places)
        return chosen(*args), traced

    return hiding_frames(differentiated)


_PART = (
    "return its sum divided by the size of the whole tensor, which is this worker's part of the mean (jnp.mean would "
    "divide by the size of the block), or use a loss of distdl_jax.nn, like nn.DistributedMSELoss"
)


def _with_scalar_loss(fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Return `fun` with a check that its loss is a scalar, and an error that tells what it returned."""

    @wraps(fun)
    def checked(*args: Any, **kwargs: Any) -> Any:
        with trace_context.set(adds_up="dj.grad or dj.value_and_grad"):
            result = fun(*args, **kwargs)
        loss = result[0] if has_aux and isinstance(result, tuple | list) and result else result
        is_number = hasattr(loss, "shape") or isinstance(loss, int | float | complex)
        if not is_number or jnp.shape(loss):
            what = f"an array of shape {jnp.shape(loss)}: {_PART}" if is_number else type(loss).__name__
            raise InvalidTypeError(f"`fun` (={function_name(fun)}) must return a scalar loss, but returned {what}.")
        return result

    return checked


def all_workers() -> Partition:
    """Return the partition of all workers: the default of functions that sum over workers."""
    world = world_of(())
    return Partition() if world is None else Partition.of_workers(world, range(world.size))


def summed(value: jax.Array, workers: Partition) -> jax.Array:
    """Return the sum of the workers' values, in the dtype of those that are not Python numbers."""
    if workers.size > 1 and workers.active:
        mine = (str(value.dtype), jax.typeof(value).weak_type)
        dtypes_of = agree(workers.world, workers.ranks, f"value_and_grad on {workers.describe()}", lambda: mine)
        dtypes = {dtype for dtype, weak in dtypes_of.values() if not weak} or {dtype for dtype, _ in dtypes_of.values()}
        value = jax.lax.convert_element_type(value, jnp.result_type(*sorted(dtypes)))  # including Python numbers
    return all_sum_reduce(value, workers, axes_keep=())
