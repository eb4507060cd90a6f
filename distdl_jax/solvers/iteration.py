"""What the solvers share: functions of blocks as programs, sums over all workers, and the agreement of a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun

from distdl_jax.agreement.agree import agree
from distdl_jax.agreement.shapes import shape_dtype_of
from distdl_jax.autodiff.opaque_call import evaluate_opaquely, with_constants_as_arguments
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.partition import Partition
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.primitives.all_sum_reduce import plan_all_sum_reduce
from distdl_jax.primitives.collectives import accumulation_dtype
from distdl_jax.tracing.adjoint_order import is_inexact, note_anchor, order_after_previous
from distdl_jax.tracing.forward_mode_error import never_transposed, reverse_only
from distdl_jax.tracing.scopes import body_scope
from distdl_jax.tracing.tie import nothing, tie
from distdl_jax.tracing.traced import Traced
from distdl_jax.validation import check_function, checked_integer, is_real

Leaves = list[Any]


class Info(NamedTuple):
    """How an iteration ended, the same on all workers that took part; without a derivative.

    - `converged`: whether the tolerance was reached.
    - `steps`: how many steps it took.
    - `residual`: the norm that is compared with the tolerance.

    >>> import jax.numpy as jnp, distdl_jax as dj
    >>> P = dj.Partition().grid([1])
    >>> x, info = dj.solvers.cg(lambda x: 2 * x, jnp.ones(3), P)
    >>> bool(info.converged), int(info.steps)
    (True, 1)
    """

    converged: Any
    steps: Any
    residual: Any


class Program:
    """A function of blocks, traced once: a value that is static to JAX.

    What it closes over, where that may be differentiated, it takes as its first arguments.
    """

    def __init__(self, traced: Traced) -> None:
        self._traced = traced

    def __call__(self, consts: Leaves, *args: Any) -> Leaves:
        """Return the leaves of its result."""
        with body_scope():
            return self._results(list(jaxpr_as_fun(self._traced.program)(*consts, *jax.tree.leaves(args))))

    def as_one(self, world: Any, consts: Leaves, *args: Any) -> Leaves:
        """Return the same, to be differentiated whole, or not at all, on every worker."""
        with body_scope():
            leaves = [*consts, *jax.tree.leaves(args)]
            return self._results(evaluate_opaquely(world.transport, self._traced.program, leaves))

    def _results(self, values: Leaves) -> Leaves:
        return jax.tree.leaves(self._traced.result(values))


def as_program(fun: Callable[..., Any], *args: Any) -> tuple[Program, Leaves, Any]:
    """Return `fun` as a program of the leaves of `args`, what it closes over, and its result's shapes and dtypes."""
    traced = Traced(fun, args, {}, range(len(args)))
    traced.program, consts = with_constants_as_arguments(traced.program)
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in traced.program.out_avals]
    return Program(traced), [jnp.asarray(const) for const in consts], traced.result(avals)


def real_inner(xs: Sequence[Array], ys: Sequence[Array], dtype: np.dtype) -> Array:
    """Return this worker's part of the real part of <x, y>, in `dtype`."""

    def parts(x: Array) -> list[Array]:
        each = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
        return [part.astype(dtype) for part in each]

    pairs = (pair for x, y in zip(xs, ys, strict=True) for pair in zip(parts(x), parts(y), strict=True))
    return sum((jnp.vdot(a, b, precision=lax.Precision.HIGHEST) for a, b in pairs), jnp.zeros((), dtype))


def summed(P: Partition, *values: Array) -> Array:
    """Return the sums over the workers of P of several numbers, in one message.

    Without an agreement: of a derivative JAX may trace more on one worker than on another.
    """
    numbers = jnp.stack(values)
    known = dict.fromkeys(P.ranks, ShapeDtype(numbers.shape, np.dtype(numbers.dtype)))
    sums: Array = plan_all_sum_reduce(known, P, axes_keep=()).run(P.world, numbers)
    return sums


class Sizes(NamedTuple):
    """What all workers know of the unknown: the dtype of its inner products, and the number of its elements."""

    dtype: np.dtype
    elements: int


def agree_on_sizes(label: str, P: Partition, name: str, x: Any, check: Callable[[], None]) -> Sizes:
    """Agree on the unknown `x`, an argument called `name`; all workers of P raise what `check` raises on any."""

    def contribute() -> list[ShapeDtype]:
        check()
        return [shape_dtype_of(name, leaf) for leaf in jax.tree.leaves(x)]

    found: dict[int, list[ShapeDtype]] = agree(P.world, P.ranks, f"{label} on {P.describe()}", contribute)
    if len(counts := {len(blocks) for blocks in found.values()}) > 1 or counts == {0}:
        raise InvalidArgumentError(
            f"`{name}` must be an array, or a tree with one leaf or more, as many on all workers, but workers give "
            f"{[len(blocks) for blocks in found.values()]}."
        )
    blocks = [block for each in found.values() for block in each]
    wrong = next((block for block in blocks if not jnp.issubdtype(block.dtype, jnp.inexact)), None)
    if wrong is not None:
        raise InvalidArgumentError(f"`{name}` must hold floating or complex numbers, but a worker gives {wrong}.")
    dtypes = [block.dtype for block in blocks if math.prod(block.shape)] or [blocks[0].dtype]
    real = np.dtype(jnp.finfo(np.dtype(jnp.result_type(*dtypes))).dtype)
    return Sizes(accumulation_dtype(real), sum(math.prod(block.shape) for block in blocks))


def check_like(argument: str, given: Any, name: str, x: Any) -> None:
    """Refuse what has not the structure, the shapes and the dtypes of `x`, an argument called `name`.

    `argument` says what it is: "`x0` must be", say.
    """

    def described(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: ShapeDtype(tuple(leaf.shape), np.dtype(leaf.dtype)), tree)

    def fits(got: Any, want: Any) -> bool:
        return bool(got.shape == want.shape and (got.dtype == want.dtype or got.size == 0))

    structures: list[Any] = [jax.tree.structure(tree) for tree in (given, x)]
    alike = structures[0] == structures[1]
    if not alike or not all(map(fits, jax.tree.leaves(given), jax.tree.leaves(x))):
        raise InvalidArgumentError(f"{argument} like `{name}`, {described(x)}, but is {described(given)}.")


def check_functions(**functions: Any) -> None:
    """Refuse what is no function, a matrix above all."""
    for name, function in functions.items():
        if hasattr(function, "ndim"):
            raise InvalidTypeError(
                f"`{name}` (an array of shape {jnp.shape(function)}) must be a function of this worker's blocks."
            )
        check_function(name, function)


class Limits(NamedTuple):
    """When an iteration ends: at a tolerance relative to a norm, at another one, or after so many steps."""

    tol: float
    atol: float
    steps: int | None


def checked_limits(tol: Any, atol: Any, maxiter: Any) -> Limits:
    """Return the arguments that say when an iteration ends; refuse what are no numbers, 0 or more."""
    for name, value in {"tol": tol, "atol": atol}.items():
        if not is_real(value) or value < 0:
            raise InvalidArgumentError(f"`{name}` (={value!r}) must be a number, 0 or more, the same on all workers.")
    return Limits(float(tol), float(atol), None if maxiter is None else checked_integer("maxiter", maxiter, 0))


def solved(solve: Callable[..., Any], system: Any, *args: Any) -> tuple[Leaves, Info]:
    """Return the solution that `solve` finds, a function with a derivative of its own, and how it ended.

    To `dj.grad` it is one movement: its second result is an anchor.
    """
    *others, leaves = jax.tree.map(lambda x: reverse_only(x) if is_inexact(x) else x, args)
    with body_scope():
        first, anchor, rest, info = solve(system, *others, [order_after_previous(leaves[0]), *leaves[1:]])
    note_anchor(anchor)
    return [never_transposed(x) for x in (first, *rest)], Info(*map(lax.stop_gradient, info))


def nobody() -> Info:
    """Return what a worker gets that does not take part."""
    return Info(jnp.zeros((), bool), jnp.zeros((), jnp.int32), jnp.zeros(()))


def with_anchor(leaves: Leaves, info: Info) -> tuple[Array, Array, Leaves, Info]:
    """Return the results of a solver's function with a derivative of its own."""
    return leaves[0], tie(nothing(leaves[0].dtype), *leaves), leaves[1:], info


def cotangents_of(results: tuple[Array, Array, Leaves, Any], leaves: Leaves) -> Leaves:
    """Return the cotangents of the solution's `leaves`, from those of all that `with_anchor` returned."""
    first, of_anchor, rest, _ = results
    given = [dx.astype(x.dtype) for dx, x in zip((first, *rest), leaves, strict=True)]
    return [tie(given[0], of_anchor), *given[1:]]


def tied_together(cotangents: Any, *others: Any) -> Any:
    """Return `cotangents`, each of which depends on all of them, and on `others`, by zero.

    So whatever is differentiated again on some worker, all of it is, as on the others.
    """

    def is_tied(x: Any) -> bool:
        return x.dtype != jax.dtypes.float0 and is_inexact(x)

    found = list(filter(is_tied, jax.tree.leaves((cotangents, others))))
    anchor = tie(nothing(found[0].dtype), *found)
    return jax.tree.map(lambda x: tie(x, anchor) if is_tied(x) else x, cotangents)
